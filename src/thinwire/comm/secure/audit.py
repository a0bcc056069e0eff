"""The audit log: a line for each refusal and each change of members, with the event, the member or address, and the reason."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 300  # most characters of one text
FILE_NBYTES = 4 << 20  # most bytes of one file; the previous file is kept, too
STRANGERS_LINES, STRANGERS_SECONDS = 50, 10.0  # most lines about strangers in this time; further ones are counted


def plain(text: object) -> str:
    """Text from elsewhere as one short line of ASCII; all other characters are escaped.

    >>> print(plain("a\\x1b[31mb\\n"))
    a\\x1b[31mb\\n
    """
    return ascii(str(text)[:LONGEST])[1:-1]


class AuditLog:
    """Writes lines to `path`, which only its owner can read, and calls `say` with them. At most twice `FILE_NBYTES` are kept. A line that
    cannot be written is only said, with the reason.
    """

    def __init__(self, path: Path, say: Callable[[str], object] = lambda line: None) -> None:
        self._path, self._say, self._lock = path, say, threading.Lock()
        path.touch(0o600)
        self._since, self._lines, self._left_out = 0.0, 0, 0
        self._failing = set[str]()

    def __call__(self, event: str, who: object, why: object = "") -> None:
        """Write a line: the event, the member or address, and the reason."""
        line = f"{event} {plain(who)}" + (f": {plain(why)}" if why else "")
        with self._lock:
            try:
                self._write(line)
            except OSError as error:
                line += f" (this line is not in the audit log: {plain(error)})"
        self._say(line)

    def _write(self, line: str) -> None:
        self._path.touch(0o600)
        if self._path.stat().st_size > FILE_NBYTES:
            self._path.replace(self._path.with_suffix(".1.txt"))
            self._path.touch(0o600)
        with self._path.open("a") as file:
            file.write(time.strftime("%Y-%m-%dT%H:%M:%SZ ", time.gmtime()) + line + "\n")

    @contextmanager
    def repeated(self, what: str) -> Iterator[None]:
        """A context of work that is done regularly. If the disk fails, the next time tries again; a line says so once."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if what not in self._failing:
                self._failing.add(what)
                self("cannot write", what, f"{error}; make room on its disk, it is tried again until then")
        else:
            self._failing.discard(what)

    def stranger(self, event: str, who: object, why: object = "") -> None:
        """Log an action of a stranger. Strangers may come often, so few lines are written and the rest is counted."""
        now = time.monotonic()
        if now - self._since > STRANGERS_SECONDS:
            left_out, self._since, self._lines, self._left_out = self._left_out, now, 0, 0
            if left_out:
                self("refused", "others unknown", f"{left_out} more")
        self._lines += 1
        if self._lines <= STRANGERS_LINES:
            self(event, who, why)
        else:
            self._left_out += 1
