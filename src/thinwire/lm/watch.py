"""Look at something again and again beside the thread that trains."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.records.events import EventLog

LOOK_SECONDS = 5.0  # between two counts of the open files
FULL = 0.8  # share of the files that may be open, from which on a warning is logged
_FILES = Path("/proc/self/fd")


@contextmanager
def watching(look: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Within the block, call `look` in a thread called `name`, every `seconds`, until it returns True. The thread ends with the block."""
    over = threading.Event()

    def body() -> None:
        while look() is not True and not over.wait(seconds):
            pass

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def warn_of_open_files(log: EventLog) -> Callable[[], bool]:
    """A look for `watching` that logs one warning when most files that this process may open are open.

    At the limit gloo, which keeps every connection that a stranger makes, ends the process. The limit is raised to what
    the system allows.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS says "no limit" and means another
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def look() -> bool:
        try:
            number = len(list(_FILES.iterdir()))
        except OSError:  # the system does not list them
            return True
        if not 0 < FULL * most <= number:
            return False
        log.emit(
            "warning", 0,
            message=f"{number} of at most {most} files of this process are open, and at the limit it ends. Somebody "
            "else may connect to its ports: let only the other replicas reach them (thinwire doctor --firewall "
            "ADDRESS ...), and raise the limit (ulimit -Hn)",
        )  # fmt: skip
        return True

    return look
