"""Meetings of neighbours: a Poisson clock on every edge, and the speed of agreement that follows from its rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.topology.base import Topology, Weights, check_size
from thinwire.rng import derive


@dataclass(frozen=True)
class PairEvent:
    """A meeting of two replicas over a fragment at time `at`: the `number`-th meeting of the unit of time `unit`.

    Args:
        at: time, a number of units.
        unit: number of the unit of time, from 0.
        number: number of the meeting in its unit, from 0.
        fragment: number of the fragment, from 0.
        one, other: ranks of the two replicas.

    >>> PairEvent(at=3.25, unit=3, number=0, fragment=0, one=1, other=2).unit
    3
    """

    at: float
    unit: int
    number: int
    fragment: int
    one: int
    other: int


@dataclass(frozen=True)
class Clocks:
    """Independent Poisson clocks on the edges, separate for each fragment; a pure function of `seed`.

    Args:
        rates: [size, size], symmetric: [i, j] is the mean number of meetings of i and j in a unit of time.
        fragments: number of fragments.
        seed: seed of all meetings.

    >>> clocks = Clocks(np.array([[0.0, 2.0], [2.0, 0.0]]))
    >>> sum(len(clocks.within(unit)) for unit in range(1000)) / 1000 > 1.8
    True
    """

    rates: Weights
    fragments: int = 1
    seed: int = 0

    def within(self, unit: int) -> list[PairEvent]:
        """All meetings from time `unit` to `unit` + 1, in order of time."""
        ones, others = np.nonzero(np.triu(self.rates))
        rates = self.rates[ones, others]
        total, found = float(rates.sum()), []
        for fragment in range(self.fragments if total else 0):
            rng = np.random.default_rng(derive(self.seed, "meetings", fragment, unit))
            count = int(rng.poisson(total))
            edges = rng.choice(len(rates), count, p=rates / total)
            found += [(float(at), fragment, int(edge)) for at, edge in zip(rng.random(count), edges)]
        found.sort()
        return [
            PairEvent(unit + at, unit, number, fragment, int(ones[edge]), int(others[edge]))
            for number, (at, fragment, edge) in enumerate(found)
        ]


def meeting_rates(topology: Topology, size: int, rate: float) -> Weights:
    """Equal rates of all edges, with which a replica has `rate` meetings in a unit of time, as the mean over all replicas.

    Args:
        topology: one that is the same in every round.
        size: number of replicas.
        rate: number of meetings of a replica in a unit of time.

    Raises:
        ConfigurationError: the graph is not connected, changes from round to round, or has an edge in one direction only.

    >>> from thinwire.lab.topology import Ring
    >>> meeting_rates(Ring(), 3, rate=2.0).tolist()
    [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    if not topology.fixed:
        raise ConfigurationError(
            f"{topology}: a graph with the same edges in every round is needed; choose Ring(), Complete(), "
            "RandomRegular(3) or another fixed graph."
        )
    check_size(topology, size)
    edges = topology.edges(size)
    if (edges != edges.T).any():
        one, other = (int(index) for index in np.argwhere(edges & ~edges.T)[0])
        raise ConfigurationError(
            f"{topology}: replica {one} sends to {other}, which does not send to {one}; both replicas of a meeting send, so edges in both directions "
            "are needed; choose Ring(), RandomRegular(3) or the method sgp."
        )
    return np.asarray(edges * (rate * size / max(1, edges.sum())), dtype=np.float64)


def resistances(rates: Weights) -> tuple[float, float]:
    """χ₁ and χ₂ of meetings at these rates (Nabli, Oyallon, arXiv 2208.00779; Nabli et al., arXiv 2306.08289).

        Λ = Σ λ_ij·(e_i − e_j)(e_i − e_j)ᵀ,   χ₁ = 1 / λ₂(Λ),   χ₂ = ½·max over edges of (e_i − e_j)ᵀ·Λ⁺·(e_i − e_j)

    1 / χ₁ is the rate at which plain averaging converges; χ₂ is half of the largest resistance between neighbours.

    Args:
        rates: [size, size], symmetric: number of meetings of two replicas in a unit of time.

    >>> ring = np.roll(np.eye(16), 1, 1) / 2
    >>> [round(one, 3) for one in resistances(ring + ring.T)]
    [13.137, 0.938]
    """
    if len(rates) < 2:
        return 0.0, 0.0
    laplacian = np.diag(rates.sum(1)) - rates
    inverse = np.linalg.pinv(laplacian, rcond=1e-10, hermitian=True)  # its 0 is up to 1e-14 of the largest, by rounding
    diagonal = np.diag(inverse)
    between = diagonal[:, None] + diagonal - 2 * inverse
    return float(1 / np.linalg.eigvalsh(laplacian)[1]), float(between[rates > 0].max() / 2)
