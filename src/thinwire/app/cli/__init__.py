"""The `thinwire` command: one verb, one file."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from textwrap import fill

from thinwire.app.cli.streams import outliving_their_reader
from thinwire.app.cli.verbs import verb as verb_of
from thinwire.app.cli.verbs import verbs
from thinwire.app.records.printable import printable_lines, reason
from thinwire.app.trainer.signals import ending_in_time, handled
from thinwire.choices import listed, nearest
from thinwire.errors import JobError, ThinwireError
from thinwire.registered import VERBS, absent
from thinwire.trust import commanded
from thinwire.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb of the `thinwire` command.

    Args:
        arguments: the verb and its options; None: those of this process.

    Returns:
        The exit code: 0; 2, the command line is wrong, or names what is not there; 3, the training has diverged; 1, anything else that
        failed; 128 + the number of the signal that stopped it (130 after Ctrl-C).

    >>> import contextlib, io
    >>> with contextlib.redirect_stdout(io.StringIO()) as printed:
    ...     code = main(["--version"])
    >>> code, printed.getvalue().strip() == __version__
    (0, True)
    """
    with outliving_their_reader():
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        except ThinwireError as error:  # a package that declares a verb cannot be loaded
            print(printable_lines(f"thinwire: {reason(error)}"), file=sys.stderr)
            return 2


_began = [time.time()]  # the time of day at which the command began


_interrupted = [False]  # whether a signal has ended the verb before its work was done, and nothing is to be saved


def interrupted() -> bool:
    """Whether a signal has ended the verb, with nothing left to save or close."""
    return _interrupted[0]


def began() -> float:
    """The time of day at which the command of this process began."""
    return _began[0]


def _run(arguments: list[str]) -> int:
    _began[:] = [time.time()]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    verb, *rest = arguments
    found = verb_of(verb)
    if found is None:
        there = [name for name in verbs() if "." not in name]
        said = f"{verb!r} is no verb{nearest(verb, there)}; there are {listed(there)}. `thinwire --help` explains them.{absent(VERBS)}"
        print(f"thinwire: {printable_lines(said)}", file=sys.stderr)
        return 2
    try:
        # SIGTERM and SIGHUP (a closed terminal) end a verb like Ctrl-C, so that it cleans up; one that trains has its own handler
        with (
            handled(_end, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
            ending_in_time(f"thinwire {verb}: interrupted"),
            commanded(rest, reads=found.reads),
        ):
            return int(found.load().main(rest))
    except JobError as error:  # an error in the user's own file: only its line is shown
        print(printable_lines(str(error)), file=sys.stderr)
        return 1
    except ThinwireError as error:
        print(printable_lines(f"thinwire {verb}: {reason(error)}"), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except OSError as error:  # a full disk, a missing folder
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        what += ", and a folder is needed" if isinstance(error, FileExistsError) else ""
        said = f"thinwire {verb}: {what}. Check the path, its permissions and the free space."
        print(printable_lines(said), file=sys.stderr)
        return 2 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 1
    except KeyboardInterrupt as stop:
        print(f"thinwire {verb}: interrupted", file=sys.stderr)
        _interrupted[:] = [True]
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)


def _usage() -> str:
    named = {name: verb.about for name, verb in verbs().items() if "." not in name}
    lines = [
        "thinwire: train one model on many replicas joined by thin links",
        "",
        "usage: thinwire VERB [options]      (thinwire VERB --help shows the options)",
        "",
        *(fill(text, 79, initial_indent=f"  {verb:<13}", subsequent_indent=" " * 15) for verb, text in named.items()),
        "",
        "Every verb takes --json: progress goes to stderr, stdout ends with one JSON.",
    ]
    return "\n".join(lines)


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)
