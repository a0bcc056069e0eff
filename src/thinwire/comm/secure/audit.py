"""One line for everything that the hub refuses or that changes who is there: what, who, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

LONGEST = 300  # characters of one text
FILE_NBYTES = 4 << 20  # of one file; the one before it is kept, too


def plain(text: object) -> str:
    """Text from elsewhere on one line: ASCII alone, everything else spelled out, and not for long.

    >>> print(plain("a\\x1b[31mb\\n"))
    a\\x1b[31mb\\n
    """
    return ascii(str(text)[:LONGEST])[1:-1]


class AuditLog:
    """Lines in `path`, for its owner alone, and to `say`; at most twice `FILE_NBYTES` are kept."""

    def __init__(self, path: Path, say: Callable[[str], object] = lambda line: None) -> None:
        self._path, self._say, self._lock = path, say, threading.Lock()
        path.touch(0o600)

    def __call__(self, event: str, who: object, why: object = "") -> None:
        """Write a line: what happened, to whom, and why."""
        line = f"{event} {plain(who)}" + (f": {plain(why)}" if why else "")
        with self._lock:
            if self._path.stat().st_size > FILE_NBYTES:
                self._path.replace(self._path.with_suffix(".1.txt"))
                self._path.touch(0o600)
            with self._path.open("a") as file:
                file.write(time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime()) + line + "\n")
        self._say(line)
