"""The audit log: a line for each refusal and each change of members, with the event, the member or address, and the reason."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 300  # most characters of one text
FILE_NBYTES = 4 << 20  # most bytes of one file; the previous file is kept, too
LINES, SECONDS = (
    10,
    60.0,
)  # most lines of one event of strangers in this time; all are counted, and one line has their number
_ADDRESSES = 1000  # most addresses of strangers that are counted apart


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
        self._since = time.monotonic()
        self._strangers = Counter[str]()  # by event, in this minute
        self._addresses = Counter[str]()
        self._counted = Counter[tuple[str, str, str]]()  # by event, member and what
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
        """Log an action of a stranger, whose address `who` begins with. Strangers may come often: after `LINES` of one event they are counted."""
        self.flush(SECONDS)
        address = plain(who).partition(" ")[0].rpartition(":")[0]
        self._strangers[event] += 1
        self._addresses[address if len(self._addresses) < _ADDRESSES or address in self._addresses else "others"] += 1
        if self._strangers[event] <= LINES:
            self(event, who, why)

    def count(self, event: str, who: str, what: str, number: int = 1) -> None:
        """Count what a member does too often: one line a minute has the sum."""
        self.flush(SECONDS)
        self._counted[event, who, what] += number

    def flush(self, seconds: float = 0.0) -> None:
        """Write what was counted, if that began more than `seconds` ago. The hub calls it regularly."""
        now = time.monotonic()
        if now - self._since < seconds:
            return
        passed, self._since = now - self._since, now
        strangers, addresses, counted = self._strangers, self._addresses, self._counted
        self._strangers, self._addresses, self._counted = Counter(), Counter(), Counter()
        if any(number > LINES for number in strangers.values()):
            events = ", ".join(f"{event} {number:,}" for event, number in strangers.most_common())
            most = ", ".join(f"{address} {number:,}" for address, number in addresses.most_common(3))
            self("counted", f"{strangers.total():,} strangers in {passed:.0f} s", f"{events}; most from {most}")
        for (event, who, what), number in counted.items():
            self(event, who, f"{number:,} {what} in {passed:.0f} s")
