"""What a topology is: who sends to whom in a round."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError

Edges = NDArray[np.bool_]  # [size, size]; [i, j]: replica i sends to replica j; nobody sends to itself
Weights = NDArray[np.float64]  # [size, size]; [i, j]: how much what j sends counts at i; the diagonal is one's own

DRAWN = 64  # rounds that are looked at where a topology is drawn anew in each


@runtime_checkable
class Topology(Protocol):
    """Who sends to whom in a round, a pure function of its arguments, so that no replica has to ask another.

    A frozen dataclass with `edges`, which declares what else is so of it.
    """

    @property
    def fixed(self) -> bool:
        """The edges are the same in every round."""
        return True

    @property
    def drawn(self) -> int:
        """In every round the replicas are parted into groups of so many, drawn anew, in which all send to all; 0: they are not."""
        return 0

    @property
    def grouped(self) -> bool:
        """In every round the replicas are parted into groups in which all send to all, and count alike."""
        return self.drawn > 0

    @abstractmethod
    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        """Of round `number` of `fragment` among `size` replicas. Raises `ConfigurationError` if `size` does not fit."""

    def rounds(self, size: int) -> int:
        """After how many rounds the edges repeat; 0: they are drawn anew in every round."""
        return 1


def check_size(topology: Topology, size: int, seed: int = 0) -> None:
    """Raise `ConfigurationError` unless what one of `size` replicas knows reaches all others in the course of a period."""
    union = np.zeros((size, size), dtype=bool)
    for number in range(topology.rounds(size) or DRAWN):
        union |= topology.edges(size, number, 0, seed)
    near = reached(union)
    if near.all():
        return
    count = len(parts(union))
    one, other = (int(index) for index in np.argwhere(~near)[0])
    raise ConfigurationError(
        f"{topology} among {size} replicas is in {count} parts: nothing of replica {one} reaches replica {other}, so they would train "
        "two models; add edges between the parts, or choose Ring()."
    )


def reached(edges: Edges) -> Edges:
    """[i, j]: something of i reaches j in any number of steps; each reaches itself."""
    near = edges | np.eye(len(edges), dtype=bool)
    for _ in range(max(1, (len(edges) - 1).bit_length())):
        near = (near.astype(np.float32) @ near.astype(np.float32)) > 0
    return near


def parts(edges: Edges) -> list[list[int]]:
    """The replicas that reach each other, part by part."""
    near = reached(edges)
    both = near & near.T
    return [[int(j) for j in np.flatnonzero(row)] for i, row in enumerate(both) if not row[:i].any()]


def spread(topology: Topology, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> int:
    """How many rounds from `number` on it takes until what any replica knew reaches all."""
    near, count = np.eye(size, dtype=np.float32), 0
    while not near.all():
        edges = topology.edges(size, number + count, fragment, seed) | np.eye(size, dtype=bool)
        near = np.asarray((near @ edges.astype(np.float32)) > 0, dtype=np.float32)
        count += 1
    return count
