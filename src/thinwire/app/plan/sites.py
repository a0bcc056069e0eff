"""Selects the sites that take part: all subsets of few sites are priced, and of many sites only those that two greedy searches visit.

All sites wait for the slowest machine and the slowest wire, so four numbers of a set count: its size, its slowest machine, its
slowest wire and its longest delay. A closed form of these ranks the sets well enough. One search begins with the fastest machine
and adds the best site again and again; the other begins with all sites and leaves one out each time. The best sets are priced, and
one set of each power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.app.plan.links import Links

ALL_SUBSETS = 6  # sites
MOST_SETS = 16  # most sets of many sites that are priced, without the powers of two
Floats = NDArray[np.float64]
Places = tuple[int, ...]


class Worth(Protocol):
    """Useful tokens a second of K sets of `replicas` sites. `machine`, `wire` and `way` have shape [K] and are the seconds of a sequence
    on the slowest machine, of a byte from each site to each other, and of the longest delay."""

    def __call__(self, replicas: int, machine: Floats, wire: Floats, way: Floats) -> Floats: ...


@dataclass(frozen=True)
class Sites:
    """The sites: `seconds` for a sequence on each, and the number of its kind of machine."""

    links: Links
    seconds: Floats
    machines: Sequence[int]

    def sets(self, able: Places, worth: Worth) -> list[Places]:
        """Sets of the sites that are `able`, large ones first; one of several sets with the same prediction."""
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
        return sorted({*order[:MOST_SETS], *doubling, able}, key=lambda places: (-len(places), places))

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
        """Seconds for a byte between two sites in the slower direction; the longer delay; and seconds for a byte on a site's slower of
        uplink and downlink."""
        rates, delays = self.links.rates, self.links.delays
        return (
            8 / np.minimum(rates, rates.T),
            np.maximum(delays, delays.T),
            8 / np.minimum(self.links.up, self.links.down),
        )

    def _first(self, able: Places, worth: Worth) -> Iterator[tuple[Places, float]]:
        """One set of each size, because all sites are alike."""
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
        wire, way = np.zeros((2, len(self.seconds)))  # the chosen set's values with each site added
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
        """Leave out one site after the other. Only sites that delay the others are tried: those with the slowest machine and slowest
        uplink or downlink, and the ends of the slowest link and of the longest delay."""
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
    """The largest value outside of row and column `one` of a symmetric table."""
    row = table[one].copy()
    table[one] = table[:, one] = 0.0
    most = float(table.max())
    table[one] = table[:, one] = row
    return most
