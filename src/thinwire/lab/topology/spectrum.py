"""The speed with which replicas agree under gossip over a topology."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.lab.topology.base import DRAWN_ROUNDS, Topology, Weights
from thinwire.lab.topology.weights import mixing


@dataclass(frozen=True)
class Spectrum:
    """The speed with which replicas agree under gossip over a topology.

    Args:
        second: |λ₂|, a number from 0 to 1: the second largest eigenvalue of the mixing weights, by magnitude. For a topology that repeats after
            several rounds: the geometric mean per round over a period. For random rounds: the root of the second largest eigenvalue of
            E[WᵀW].
        rounds: number of rounds in a period.

    >>> Spectrum(second=0.5, rounds=1).halving
    1.0
    """

    second: float
    rounds: int

    @property
    def gap(self) -> float:
        """1 − |λ₂|."""
        return 1 - self.second

    @property
    def halving(self) -> float:
        """Rounds after which the distance from the mean has halved."""
        return np.inf if self.second >= 1 else 0.0 if self.second <= 0 else float(-np.log(2) / np.log(self.second))


def spectrum(topology: Topology, size: int) -> Spectrum:
    """The speed with which replicas agree under gossip over `topology`, from the eigenvalues of its mixing weights.

    Args:
        topology: the edges.
        size: number of replicas.

    Raises:
        ConfigurationError: the weights cannot be doubly stochastic.

    >>> from thinwire.lab.topology import Ring
    >>> round(spectrum(Ring(), size=8).gap, 3)
    0.195
    """
    # W is a projection: E[WᵀW] = E[W], whose rows hold 1/g, and (g − 1)/g shared out among the others
    if topology.drawn:
        root = float(np.sqrt(max(0.0, (size / topology.drawn - 1) / (size - 1)))) if size > 1 else 0.0
        return Spectrum(root, 1)
    matrices = [mixing(topology, size, number) for number in range(topology.rounds(size) or DRAWN_ROUNDS)]
    if topology.rounds(size):
        product = np.eye(size)
        for weights in matrices:
            product = weights @ product
        return Spectrum(second(product) ** (1 / len(matrices)), len(matrices))
    squared = second(np.asarray(np.mean([weights.T @ weights for weights in matrices], axis=0)))
    return Spectrum(float(np.sqrt(squared)), 1)


def second(weights: Weights) -> float:
    """|λ₂| of doubly stochastic weights, the second largest eigenvalue by magnitude; 0 where it is rounding error (below 1e-7).

    Args:
        weights: float64 [size, size].

    >>> second(np.full((4, 4), 0.25))
    0.0
    """
    found = float(np.abs(np.linalg.eigvals(weights - 1 / len(weights))).max())
    return 0.0 if found < 1e-7 else found
