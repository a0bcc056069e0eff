"""The protocol of a topology: which replica sends to which in a round."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

Edges = NDArray[np.bool_]  # [size, size]; [i, j]: replica i sends to replica j; no replica sends to itself
Weights = NDArray[np.float64]  # [size, size]; [i, j]: the weight of j's vector at i; the diagonal is a replica's own

MOST_REPLICAS = 4096  # replicas: a graph is a table of each with each
DRAWN_ROUNDS = 64  # number of rounds that are checked if a topology is random in each round


@runtime_checkable
class Topology(Protocol):
    """The senders and receivers of a round: a pure function of its arguments, so that replicas need no messages about it.

    A topology is a frozen dataclass with `edges`; it overrides those declarations below that are not true for it.
    """

    @property
    def fixed(self) -> bool:
        """Whether the edges are the same in every round."""
        return True

    @property
    def drawn(self) -> int:
        """The size of the random groups of every round, in which all send to all; 0: there are none."""
        return 0

    @property
    def grouped(self) -> bool:
        """Whether in every round the replicas form groups in which all send to all, with equal weights."""
        return self.drawn > 0

    @abstractmethod
    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        """The edges of round `number` of `fragment` among `size` replicas. Raises `ConfigurationError` if `size` does not fit."""

    def rounds(self, size: int) -> int:
        """The number of rounds after which the edges repeat; 0 if they are drawn again in every round."""
        return 1


@dataclass(frozen=True)
class Union(Topology):
    """Each replica sends to all those to which it sends in `count` successive rounds of `topology`."""

    topology: Topology
    count: int

    @property
    def fixed(self) -> bool:
        return self.topology.fixed

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        rounds = range(number * self.count, (number + 1) * self.count)
        return np.asarray(np.stack([self.topology.edges(size, one, fragment, seed) for one in rounds]).any(axis=0))

    def rounds(self, size: int) -> int:
        return self.topology.rounds(size)


def check_size(topology: Topology, size: int, seed: int = 0) -> None:
    """Check that a message of any of `size` replicas reaches all others within a period.

    Args:
        topology: the edges.
        size: number of replicas.
        seed: seed of random topologies; an integer number.

    Raises:
        ConfigurationError: the graph is not connected, so that the replicas would train several models; or there are fewer than 1 or more
            than 4096 replicas.

    >>> from thinwire.lab.topology import Ring
    >>> check_size(Ring(), size=8)
    """
    if not 1 <= size <= MOST_REPLICAS:
        raise ConfigurationError(f"{topology} among {size} replicas: 1 to {MOST_REPLICAS} are needed.")
    union = np.zeros((size, size), dtype=bool)
    for number in range(topology.rounds(size) or DRAWN_ROUNDS):
        union |= topology.edges(size, number, 0, seed)
    near = reachable(union)
    if near.all():
        return
    count = len(parts(union))
    one, other = (int(index) for index in np.argwhere(~near)[0])
    raise ConfigurationError(
        f"{topology} among {size} replicas is in {count} parts: no path leads from replica {one} to replica {other}, so they would train "
        "two models; add edges between the parts, or choose Ring()."
    )


def reachable(edges: Edges) -> Edges:
    """[i, j]: a path leads from replica i to replica j; every replica reaches itself."""
    near = edges | np.eye(len(edges), dtype=bool)
    for _ in range(max(1, (len(edges) - 1).bit_length())):
        near = (near.astype(np.float32) @ near.astype(np.float32)) > 0
    return near


def parts(edges: Edges) -> list[list[int]]:
    """The replicas that reach each other, part by part.

    Args:
        edges: boolean [size, size]; [i, j]: replica i sends to replica j.

    >>> parts(np.array([[False, True, False], [True, False, False], [False, False, False]]))
    [[0, 1], [2]]
    """
    near = reachable(edges)
    both = near & near.T
    return [[int(j) for j in np.flatnonzero(row)] for i, row in enumerate(both) if not row[:i].any()]


def spread(topology: Topology, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> int:
    """The number of rounds, starting with round `number`, after which a message of any replica has reached all.

    Args:
        topology: the edges.
        size: number of replicas.
        number: number of the first round.
        fragment: number of the fragment.
        seed: seed of random topologies; an integer number.

    Raises:
        ConfigurationError: the graph is not connected, so that a message would never reach all.

    >>> from thinwire.lab.topology import Complete, Ring
    >>> spread(Complete(), size=8), spread(Ring(), size=8)
    (1, 4)
    """
    near, count = np.eye(size, dtype=np.float32), 0
    while not near.all():
        if count == size * (topology.rounds(size) or DRAWN_ROUNDS):
            check_size(topology, size, seed)
        edges = topology.edges(size, number + count, fragment, seed) | np.eye(size, dtype=bool)
        near = np.asarray((near @ edges.astype(np.float32)) > 0, dtype=np.float32)
        count += 1
    return count
