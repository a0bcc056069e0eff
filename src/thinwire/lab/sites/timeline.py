"""Virtual time with two levels: when a site sends an update to the global server, when the reply is merged, and in which order the
updates of all sites arrive. No tensors, no clock.

A site's own timeline says when it sends and when the reply lands, because the way there and back takes the same time for all sites. So
updates arrive in the order in which they departed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from thinwire.drivers.unequal.rounds import HeldRound
from thinwire.drivers.unequal.timeline import Timeline


@dataclass(frozen=True)
class HeldMerge(HeldRound):
    """The reply of the global server, which a site merges into its model at this time."""


class SiteTimeline(Timeline):
    """The timeline of the replicas of a site, which sends an update after every `apart` rounds of a fragment.

    >>> line = SiteTimeline((1.0,), every=2, fragments=1, quorum=1, grace=0.0, apart=2, trip=1.5)
    >>> [(one.at, type(held).__name__) for _ in range(7) for one in [line.advance()] for held in one.held]
    [(2.0, 'HeldRound'), (4.0, 'HeldRound'), (5.5, 'HeldMerge'), (6.0, 'HeldRound')]
    >>> line.pushes
    deque([4.0])
    """

    def __init__(
        self, slow: Sequence[float], every: int, fragments: int, quorum: int, grace: float,
        apart: int, trip: float, own: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(slow, every, fragments, quorum, grace, 0, own)
        self.pushes: deque[float] = deque()  # the times at which updates departed
        self._apart, self._trip = apart, trip
        self._since = [0] * fragments
        self._away: dict[int, float] = {}  # by fragment: the time of the reply

    def deadline(self) -> float | None:
        """See `Timeline.deadline`; a reply is an event, too."""
        own = self.rounds.deadline()
        return min([*self._away.values(), *([] if own is None else [own])], default=None)

    def _hold(self, at: float) -> tuple[HeldRound, ...]:
        held = super()._hold(at)
        for one in held:
            self._since[one.fragment] += 1
            if self._since[one.fragment] >= self._apart and one.fragment not in self._away:
                self._since[one.fragment], self._away[one.fragment] = 0, at + self._trip
                self.pushes.append(at)
        merges = tuple(HeldMerge(fragment, at, ()) for fragment, back in sorted(self._away.items()) if back <= at)
        for merge in merges:
            del self._away[merge.fragment]
            self._send(at, merge)
        return held + merges


class Arrivals:
    """The order in which the updates of all sites arrive; updates of the same time in the order of the sites.

    >>> lines = [SiteTimeline((slow,), 2, 1, 1, 0.0, apart=1, trip=0.0) for slow in (1.0, 1.5)]
    >>> order, found = Arrivals(lines), []
    >>> for _ in range(4):
    ...     found.append(order.first({0, 1}))
    ...     order.passed(found[-1])
    >>> found  # at 2, 3, 4 and 6
    [0, 1, 0, 0]
    """

    def __init__(self, lines: Sequence[SiteTimeline]) -> None:
        self._lines = tuple(lines)

    def first(self, sites: Collection[int]) -> int:
        """The one of `sites` whose update arrives next."""
        return min(sites, key=lambda site: (self._at(site), site))

    def passed(self, site: int) -> None:
        """Record that the next update of `site` has arrived."""
        self._lines[site].pushes.popleft()

    def _at(self, site: int) -> float:
        line = self._lines[site]
        while not line.pushes:
            line.advance()
        return line.pushes[0]
