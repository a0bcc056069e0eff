"""Virtual time for threads: it stands still while any thread is busy, and jumps when all wait.

So results do not depend on the speed of the machine, and a grace of a minute takes no time. Actions of several threads at the same
virtual time happen in any order.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

Action = Callable[[], None]


class _Wait(NamedTuple):
    who: str
    predicate: Callable[[], bool]
    until: float


class VirtualTime:
    """`now` in seconds, a lock, and waits. Hold the lock (`with time:`) for everything except `now`.

    Time passes only while each participant that has called `enter` (one of its threads) waits here. `after` adds actions for later
    times.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._changed = threading.Condition(threading.RLock())
        self._present: set[str] = set()
        self._waits: dict[int, _Wait] = {}
        self._agenda: list[tuple[float, int, Action]] = []
        self._number = count()

    def __enter__(self) -> VirtualTime:
        self._changed.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._changed.release()

    def notify_all(self) -> None:
        self._changed.notify_all()

    def enter(self, who: str) -> None:
        """From now on, time waits for `who`."""
        self._present.add(who)

    def leave(self, who: str) -> None:
        """Time waits for `who` no longer."""
        self._present.discard(who)
        self.notify_all()

    def after(self, seconds: float, action: Action = lambda: None) -> None:
        """Run `action` after `seconds`, under the lock."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._number), action))

    def wait_for(self, who: str, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `predicate()` is true, for `seconds` at most (None: no limit); returns its last value."""
        until = float("inf") if seconds is None else self.now + seconds
        number = next(self._number)
        self._waits[number] = _Wait(who, predicate, until)
        try:
            while not predicate():
                if self.now >= until:
                    return False
                if not self._advance():
                    self._changed.wait()
            return True
        finally:
            del self._waits[number]

    def _advance(self) -> bool:
        """Jump to the next action, if all participants wait and no predicate is true."""
        waiting = {wait.who for wait in self._waits.values()}
        if not self._present <= waiting or any(w.predicate() or w.until <= self.now for w in self._waits.values()):
            return False
        times = [self._agenda[0][0]] if self._agenda else []
        times += [wait.until for wait in self._waits.values() if wait.until < float("inf")]
        if not times:
            raise RuntimeError(f"{', '.join(sorted(waiting))} wait for each other, for ever")
        self.now = max(self.now, min(times))
        while self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2]()
        self.notify_all()
        return True
