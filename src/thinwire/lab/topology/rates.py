"""Rates of the meetings of neighbours with which the smallest total number of meetings suffices (Nabli, Oyallon, arXiv 2208.00779)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.lab.topology.base import Topology, Weights
from thinwire.lab.topology.clocks import meeting_rates

Floats = NDArray[np.float64]

GAP = 1e-7  # relative distance of the result from the smallest number of meetings, at most
EPS = float(np.finfo(np.float64).eps)
GRID = 4096  # shares of all meetings are rounded to 1/GRID, so that all machines have the same random meetings


def fewest_meetings(topology: Topology, size: int) -> Weights:
    """The rates of edges with the smallest sum for which χ₁·χ₂ ≤ 1/2, the condition of DADAO: an exact convex programme.

        min Σ λ_ij   with   Λ ⪰ t·(I − 11ᵀ/M),   (e_i − e_j)ᵀ·Λ⁺·(e_i − e_j) ≤ t for every edge,   λ ≥ 0,   t free

    Every feasible point has χ₁ ≤ 1/t and χ₂ ≤ t/2, and the best one has both. It is solved by Newton's method on a barrier
    of logarithms, to a duality gap of 1e-7 of the sum.

    Args:
        topology: one that is the same in every round.
        size: number of replicas, at least 2.

    Returns:
        Float64 [size, size], symmetric; [i, j]: number of meetings of i and j while each replica takes one gradient.

    Raises:
        ConfigurationError: the graph is not connected, changes from round to round, or has an edge in one direction only.

    >>> from thinwire.lab.topology import Ring
    >>> round(float(fewest_meetings(Ring(), 8).sum() / 2), 2)
    9.78
    """
    ones, others = np.nonzero(np.triu(meeting_rates(topology, size, 1.0)))
    rates = np.zeros((size, size))
    if len(ones):
        rates[ones, others] = rates[others, ones] = _Barrier.of(ones, others, size).least()
    return rates


def fitted_rates(topology: Topology, size: int, rate: float) -> Weights:
    """Like `meeting_rates`, but each edge has its share of `fewest_meetings`, rounded to 1/4096 of all meetings and never to 0.

    Args:
        topology: one that is the same in every round.
        size: number of replicas.
        rate: number of meetings of a replica in a unit of time, as the mean over all replicas.

    Raises:
        ConfigurationError: the graph is not connected, changes from round to round, or has an edge in one direction only.

    >>> from thinwire.lab.topology import Listed
    >>> fitted_rates(Listed(((0, 1), (1, 2))), 3, rate=2.0).tolist()
    [[0.0, 1.5, 0.0], [1.5, 0.0, 1.5], [0.0, 1.5, 0.0]]
    """
    if size < 2:
        return meeting_rates(topology, size, rate)
    found = fewest_meetings(topology, size)
    shares = np.where(found > 0, np.maximum(1.0, np.round(GRID * found / (found.sum() / 2))), 0.0)
    return np.asarray(shares * (rate * size / shares.sum()), dtype=np.float64)


@dataclass(frozen=True)
class _Barrier:
    """The programme without the direction 11ᵀ, on which Λ is zero: `ends` [M − 1, edges] holds e_i − e_j of each edge."""

    ends: Floats

    @classmethod
    def of(cls, ones: NDArray[np.int64], others: NDArray[np.int64], size: int) -> _Barrier:
        apart = np.zeros((size, len(ones)))
        apart[ones, np.arange(len(ones))], apart[others, np.arange(len(ones))] = 1.0, -1.0
        sums = np.tril(np.ones((size, size - 1)), -1) - np.arange(size - 1, 0, -1) / size
        return cls(np.linalg.qr(sums)[0].T @ apart)

    def least(self) -> Floats:
        """The rates with the smallest sum [edges]."""
        inside = self.ends.shape[0] + 2 * self.ends.shape[1]  # the barrier's parameter
        rates, bound = self._begin()
        worth = float(rates.sum()) / inside  # the weight of the barrier, in meetings
        while True:
            rates, bound = self._centred(rates, bound, worth)
            if inside * worth <= GAP * rates.sum():
                return rates
            worth /= 10

    def _begin(self) -> tuple[Floats, float]:
        """A feasible start: equal rates, and t inside its bounds."""
        rates = np.ones(self.ends.shape[1])
        slowest, widest = self._sides(rates)
        scale = 1.5 * np.sqrt(widest / slowest)
        return rates * scale, float(np.sqrt(slowest * widest))

    def _sides(self, rates: Floats) -> tuple[float, float]:
        """The bounds of t: λ₂ and the largest resistance between neighbours."""
        laplacian = (self.ends * rates) @ self.ends.T
        return float(np.linalg.eigvalsh(laplacian)[0]), float(
            (self.ends * np.linalg.solve(laplacian, self.ends)).sum(0).max()
        )

    def _centred(self, rates: Floats, bound: float, worth: float) -> tuple[Floats, float]:
        """The minimum of the barrier problem, by Newton's method until the decrement is small, or lost in the objective's rounding."""
        for _ in range(100):
            step, decrement = self._newton(rates, bound, worth)
            if decrement < max(1e-9, EPS * float(rates.sum()) / worth):
                break
            now, length = self._value(rates, bound, worth), 1.0
            while (
                length > 1e-10
                and self._value(rates + length * step[:-1], bound + length * step[-1], worth)
                > now - 0.1 * length * decrement
            ):
                length /= 2
            rates, bound = rates + length * step[:-1], bound + length * float(step[-1])
        return rates, bound

    def _value(self, rates: Floats, bound: float, worth: float) -> float:
        """The objective with the barrier; infinite outside of the feasible set."""
        if rates.min() <= 0 or bound <= 0:
            return np.inf
        slowest, widest = self._sides(rates)
        if slowest <= bound or widest >= bound:
            return np.inf
        laplacian = (self.ends * rates) @ self.ends.T
        between = (self.ends * np.linalg.solve(laplacian, self.ends)).sum(0)
        above = float(np.linalg.slogdet(laplacian - bound * np.eye(len(laplacian)))[1])
        return float(rates.sum() / worth - above - np.log(bound - between).sum() - np.log(rates).sum())

    def _newton(self, rates: Floats, bound: float, worth: float) -> tuple[Floats, float]:
        """Newton's step of (rates, t), and the decrement, a bound of the distance to the minimum."""
        laplacian, count = (self.ends * rates) @ self.ends.T, len(rates)
        inverse = np.linalg.inv(laplacian - bound * np.eye(len(laplacian)))
        across = self.ends.T @ inverse @ self.ends
        pulled = np.linalg.solve(laplacian, self.ends)
        resistance = self.ends.T @ pulled
        slack = bound - np.diag(resistance)
        # resistance · diag(1/slack) · resistance, whose rank is below M
        between = pulled.T @ ((self.ends / slack) @ self.ends.T) @ pulled
        lean = np.vstack([resistance**2, np.ones(count)]) / slack  # the gradients of the logarithms of `slack`
        gradient = np.append(1 / worth - np.diag(across) - 1 / rates, np.trace(inverse)) - lean.sum(1)
        hessian = lean @ lean.T
        hessian[:-1, :-1] += across**2 + np.diag(rates**-2.0) + 2 * resistance * between
        mixed = ((inverse @ self.ends) ** 2).sum(0)
        hessian[:-1, -1] -= mixed
        hessian[-1, :-1] -= mixed
        hessian[-1, -1] += (inverse**2).sum()
        step = np.linalg.solve(hessian, -gradient)
        return step, float(-gradient @ step)
