"""Virtual time: computes departures, rounds and landings from given speeds. No tensors, no clock.

Replica m takes its k-th inner step at k·slow[m]. A delta arrives as it departs; a round lands on a replica after the first inner
step that ends `delay` mean inner steps after it was held, or later. Every replica computes the same timeline, and so does the
syncer. No message says when something happened: a run in virtual time depends on speeds and seed, not on the carrier and not on
the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.drivers.unequal.rounds import HeldRound, Quorum, ReportPace, own_every


@dataclass(frozen=True)
class Actions:
    """The actions of a replica after an inner step, in this order. Rounds are given with their number."""

    before: tuple[tuple[int, HeldRound], ...]
    departs: tuple[int, ...]
    after: tuple[tuple[int, HeldRound], ...]


@dataclass(frozen=True)
class Moment:
    """Events at one time: deltas that depart, by replica and fragment, and the rounds that are held."""

    at: float
    departed: tuple[tuple[int, int], ...]
    held: tuple[HeldRound, ...]


class Timeline:
    """All moments of a run, in order.

    >>> line = Timeline((1.0, 2.0), every=3, fragments=1, quorum=2, grace=0.5, delay=0)
    >>> line.every, [(one.at, one.departed, one.held) for _ in range(6) if (one := line.advance()).departed]
    ([4, 2], [(4.0, ((0, 0), (1, 0)), (HeldRound(fragment=0, at=4.0, waited=((0, 0.0), (1, 0.0))),))])
    """

    def __init__(
        self, slow: Sequence[float], every: int, fragments: int, quorum: int, grace: float, delay: int, own: int = -1
    ) -> None:
        speeds = [1 / one for one in slow]
        self.slow, self.latency = tuple(slow), delay * len(speeds) / sum(speeds)
        self.every = [own_every(every, speed, speeds) for speed in speeds]
        self.rounds = Quorum(len(slow), quorum, grace)
        self.steps = [0] * len(slow)
        self._paces = [ReportPace(own, fragments) for own in self.every]
        self._flying: list[set[int]] = [set() for _ in slow]
        self._landing: list[list[tuple[float, int, HeldRound]]] = [[] for _ in slow]
        self._own, self._actions = own, dict[int, Actions]()
        self._held = 0

    def actions(self, step: int) -> Actions:
        """The actions of replica `own` after its inner step `step`; call it once for each step, in order."""
        while step not in self._actions:
            self.advance()
        return self._actions.pop(step)

    def advance(self) -> Moment:
        """The next moment, at which inner steps or a grace end."""
        at = min((taken + 1) * slow for taken, slow in zip(self.steps, self.slow))
        deadline = self.deadline()
        if deadline is not None and deadline < at:
            return Moment(deadline, (), self._hold(deadline))
        ending = [r for r, (taken, slow) in enumerate(zip(self.steps, self.slow)) if (taken + 1) * slow == at]
        before, departs = {}, {}
        for rank in ending:
            self.steps[rank] += 1
            before[rank] = self._land(rank, at)
            departs[rank] = self._depart(rank)
        for rank, fragments in departs.items():
            for fragment in fragments:
                self.rounds.arrived(at, rank, fragment)
        held = self._hold(at)
        for rank in ending:
            after = self._land(rank, at)
            if rank == self._own:
                self._actions[self.steps[rank]] = Actions(before[rank], departs[rank], after)
        return Moment(at, tuple((rank, one) for rank, several in departs.items() for one in several), held)

    def deadline(self) -> float | None:
        """The time of the next event that no inner step causes; None: there is none."""
        return self.rounds.deadline()

    def done(self, rank: int, step: int) -> int:
        """See `done`."""
        return done(self.slow, rank, step)

    def _hold(self, at: float) -> tuple[HeldRound, ...]:
        held = tuple(self.rounds.due(at))
        for one in held:
            self._send(at, one)
        return held

    def _send(self, at: float, held: HeldRound) -> None:
        for landing in self._landing:
            landing.append((at + self.latency, self._held, held))
        self._held += 1

    def _land(self, rank: int, now: float) -> tuple[tuple[int, HeldRound], ...]:
        landing = self._landing[rank]
        due = [(number, held) for at, number, held in landing if at <= now]
        self._landing[rank] = landing[len(due) :]
        for _, held in due:
            for member, waited in held.waited:
                if member == rank:
                    self._flying[rank].discard(held.fragment)
                    self._paces[rank].landed(held.fragment, round(waited / self.slow[rank]))
        return tuple(due)

    def _depart(self, rank: int) -> tuple[int, ...]:
        due = self._paces[rank].due(self.steps[rank], self._flying[rank])
        for fragment in due:
            self._paces[rank].departed(fragment, self.steps[rank], self.every[rank])
        self._flying[rank].update(due)
        return tuple(due)


def done(slow: Sequence[float], rank: int, step: int) -> int:
    """Number of inner steps of all replicas before `rank` can take another after its `step`-th."""
    ahead = (step + 1) * slow[rank]
    return sum(step if other == rank else _before(ahead, one) for other, one in enumerate(slow))


def _before(time: float, slow: float) -> int:
    """Number of positive multiples of `slow` before `time`."""
    count = int(time / slow) + 1
    while count * slow >= time:
        count -= 1
    return count
