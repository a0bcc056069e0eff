"""Which sites take part: of few sites all subsets are priced, of many those that two greedy searches come through.

All wait for the slowest machine and the slowest wire, so of a set of sites four numbers count: how many they are, their
slowest machine, their slowest wire and their longest way. What a setting is worth on them has a closed form, which is
near enough to rank sets by. One search begins with the fastest machine and adds the site with which the set is worth
most; the other begins with all and leaves one out. The sets that are worth most are priced, and one of each power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.plan.links import Links

ALL_SUBSETS = 6  # sites
MOST = 16  # sets of many sites that are priced, beside the powers of two
Floats = NDArray[np.float64]
Places = tuple[int, ...]


class Worth(Protocol):
    """Useful tokens a second of sets [K] of so many replicas, with seconds [K] for a sequence on the slowest machine, for a byte from
    each to each other, and on the longest way."""

    def __call__(self, replicas: int, machine: Floats, wire: Floats, way: Floats) -> Floats: ...


@dataclass(frozen=True)
class Sites:
    """What each site brings: `seconds` for a sequence, and the number of its kind of machine."""

    links: Links
    seconds: Floats
    machines: Sequence[int]

    def sets(self, able: Places, worth: Worth) -> list[Places]:
        """Sets of the sites that are `able`, large ones first; of those of which the same is predicted, one."""
        if len(able) <= ALL_SUBSETS:
            unlike: dict[object, Places] = {}
            for places in (places for count in range(len(able), 0, -1) for places in combinations(able, count)):
                unlike.setdefault(self._likeness(places), places)
            return list(unlike.values())
        found: dict[Places, float] = {}
        chains = (
            [self._first(able, worth)]
            if self._alike(able)
            else [self._joining(able, worth), self._leaving(able, worth)]
        )
        for places, value in (step for chain in chains for step in chain):
            found[tuple(sorted(places))] = value
        order = sorted(found, key=lambda places: -found[places])
        by_count = {len(places): places for places in reversed(order)}
        doubling = [by_count[1 << i] for i in range(len(able).bit_length())]
        return sorted({*order[:MOST], *doubling, able}, key=lambda places: (-len(places), places))

    def _likeness(self, places: Places) -> object:
        among, links = np.ix_(places, places), self.links
        facts = links.rates[among], links.delays[among], np.array([(links.up[p], links.down[p]) for p in places])
        return tuple(self.machines[p] for p in places), *(fact.tobytes() for fact in facts)

    def _alike(self, able: Places) -> bool:
        between, delays, own = self._tables()
        among = np.array(able)[:, None], np.array(able)
        others = ~np.eye(len(able), dtype=bool)
        facts = between[among][others], delays[among][others], own[among[1]], self.seconds[among[1]]
        return not any(float(np.ptp(fact)) for fact in facts)

    def _tables(self) -> tuple[Floats, Floats, Floats]:
        """Seconds for a byte between two sites, whichever direction is slower; the longer delay; and a site's own slower way."""
        rates, delays = self.links.rates, self.links.delays
        return (
            8 / np.minimum(rates, rates.T),
            np.maximum(delays, delays.T),
            8 / np.minimum(self.links.up, self.links.down),
        )

    def _first(self, able: Places, worth: Worth) -> Iterator[tuple[Places, float]]:
        """All are alike, so only their number counts."""
        between, delays, own = self._tables()
        one, two = able[:2]
        for count in range(1, len(able) + 1):
            wire = max(between[one, two], (count - 1) * own[one]) if count > 1 else 0.0
            facts = (np.array([fact]) for fact in (self.seconds[one], wire, delays[one, two] if count > 1 else 0.0))
            yield able[:count], float(worth(count, *facts)[0])

    def _joining(self, able: Places, worth: Worth) -> Iterator[tuple[Places, float]]:
        between, delays, own = self._tables()
        left = np.array(able)
        chosen: list[int] = []
        wire, way = np.zeros((2, len(self.seconds)))  # of the chosen with each site
        machine, through = self.seconds, own
        while len(left):
            wires = np.maximum(wire, len(chosen) * through)[left]
            values = worth(len(chosen) + 1, machine[left], wires, way[left])
            one = int(left[values.argmax()] if chosen else left[machine[left].argmin()])
            chosen.append(one)
            yield tuple(chosen), float(values[left == one][0])
            left = left[left != one]
            machine, through = np.maximum(machine, machine[one]), np.maximum(through, through[one])
            wire = np.maximum(np.maximum(wire, wire[one]), between[one])
            way = np.maximum(np.maximum(way, way[one]), delays[one])

    def _leaving(self, able: Places, worth: Worth) -> Iterator[tuple[Places, float]]:
        """Only who holds the others up can help by leaving: the slowest machine and way, the ends of the slowest link and longest way."""
        between, delays, own = self._tables()
        outside = np.setdiff1d(np.arange(len(own)), able)
        for table in (between, delays):
            table[outside] = table[:, outside] = 0.0
        left = np.array(able)
        while len(left) > 1:
            ends = [np.unravel_index(table.argmax(), table.shape) for table in (between, delays)]
            holding = (left[self.seconds[left].argmax()], left[own[left].argmax()], *ends[0], *ends[1])
            tried = [int(one) for one in dict.fromkeys(holding) if one in left]
            facts = []
            for one in tried:
                rest = left[left != one]
                wire = max(_without(between, one), (len(rest) - 1) * own[rest].max())
                facts.append((self.seconds[rest].max(), wire, _without(delays, one)))
            values = worth(len(left) - 1, *np.array(facts).T)
            one = tried[int(values.argmax())]
            left = left[left != one]
            for table in (between, delays):
                table[one] = table[:, one] = 0.0
            yield tuple(int(place) for place in left), float(values.max())


def _without(table: Floats, one: int) -> float:
    """The largest that is not in this row and column of a symmetric table."""
    row = table[one].copy()
    table[one] = table[:, one] = 0.0
    most = float(table.max())
    table[one] = table[:, one] = row
    return most
