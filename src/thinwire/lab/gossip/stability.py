"""When gossip with an outer momentum converges: the spectral radius of a round, and the mixing weights and settings that keep it below 1.

Replicas mix by x_i ← x_i + δ_i, δ_i ← α·δ_i − γ·(x_i − Σ_j w_ij·x_j), with momentum α and pull γ, as in `NoLoCo`. If the radius is 1 or
more, the distance between replicas grows in every round, and they diverge.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Topology, mixing
from thinwire.lab.topology.base import Weights


def check_drawn(momentum: float, pull: float, topology: Topology) -> None:
    """Raise `ConfigurationError` if replicas with an outer momentum diverge on a topology that draws groups in each round."""
    radius = radius_of_pairs(momentum, pull, topology.drawn) if topology.drawn else 0.0
    if radius >= 1:
        raise ConfigurationError(
            f"momentum={momentum:g} with pull={pull:g} in random groups of {topology.drawn}: the squared distance between replicas "
            f"grows by {radius:.3f} in every round, and they diverge; below 1 is needed. With this momentum choose a pull (or lr) below "
            f"{largest_pull(momentum, topology.drawn):.2f}, or a momentum of 0.5 or less."
        )


def stable(
    momentum: float, pull: float, topology: Topology, size: int, number: int, fragment: int, seed: int
) -> Weights:
    """The mixing weights of a round. Raises `ConfigurationError` if replicas with an outer momentum diverge under those of a period."""
    if number == 0 and not topology.drawn:
        rounds = [mixing(topology, size, one, fragment, seed) for one in range(topology.rounds(size) or 64)]
        grown = radius_of_rounds(momentum, pull, rounds)
        if grown >= 1:
            raise ConfigurationError(
                f"momentum={momentum:g} with pull={pull:g} on {topology}: the distance between {size} replicas grows by "
                f"{grown:.3f} in every round, and they diverge; below 1 is needed; choose a smaller momentum or pull."
            )
    return mixing(topology, size, number, fragment, seed)


def radius_of_pairs(momentum: float, pull: float, size: int = 2) -> float:
    """The spectral radius of a round of NoLoCo in newly drawn groups of `size`: of the map of E φ², E φδ, E δ², φ the distance from the mean.

    >>> [round(radius_of_pairs(alpha, 0.7), 3) for alpha in (0.0, 0.3, 0.5, 0.7, 0.9)]
    [0.545, 0.553, 0.7, 0.891, 1.098]
    """
    c = 1 - 1 / size
    d = np.array([pull**2 * c, -2 * momentum * pull * c, momentum**2])  # coefficients of E φ², E φδ, E δ²
    x = np.array([-pull * c, momentum, 0.0])
    v = np.array([1.0, 0.0, 0.0])
    return float(np.abs(np.linalg.eigvals(np.stack([v + 2 * x + d, x + d, d]))).max())


def largest_pull(momentum: float, size: int = 2) -> float:
    """The γ of `NoLoCo` from which replicas in randomly drawn groups no longer approach each other.

    Args:
        momentum: α, in [0, 1).
        size: number of replicas in a drawn group.

    >>> round(largest_pull(0.9), 2)
    0.38
    """
    low, high = 0.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if radius_of_pairs(momentum, middle, size) < 1 else (low, middle)
    return low


def radius_of_rounds(momentum: float, pull: float, rounds: Sequence[Weights]) -> float:
    """The factor by which a round of NoLoCo changes the distance from the mean, in the long run, if the weights repeat after `rounds`."""
    size = len(rounds[0])
    off = np.eye(size) - 1 / size
    product = np.kron(np.eye(2), off)
    for weights in rounds:
        pulled = -pull * (np.eye(size) - weights)
        product = (
            np.block([[np.eye(size) + pulled, momentum * np.eye(size)], [pulled, momentum * np.eye(size)]]) @ product
        )
    return float(np.abs(np.linalg.eigvals(product)).max() ** (1 / len(rounds)))
