"""Decides when a round is held, and which deltas it has, by quorum and grace. A pure function of arrival times.

Deltas of a fragment wait until `quorum` replicas have sent one. Then the round waits for other replicas only if their next delta is
expected soon:

    expected(m) = when m last sent this fragment + mean of its intervals + 2 · their mean deviation
    the round is held when no expected(m) is within the next `grace` · mean interval of the replicas that have sent

Both means are moving averages, like those of TCP's round-trip time, so no time is fixed. They begin with the time of the first delta.
The first round of a fragment waits for replicas that have not sent yet too: one grace, and at most as long again as the first deltas
took. Nobody knows their weights then, so without them the round would count only a part of the others' progress. A dead replica costs
one grace; after that its expected time is in the past. Replicas continue to train while a round waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_GAIN = 0.25


@dataclass
class Interval:
    """The intervals at which a replica sends a fragment."""

    last: float
    mean: float
    deviation: float = 0.0

    def heard(self, now: float) -> None:
        """Record an arrival."""
        gap = now - self.last
        self.deviation += _GAIN * (abs(gap - self.mean) - self.deviation)
        self.mean += _GAIN * (gap - self.mean)
        self.last = now

    @property
    def expected(self) -> float:
        """The latest time at which the next delta is expected."""
        return self.last + self.mean + 2 * self.deviation


@dataclass(frozen=True)
class HeldRound:
    """A round: its fragment, when it was decided, and for each of its deltas the replica and the seconds that it has waited."""

    fragment: int
    at: float
    waited: tuple[tuple[int, float], ...]


@dataclass
class Quorum:
    """The deltas that wait, and the replicas that take part.

    >>> rounds = Quorum(size=3, quorum=2, grace=1.0)
    >>> rounds.arrived(4.0, 0, 0), rounds.due(4.0)
    (None, [])
    >>> rounds.arrived(5.0, 1, 0), rounds.due(5.0), rounds.deadline()  # replica 2 may need as long again as the others did
    (None, [], 8.5)
    >>> rounds.due(8.5)
    [HeldRound(fragment=0, at=8.5, waited=((0, 4.5), (1, 3.5)))]
    """

    size: int
    quorum: int
    grace: float
    patience: float = 0.0
    began: float = 0.0
    there: set[int] = field(default_factory=set)
    intervals: dict[tuple[int, int], Interval] = field(default_factory=dict)
    waiting: dict[int, dict[int, float]] = field(default_factory=dict)  # by fragment and replica: the time of arrival
    begun: set[int] = field(default_factory=set)  # fragments that have had a round

    def __post_init__(self) -> None:
        self.there = self.there or set(range(self.size))

    def arrived(self, now: float, rank: int, fragment: int) -> None:
        """Record that `rank` has sent a delta of `fragment`."""
        before = self.intervals.get((rank, fragment))
        if before is None:
            self.intervals[rank, fragment] = Interval(now, now - self.began)
        else:
            before.heard(now)
        self.waiting.setdefault(fragment, {})[rank] = now

    def lost(self, rank: int) -> None:
        """Record that `rank` has left: rounds no longer wait for it. Deltas that it has sent still count."""
        self.there.discard(rank)

    def due(self, now: float) -> list[HeldRound]:
        """The rounds that must be held now."""
        ready = [one for one in sorted(self.waiting) if (until := self._until(one)) is not None and until <= now]
        return [self._held(fragment, now) for fragment in ready]

    def deadline(self) -> float | None:
        """The time to call `due` again if nothing arrives before; None: not needed."""
        return min((until for one in self.waiting if (until := self._until(one)) is not None), default=None)

    def overdue(self, rank: int, since: float) -> float:
        """The time until which the syncer waits for the last message of `rank`, which was asked for at `since`: twice as long as one of its
        deltas takes, and at least `patience`.
        """
        longest = [one.mean + 2 * one.deviation for (of, _), one in self.intervals.items() if of == rank]
        return since + max(self.patience, 2 * max(longest, default=since - self.began))

    def _held(self, fragment: int, now: float) -> HeldRound:
        here = self.waiting.pop(fragment)
        self.begun.add(fragment)
        return HeldRound(fragment, now, tuple((rank, now - here[rank]) for rank in sorted(here)))

    def _until(self, fragment: int) -> float | None:
        """The time at which the round of `fragment` is held if no other delta arrives; None: there is no quorum."""
        here = self.waiting[fragment]
        missing = self.there - here.keys()
        enough = max(1, min(self.quorum, len(self.there)))
        if len(here) < enough:
            return None
        opened = sorted(here.values())[enough - 1]
        period = sum(self.intervals[rank, fragment].mean for rank in here) / len(here)
        last = opened + self.grace * period
        expected = [one.expected for rank in missing if (one := self.intervals.get((rank, fragment)))]
        if fragment not in self.begun and len(expected) < len(missing):
            expected.append(min(min(here.values()) + period, last))
        return max([opened, *(at for at in expected if at <= last)])


def own_every(every: int, own: float, speeds: Sequence[float]) -> int:
    """H of a replica that takes `own` inner steps per second, among replicas of these `speeds`. The mean over all replicas is `every`, and a
    period takes the same time on each, so that all report equally often.

    >>> [own_every(30, own, [4.0, 2.0, 1.0]) for own in (4.0, 2.0, 1.0)]
    [51, 26, 13]
    """
    return max(1, round(every * len(speeds) * own / sum(speeds)))


class ReportPace:
    """The inner steps of a replica after which its fragments depart: at first staggered, H steps apart. After a round a fragment departs
    later by the time that its last delta waited for others, so that next time all arrive together.
    """

    def __init__(self, every: int, fragments: int) -> None:
        self.next = [every + place * every // fragments for place in range(fragments)]

    def due(self, step: int, flying: set[int]) -> list[int]:
        """The fragments that depart after `step`. A fragment in flight does not depart again: its progress is sent with the next delta."""
        return [fragment for fragment, at in enumerate(self.next) if at <= step and fragment not in flying]

    def departed(self, fragment: int, step: int, every: int) -> None:
        self.next[fragment] = step + every

    def landed(self, fragment: int, steps_waited: int) -> None:
        self.next[fragment] += steps_waited
