"""Virtual time for threads: it stands still while any thread is busy, and jumps when all wait.

So results do not depend on the speed of the machine, and a grace of a minute takes no time. Actions of several threads at the same
virtual time happen in any order, or in one that is drawn: then a run can be repeated.
"""

from __future__ import annotations

import heapq
import random
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

    def begin(self, who: str) -> None:
        """The thread of `who`, which has entered, begins."""

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
        self._jump()
        self.notify_all()
        return True

    def _jump(self) -> None:
        """Jump to the next action, or the next end of a wait."""
        times = [self._agenda[0][0]] if self._agenda else []
        times += [wait.until for wait in self._waits.values() if wait.until < float("inf")]
        if not times:
            who = {wait.who for wait in self._waits.values()}
            raise RuntimeError(f"{', '.join(sorted(who))} wait for each other, for ever")
        self.now = max(self.now, min(times))
        while self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2]()


class OrderedTime(VirtualTime):
    """Virtual time in which one participant acts at a time, until it waits; `order` seeds the choice of the next one. So a run with the
    same `order` is the same run. A participant has one thread.
    """

    def __init__(self, order: int) -> None:
        super().__init__()
        self._chance = random.Random(order)
        self._acts = ""  # the participant that acts
        self._begun: set[str] = set()  # those that wait for their first turn

    def begin(self, who: str) -> None:
        """See `VirtualTime`."""
        self._begun.add(who)
        if not self._acts and self._begun == self._present:
            self._choose()
        self._await_turn(who)

    def leave(self, who: str) -> None:
        """See `VirtualTime`."""
        super().leave(who)
        if self._present:
            self._choose()

    def wait_for(self, who: str, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        """See `VirtualTime`. Others may act before it returns, even if `predicate()` is true."""
        until = float("inf") if seconds is None else self.now + seconds
        number = next(self._number)
        self._waits[number] = _Wait(who, predicate, until)
        try:
            while True:
                self._choose()
                self._await_turn(who)
                if (answer := predicate()) or self.now >= until:
                    return answer
        finally:
            del self._waits[number]

    def _await_turn(self, who: str) -> None:
        while self._acts != who:
            self._changed.wait()
        self._begun.discard(who)

    def _choose(self) -> None:
        """Let one of those act that need not wait any longer, or that begin."""
        while True:
            over = {w.who for w in self._waits.values() if w.predicate() or w.until <= self.now}
            if able := sorted(self._present & (over | self._begun)):
                self._acts = self._chance.choice(able)
                self.notify_all()
                return
            self._jump()
