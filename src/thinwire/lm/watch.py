"""Calls a function at intervals in a thread beside training."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.records.events import EventLog

LOOK_SECONDS = 5.0  # seconds between two counts of the open files
FULL_SHARE = 0.8  # share of the allowed open files above which a warning is logged
_FILES = Path("/proc/self/fd")


@contextmanager
def watching(look: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """A context in which a thread called `name` calls `look` every `seconds`, until it returns True. The thread ends with the context."""
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
    """A function for `watching` that logs one warning when most of the files are open that this process may open.

    At the limit gloo, which keeps every connection of a stranger, ends the process. The limit is raised to the system's
    maximum.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # macOS reports no limit, but has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def look() -> bool:
        try:
            number = len(list(_FILES.iterdir()))
        except OSError:  # the system does not list them
            return True
        if not 0 < FULL_SHARE * most <= number:
            return False
        log.emit(
            "warning", 0,
            message=f"{number} of at most {most} files of this process are open, and at the limit it ends. Somebody "
            "else may connect to its ports: let only the other replicas reach them (thinwire doctor --firewall "
            "ADDRESS ...), and raise the limit (ulimit -Hn)",
        )  # fmt: skip
        return True

    return look
