"""Finds slow replicas and links, round after round, from the records of all replicas.

A *way* is a pair of a sender and a receiver. It is *hot* in a round if three things hold. Its ratio (the time it took over the time
it usually takes) is more than `ratio` times the median of all ways. Its robust score is more than `score`. And it takes longer than
usual by at least `seconds` and at least an inner step, because a busy machine alone may delay a thread so long. It is *cold* if it
is certainly not hot; otherwise the round does not *tell*. A way is reported if it was hot in `rounds` rounds or more, and in two
thirds of the last 2 × `rounds` rounds that tell, and if these span at least `lasting` seconds. The report names

    all ways out of a replica, or all but one     its sender side
    all ways into it, or all but one              its receiver side
    both                                          the replica's connections
    one way                                       that link

A replica is slow by itself if its own seconds per inner step (without its waits for others) stand out in the same manner, and
their median over those rounds does too. So a replica that waits for others is never reported. Rounds that depart together, when
training ends or resumes, are skipped, because they share the link and take longer.

Source: C4D (arXiv 2406.04594). *Differs*: ways are compared with their own past, not with each other, because links are not alike.
A message that the receiver noticed late, because it read others first, does not count against its sender.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median, median_low
from typing import NamedTuple

from thinwire.app.diagnosis.attribute import attribute
from thinwire.app.diagnosis.findings import Finding, Side, Syndrome
from thinwire.app.diagnosis.measure import Cell, Reading, Usual, stamps
from thinwire.errors import ConfigurationError
from thinwire.exchange.record import Record

MAD = 1.4826  # standard deviation of a normal variable over its median absolute deviation
FLOOR = 0.1  # least deviation of the ratios: no link is steadier
LATEST = 5  # readings of a way that the matrix shows
STEP = 1e-3  # seconds: smaller differences between inner steps are chance


@dataclass(frozen=True)
class Rules:
    """When a finding is reported. The top of this file states the conditions.

    Args:
        ratio: factor by which something must be slower than usual.
        score: number of mean deviations by which it must be slower than usual.
        seconds: seconds by which it must be slower than usual.
        rounds: number of rounds that must show it.
        known: number of rounds of a fragment after which it is known what is usual.
        lasting: seconds from the first to the last of the rounds that show it.

    Raises:
        ConfigurationError: a number is out of its range.

    >>> Rules(rounds=12).rounds
    12
    """

    ratio: float = 2.0
    score: float = 5.0
    seconds: float = 0.01
    rounds: int = 6
    known: int = 4
    lasting: float = 5.0

    def __post_init__(self) -> None:
        numbers = (self.ratio, self.score, self.seconds, self.lasting)
        if not all(isfinite(n) for n in numbers) or self.ratio <= 1 or self.score <= 0 or min(numbers) < 0:
            raise ConfigurationError(f"{self}: a ratio above 1, a positive score and no negative seconds are needed.")
        if self.rounds < 2 or self.known < 2:
            raise ConfigurationError(
                f"{self}: at least 2 rounds are needed, because one slow round is chance, and at least 2 known."
            )

    def watch(self) -> Watch:
        """A watch by these rules that begins now."""
        return Watch(self)


class _Told(NamedTuple):
    """What one round shows of a way, or of a replica."""

    round: int
    at: float
    hot: bool
    seconds: float
    usual: float


class _Past(deque[_Told]):
    """The last rounds that tell whether one way, or one replica, is slow."""

    @property
    def slow(self) -> bool:
        """Whether two of the last three rounds were hot."""
        return sum(told.hot for told in list(self)[-3:]) >= 2

    @property
    def perhaps(self) -> bool:
        return self[-1].hot or self.slow


class _Lasting(NamedTuple):
    """What is hot in two thirds of the last rounds: the first and the last hot round, and medians of their seconds."""

    first: int
    last: int
    seconds: float
    usual: float
    when: str

    @classmethod
    def of(cls, told: Sequence[_Told], rules: Rules) -> _Lasting | None:
        """Return None if less than two thirds of the rounds `told` were hot, or not for long enough."""
        hot = [one for one in told if one.hot]
        rounds, all_rounds = (sorted({one.round for one in ones}) for ones in (hot, told))
        at = [one.at for one in hot]
        if 3 * len(hot) < 2 * len(told) or len(rounds) < rules.rounds or max(at) - min(at) < rules.lasting:
            return None
        seconds, usual = (median(getattr(one, what) for one in hot) for what in ("seconds", "usual"))
        when = f"in {len(rounds)} of the last {len(all_rounds)} rounds with a clear result"
        return cls(rounds[0], rounds[-1], seconds, usual, when)


class Watch:
    """Finds slow links and slow replicas, round after round. Its memory does not grow with the run.

    Args:
        rules: when a finding is reported; None: the defaults.

    >>> watch = Watch()
    >>> watch.add([Record("0", 0, 0, 0.1, True), Record("1", 0, 0, 0.1, True)])
    []
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules, self.count = rules or Rules(), 0
        # the last readings of every way
        self.latest: dict[Cell, deque[Reading]] = defaultdict(lambda: deque(maxlen=LATEST))
        self._usual = Usual(self.rules.known)
        self._ways: dict[Cell, _Past] = defaultdict(self._past)
        self._own: dict[str, _Past] = defaultdict(self._past)
        self._began: dict[str, float] = {}  # when the last round began, on each replica's clock
        self._now = 0.0  # seconds since the first round, by the median of the clocks
        # seconds of an inner step: the median of the replicas
        self._steps: deque[float] = deque(maxlen=2 * self.rules.rounds)

    def _past(self) -> _Past:
        return _Past(maxlen=2 * self.rules.rounds)

    def add(self, records: Sequence[Record]) -> list[Finding]:
        """Take the records of one round, as many as there are. Returns what has been slow for long enough."""
        names = sorted({name for record in records for name in record.group})
        records = [record for record in records if record.scheduled]
        self._pass_time(records)
        found = stamps(records)
        readings = self._usual.read(found)
        hot, cold = self._judge(readings, len(names))
        for cell in hot | cold:
            reading = readings[cell]
            self.latest[cell].append(reading)
            told = _Told(self.count, self._now, cell in hot, reading.usual + reading.least, reading.usual)
            self._ways[cell].append(told)
        for cell, seen in found.items():
            known = readings.get(cell)
            if known is None or (cell in cold and known.most < (self.rules.ratio - 1) * known.usual):
                self._usual.learn(cell, seen)
        self._take_own({record.name: record.own_seconds for record in records if record.own_seconds > 0})
        self.count += 1
        return self._slow_replicas(names) + self._slow_ways(names)

    def forget(self, name: str) -> None:
        """Forget replica `name`, which has left."""
        self._own.pop(name, None)
        for cell in [cell for cell in self._ways if name in cell]:
            del self._ways[cell]

    def _pass_time(self, records: Sequence[Record]) -> None:
        began = {record.name: record.sent[0].begin for record in records if record.sent}
        passed = [at - self._began[name] for name, at in began.items() if name in self._began]
        self._now += max(0.0, median(passed)) if passed else 0.0
        self._began |= began

    def _judge(self, readings: Mapping[Cell, Reading], replicas: int) -> tuple[set[Cell], set[Cell]]:
        """The hot and the cold ways."""
        rules = self.rules
        least = max([rules.seconds, *([median(self._steps)] if self._steps else [])])
        sure = [1 + max(0.0, reading.least) / reading.usual for reading in readings.values()]
        middle = max(1.0, median_low(sure)) if sure and replicas > 2 else 1.0

        def stands_out(longer: float, reading: Reading) -> bool:
            ratio = 1 + longer / reading.usual
            deviation = max(MAD * reading.spread / reading.usual, FLOOR)
            return longer > least and ratio > rules.ratio * middle and (ratio - middle) / deviation > rules.score

        hot = {cell for cell, reading in readings.items() if stands_out(reading.least, reading)}
        cold = {cell for cell, reading in readings.items() if not stands_out(reading.most, reading)}
        return hot, cold

    def _take_own(self, seconds: Mapping[str, float]) -> None:
        if seconds:
            self._steps.append(median_low(seconds.values()))
        for name, own in seconds.items():
            others = [value for other, value in seconds.items() if other != name]
            if not others:
                continue
            usual = median_low(others)
            deviation = max(MAD * median(abs(value - usual) for value in others), FLOOR * usual)
            hot = own > self.rules.ratio * usual and own - usual > max(STEP, self.rules.score * deviation)
            self._own[name].append(_Told(self.count, self._now, hot, own, usual))

    def _slow_ways(self, names: Sequence[str]) -> list[Finding]:
        there = {cell: past for cell, past in self._ways.items() if set(cell) <= set(names)}
        slow, perhaps = ([c for c, p in there.items() if getattr(p, what)] for what in ("slow", "perhaps"))
        findings = []
        for cause in attribute(slow, names, perhaps):
            since = self.count - 2 * self.rules.rounds
            so = _Lasting.of([told for c in cause.cells for told in there[c] if told.round >= since], self.rules)
            if so is not None:
                what = f"a message took {so.seconds / so.usual:.1f} times as long as it usually takes there, {so.when}"
                figures = (so.first, so.last, so.seconds, so.usual, what)
                findings.append(Finding(Syndrome.SLOW_LINK, cause.side, cause.who, cause.both, *figures))
        return findings

    def _slow_replicas(self, names: Sequence[str]) -> list[Finding]:
        findings = []
        for name, own in sorted(self._own.items()):
            so = _Lasting.of(own, self.rules)
            usually = self.rules.ratio * median(told.usual for told in own)
            if name in names and so is not None and median(told.seconds for told in own) > usually:
                what = f"an inner step took it {so.seconds / so.usual:.1f} times as long as the others, {so.when}"
                figures = (so.first, so.last, so.seconds, so.usual, what)
                findings.append(Finding(Syndrome.SLOW_REPLICA, Side.REPLICA, (name,), False, *figures))
        return findings
