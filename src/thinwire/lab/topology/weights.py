"""Mixing weights: the weights with which a replica averages the vectors of its neighbours and its own."""

from __future__ import annotations

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.topology.base import Edges, Topology, Weights

_EXACT = 1e-9  # allowed rounding error of a sum that must be 1


def metropolis(edges: Edges) -> Weights:
    """Metropolis weights, symmetric and doubly stochastic on any undirected graph.

        w_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j of degree d,   w_ii = 1 − Σ_j w_ij

    Args:
        edges: boolean [size, size]; [i, j]: replica i sends to replica j.

    >>> metropolis(np.array([[False, True], [True, False]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    degrees = edges.sum(1)
    weights = np.where(edges, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    # If all neighbours have the replica's own weight, the own weight must equal theirs to the last bit.
    alike = np.array([len(set(row[row > 0])) == 1 and (row > 0).sum() + 1 == round(1 / row.max()) for row in weights])
    own = np.where(alike, weights.max(1), 1.0 - weights.sum(1))
    return np.asarray(weights + np.diag(own))


def outgoing(edges: Edges) -> Weights:
    """Each replica gives the same share to its neighbours and to itself: column sums are 1 on any graph.

        w_ij = 1 / (1 + out-degree of j) where j sends to i or j = i

    Args:
        edges: boolean [size, size]; [i, j]: replica i sends to replica j.

    >>> outgoing(np.array([[False, True], [False, False]])).tolist()
    [[0.5, 0.0], [0.5, 1.0]]
    """
    shares = (edges | np.eye(len(edges), dtype=bool)).astype(np.float64)
    return np.asarray((shares / shares.sum(1, keepdims=True)).T)


def mixing(topology: Topology, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Weights:
    """Doubly stochastic weights of a round: `metropolis` if all edges have both directions, `outgoing` if in- and out-degrees are equal.

    Args:
        topology: the edges.
        size: number of replicas.
        number: number of the round.
        fragment: number of the fragment.
        seed: seed of random topologies; an integer number.

    Returns:
        Float64 [size, size]; [i, j]: the weight of j's vector at i.

    Raises:
        ConfigurationError: edges have one direction, and the in- and out-degree of a replica differ.

    >>> from thinwire.lab.topology import Ring
    >>> mixing(Ring(), size=4)[0].round(2).tolist()
    [0.33, 0.33, 0.0, 0.33]
    """
    edges = topology.edges(size, number, fragment, seed)
    if (edges == edges.T).all():
        return metropolis(edges)
    weights = outgoing(edges)
    check_doubly(weights, str(topology))
    return weights


def check_doubly(weights: Weights, what: str) -> None:
    """Check that `weights` are doubly stochastic: rows and columns add up to 1, and no weight is negative.

    Args:
        weights: float64 [size, size].
        what: the name of the weights, for the message.

    Raises:
        ConfigurationError: they are not, so that the mean over replicas would drift.

    >>> check_doubly(np.full((2, 2), 0.5), "halves")
    """
    columns, rows = weights.sum(0), weights.sum(1)
    worst = max(np.abs(columns - 1).max(), np.abs(rows - 1).max())
    if worst <= _EXACT and (weights >= 0).all():
        return
    replica = int(np.argmax(np.maximum(np.abs(columns - 1), np.abs(rows - 1))))
    raise ConfigurationError(
        f"{what}: the weights of vectors that replica {replica} receives add up to {rows[replica]:.4g}, and those of its own at others to "
        f"{columns[replica]:.4g}; both must be 1, otherwise the mean over replicas drifts. Choose edges in both directions, or the method sgp, "
        "which corrects for the weights."
    )
