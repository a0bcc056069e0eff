"""Who is slow: round after round, from the records of all replicas.

A way is *hot* in a round if its ratio (what it took over what it usually takes) is more than `ratio` times the median of all
ways, its robust score more than `score`, and it is `seconds` longer at least; *cold* if it surely is not; else this round does not
tell. It counts once it has been hot in two rounds of `rounds` or more without being cold in between. Then

    all ways out of a replica, but one at most    its sender side
    all ways into it, but one at most             its receiver side
    both                                          the replica's connections
    one way                                       that link

A replica is slow by itself if its own seconds an inner step (what it waits for others is not in them) stand out
in the same manner, `rounds` in a row. So a victim, which waits, is never blamed.

Source: C4D (arXiv 2406.04594). *Differs*: ways are compared with their own past, not with each other, since links are not alike;
and a message that the receiver saw late, because it looked at others before, does not count against its sender.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median, median_low
from typing import TypeVar

from thinwire.diagnosis.attribute import attribute
from thinwire.diagnosis.findings import Finding, Side, Syndrome
from thinwire.diagnosis.measure import Cell, Reading, Usual, stamps
from thinwire.diagnosis.records import Record
from thinwire.errors import ConfigurationError

MAD = 1.4826  # the deviation of a normal variable over the median of its absolute deviations
FLOOR = 0.1  # of the ratios' deviation: no link is steadier
LATEST = 5  # readings of a way, for the matrix
STEP = 1e-3  # seconds: a smaller difference between inner steps is chance


@dataclass(frozen=True)
class Rules:
    """When something is worth telling; what they mean is at the top of this file.

    known   rounds of a fragment after which it is known what is usual
    """

    ratio: float = 2.0
    score: float = 5.0
    seconds: float = 0.01
    rounds: int = 3
    known: int = 4

    def __post_init__(self) -> None:
        numbers = (self.ratio, self.score, self.seconds)
        if not all(isfinite(n) for n in numbers) or self.ratio <= 1 or self.score <= 0 or self.seconds < 0:
            raise ConfigurationError(f"{self}: a ratio above 1, a positive score and no negative seconds are needed.")
        if self.rounds < 2 or self.known < 2:
            raise ConfigurationError(f"{self}: at least 2 rounds are needed, one is chance, and at least 2 known.")


@dataclass
class _Streak:
    first: int
    last: int
    hot: int = 0
    seconds: float = 0.0
    usual: float = 0.0


class Watch:
    """Reads one round after another. What it remembers does not grow with the run.

    >>> watch = Watch()
    >>> watch.add([Record("0", 0, 0, 0.1, True), Record("1", 0, 0, 0.1, True)])
    []
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules, self.count = rules or Rules(), 0
        self.latest: dict[Cell, deque[Reading]] = defaultdict(lambda: deque(maxlen=LATEST))  # of every way, that told
        self._usual = Usual(self.rules.known)
        self._ways: dict[Cell, _Streak] = {}
        self._own: dict[str, _Streak] = {}

    def add(self, records: Sequence[Record]) -> list[Finding]:
        """Take the records of one round (those there are); what has been so for long enough by now."""
        found = stamps(records)
        readings = self._usual.read(found)
        names = sorted({name for record in records for name in record.group})
        hot, cold = self._judge(readings, len(names))
        for cell in hot | cold:
            reading = readings[cell]
            self.latest[cell].append(reading)
            _extend(self._ways, cell, self.count, cell in hot, reading.usual + reading.least, reading.usual)
        for cell, seen in found.items():
            known = readings.get(cell)
            if known is None or (cell in cold and known.most < (self.rules.ratio - 1) * known.usual):
                self._usual.learn(cell, seen)
        self._take_own({record.name: record.own_seconds for record in records if record.own_seconds > 0})
        self.count += 1
        return self._slow_replicas(names) + self._slow_ways(names)

    def forget(self, name: str) -> None:
        """`name` has left."""
        self._own.pop(name, None)
        for cell in [cell for cell in self._ways if name in cell]:
            del self._ways[cell]

    def _judge(self, readings: Mapping[Cell, Reading], replicas: int) -> tuple[set[Cell], set[Cell]]:
        """The hot and the cold ones."""
        rules = self.rules
        sure = [1 + max(0.0, reading.least) / reading.usual for reading in readings.values()]
        middle = max(1.0, median_low(sure)) if sure and replicas > 2 else 1.0

        def stands_out(longer: float, reading: Reading) -> bool:
            ratio = 1 + longer / reading.usual
            deviation = max(MAD * reading.spread / reading.usual, FLOOR)
            return (
                longer > rules.seconds and ratio > rules.ratio * middle and (ratio - middle) / deviation > rules.score
            )

        hot = {cell for cell, reading in readings.items() if stands_out(reading.least, reading)}
        cold = {cell for cell, reading in readings.items() if not stands_out(reading.most, reading)}
        return hot, cold

    def _take_own(self, seconds: Mapping[str, float]) -> None:
        for name, own in seconds.items():
            others = [value for other, value in seconds.items() if other != name]
            if not others:
                continue
            usual = median_low(others)
            deviation = max(MAD * median(abs(value - usual) for value in others), FLOOR * usual)
            hot = own > self.rules.ratio * usual and own - usual > max(STEP, self.rules.score * deviation)
            _extend(self._own, name, self.count, hot, own, usual)

    def _slow_ways(self, names: Sequence[str]) -> list[Finding]:
        there = {cell: streak for cell, streak in self._ways.items() if set(cell) <= set(names)}
        lasting = [c for c, s in there.items() if s.hot >= 2 and s.last - s.first + 1 >= self.rules.rounds]
        findings = []
        for cause in attribute(lasting, names, list(there)):
            streaks = [self._ways[cell] for cell in cause.cells]
            seconds, usual = (median(getattr(streak, what) for streak in streaks) for what in ("seconds", "usual"))
            first, last = min(streak.first for streak in streaks), max(streak.last for streak in streaks)
            findings.append(
                Finding(
                    Syndrome.SLOW_LINK,
                    cause.side,
                    cause.who,
                    cause.both,
                    first,
                    last,
                    seconds,
                    usual,
                    f"a message took {seconds / usual:.1f} times as long as it usually takes there",
                )
            )
        return findings

    def _slow_replicas(self, names: Sequence[str]) -> list[Finding]:
        return [
            Finding(
                Syndrome.SLOW_REPLICA,
                Side.REPLICA,
                (name,),
                False,
                own.first,
                own.last,
                own.seconds,
                own.usual,
                f"an inner step took it {own.seconds / own.usual:.1f} times as long as the others",
            )
            for name, own in sorted(self._own.items())
            if own.hot >= self.rules.rounds and name in names
        ]


T = TypeVar("T")


def _extend(streaks: dict[T, _Streak], key: T, now: int, hot: bool, seconds: float, usual: float) -> None:
    if not hot:
        streaks.pop(key, None)
        return
    streak = streaks.setdefault(key, _Streak(now, now))
    streak.last, streak.hot, streak.seconds, streak.usual = now, streak.hot + 1, seconds, usual
