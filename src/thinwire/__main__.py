"""The `thinwire` command: `python -m thinwire`, and the script of that name."""

from __future__ import annotations

import os
import signal
import sys


def _end_loading(number: int, frame: object) -> None:
    # not KeyboardInterrupt: it would end in a traceback, and some module would swallow it
    os.write(2, b"thinwire: interrupted\n")
    os._exit(128 + number)


def run() -> None:
    """Run the command of this process, and end it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end_loading)
    from thinwire.app.cli import interrupted, main
    from thinwire.app.trainer.signals import leave

    code = main()
    if interrupted():
        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
