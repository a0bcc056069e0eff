"""How much a replica counts what each of its neighbours sends: from edges to a matrix, and what is wrong with one."""

from __future__ import annotations

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.topology.base import Edges, Topology, Weights

_EXACT = 1e-9  # how far rounding may take a sum from 1


def metropolis(edges: Edges) -> Weights:
    """Metropolis weights, symmetric and doubly stochastic on any undirected graph.

        w_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j of degree d,   w_ii = 1 − Σ_j w_ij

    Args:
        edges: a boolean matrix: whether replica j sends to replica i.

    >>> metropolis(np.array([[False, True], [True, False]])).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    degrees = edges.sum(1)
    weights = np.where(edges, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    # Where all neighbours count like oneself, the own weight is theirs, to the last bit.
    alike = np.array([len(set(row[row > 0])) == 1 and (row > 0).sum() + 1 == round(1 / row.max()) for row in weights])
    own = np.where(alike, weights.max(1), 1.0 - weights.sum(1))
    return np.asarray(weights + np.diag(own))


def outgoing(edges: Edges) -> Weights:
    """Each replica sends the same share 1 / (1 + out-degree) to its neighbours and to itself: columns add up to 1, on any graph."""
    shares = (edges | np.eye(len(edges), dtype=bool)).astype(np.float64)
    return np.asarray((shares / shares.sum(1, keepdims=True)).T)


def mixing(topology: Topology, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Weights:
    """Doubly stochastic weights of a round: Metropolis' if all edges go both ways; `outgoing` if all replicas send to as many as they
    hear. Raises `ConfigurationError` where neither is so.
    """
    edges = topology.edges(size, number, fragment, seed)
    if (edges == edges.T).all():
        return metropolis(edges)
    weights = outgoing(edges)
    check_doubly(weights, str(topology))
    return weights


def check_doubly(weights: Weights, what: str) -> None:
    """Raise `ConfigurationError` unless rows and columns of `weights` add up to 1 and none is negative."""
    columns, rows = weights.sum(0), weights.sum(1)
    worst = max(np.abs(columns - 1).max(), np.abs(rows - 1).max())
    if worst <= _EXACT and (weights >= 0).all():
        return
    replica = int(np.argmax(np.maximum(np.abs(columns - 1), np.abs(rows - 1))))
    raise ConfigurationError(
        f"{what}: weights that replica {replica} hears add up to {rows[replica]:.4g} and those that it is heard with to {columns[replica]:.4g}; "
        "both must be 1, else the mean over replicas drifts away. Choose edges that go both ways, or the method sgp, which counts the weights."
    )
