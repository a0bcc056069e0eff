"""Graphs that are the same in every round, or follow from its number."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.topology.base import Edges, Topology


@dataclass(frozen=True)
class Complete(Topology):
    """Every replica sends to every other. The second eigenvalue is 0: one round is the exact mean.

        N(i) = {j ≠ i}      N(i): the replicas to which replica i sends

    *Source*: none; the complete graph.

    >>> int(Complete().edges(4).sum())
    12
    """

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        return ~np.eye(size, dtype=bool)


@dataclass(frozen=True)
class Ring(Topology):
    """Each replica sends to the one before it and the one after it. Few bytes, slow agreement: the gap shrinks as 1/M².

        N(i) = {i − 1, i + 1} mod M      N(i): the replicas to which replica i sends, of M

    *Source*: none; the usual ring.

    >>> [int(j) for j in Ring().edges(5)[0].nonzero()[0]]
    [1, 4]
    """

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        return _undirected(size, [(i, (i + 1) % size) for i in range(size)])


@dataclass(frozen=True)
class Mesh(Topology):
    """Replicas in `rows` rows; each sends to those beside, above and below it.

        N(r, c) = {(r ± 1, c), (r, c ± 1)} within the grid      replica i is at r = ⌊i / columns⌋, c = i mod columns

    *Source*: none; the usual grid.

    Args:
        rows: number of rows, by which the number of replicas must divide; None: as nearly square as it goes.

    >>> int(Mesh(2).edges(4)[0].sum())
    2
    """

    rows: int | None = None

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        return _lattice(self, size, self.rows, wrapped=False)


@dataclass(frozen=True)
class Torus(Topology):
    """A `Mesh` whose ends are joined: each replica sends to four.

        N(r, c) = {(r ± 1 mod rows, c), (r, c ± 1 mod columns)}      replica i is at r = ⌊i / columns⌋, c = i mod columns

    Where a side is 1 or 2 long, these are fewer than four. *Source*: none; the usual torus.

    Args:
        rows: number of rows, by which the number of replicas must divide; None: as nearly square as it goes.

    >>> int(Torus(3).edges(9)[0].sum())
    4
    """

    rows: int | None = None

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        return _lattice(self, size, self.rows, wrapped=True)


@dataclass(frozen=True)
class Exponential(Topology):
    """Replica i sends to i + 1, i + 2, i + 4, ...: ⌈log₂ M⌉ neighbours (Ying et al., arXiv 2110.13363). One way: not symmetric.

        N(i) = {i + 2^k mod M for k = 0 … ⌈log₂ M⌉ − 1},   w = 1 / (1 + ⌈log₂ M⌉)

    For even M the gap is exactly 2 / (1 + ⌈log₂ M⌉). *Differs*: nothing.

    >>> [int(j) for j in Exponential().edges(8)[0].nonzero()[0]]
    [1, 2, 4]
    """

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        edges = np.zeros((size, size), dtype=bool)
        for power in range((size - 1).bit_length()):
            edges[np.arange(size), (np.arange(size) + (1 << power)) % size] = True
        return edges


@dataclass(frozen=True)
class MoshpitGrid(Topology):
    """Replicas on a grid of `side` cells along each of d = ⌈log_side M⌉ axes; in round k each row along axis k mod d is a group in which all
    send to all (Moshpit, Ryabinin et al., arXiv 2103.03239).

        N(i) = {j ≠ i whose digits, in base `side`, are those of i but for digit k mod d}

    d rounds are the exact mean where the grid is full, as with M = side^d, or M = n·side^(d−1) with n below side.

    *Differs*: groups follow from ranks, where the paper's peers find each other in a hash table; a group waits for all its members;
    fragments begin with different axes.

    Args:
        side: number of cells along an axis, which is the largest number of replicas in a group; at least 2.

    Raises:
        ConfigurationError: the side is less than 2.

    >>> [[int(j) for j in MoshpitGrid(2).edges(4, number)[0].nonzero()[0]] for number in range(2)]
    [[1], [2]]
    """

    side: int = 4

    fixed: ClassVar[bool] = False
    grouped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.side) is not int or self.side < 2:
            raise ConfigurationError(f"{self}: at least 2 cells along an axis are needed.")

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        power = self.side ** ((number + fragment) % self.rounds(size))
        ranks = np.arange(size)
        row = ranks - ranks // power % self.side * power  # the rank with 0 along this axis
        return np.asarray((row[:, None] == row) & ~np.eye(size, dtype=bool))

    def rounds(self, size: int) -> int:
        count = 1
        while self.side**count < size:
            count += 1
        return count


@dataclass(frozen=True)
class Listed(Topology):
    """A list of edges, such as `read_edges` reads from a file.

        N(i) = {j: (i, j) or (j, i) is listed}      with `one_way`: (i, j)

    *Source*: none; your own graph.

    Args:
        pairs_of_replicas: the edges, as pairs of ranks.
        one_way: whether in an edge (i, j) only i sends to j.

    Raises:
        ConfigurationError: a pair is not two different ranks.

    >>> Listed(((0, 1), (1, 2))).edges(3).sum(1)
    array([1, 2, 1])
    """

    pairs_of_replicas: tuple[tuple[int, int], ...]
    one_way: bool = False

    def __post_init__(self) -> None:
        for edge in self.pairs_of_replicas:
            whole = isinstance(edge, tuple) and len(edge) == 2 and all(type(rank) is int and rank >= 0 for rank in edge)
            if not whole or edge[0] == edge[1]:
                raise ConfigurationError(f"{edge} is no edge: two ranks, not the same one twice, are needed: (0, 1).")

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        largest = max((rank for edge in self.pairs_of_replicas for rank in edge), default=0)
        if largest >= size:
            raise ConfigurationError(
                f"an edge of replica {largest} among {size} replicas: ranks go from 0 to {size - 1}; give as many replicas as the "
                "graph has, or other edges."
            )
        edges = np.zeros((size, size), dtype=bool)
        for one, other in self.pairs_of_replicas:
            edges[one, other] = True
        return edges if self.one_way else edges | edges.T


@dataclass(frozen=True)
class Cut(Topology):
    """`topology` without the edges between two sides in the rounds `begin` to `end` − 1, as if a link failed and was healed.

        N(i) = {j in topology's N(i) on the side of i}      in rounds begin ≤ k < end

    All replicas know these rounds before: nothing is detected, and no message is lost. Weights in these rounds are Metropolis' weights
    of the edges that are left.

    *Source*: none; the usual partition of a network.

    Args:
        topology: a graph whose edges go both ways.
        begin: the number of the first round without these edges, at least 1.
        end: the number of the first round with all edges again.
        side: the number of ranks on the first side, at least 1; None: half of all.

    Raises:
        ConfigurationError: that is no cut, or edges go one way.

    >>> [int(Cut(Ring(), begin=1, end=3).edges(8, number).sum()) for number in range(4)]
    [16, 12, 12, 16]
    """

    topology: Topology = Ring()
    begin: int = 1
    end: int = 2
    side: int | None = None

    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole = type(self.begin) is int and type(self.end) is int and 1 <= self.begin < self.end
        if not isinstance(self.topology, Topology) or isinstance(self.topology, type) or not whole:
            raise ConfigurationError(
                f"{self}: a topology and 1 <= begin < end are needed, such as Cut(Ring(), 10, 20)."
            )

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        edges, side = self.topology.edges(size, number, fragment, seed), size // 2 if self.side is None else self.side
        if not 0 < side < size or not (edges == edges.T).all():
            raise ConfigurationError(
                f"{self} among {size} replicas: replicas on both sides, and edges that go both ways, are needed; choose a side from 1 to "
                f"{size - 1}, and a graph such as Ring()."
            )
        first = np.arange(size) < side
        return edges & (first == first[:, None]) if self.begin <= number < self.end else edges

    def rounds(self, size: int) -> int:
        return 0  # they do not repeat


def read_edges(path: Path) -> Listed:
    """A topology from a JSON file: `[[0, 1], [1, 2]]` for edges in both directions, or `{"edges": [[0, 1]], "one_way": true}`.

    Args:
        path: the file.

    Raises:
        ConfigurationError: the file cannot be read, or holds no edges.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "edges.json")
    ...     _ = path.write_text("[[0, 1], [1, 2]]")
    ...     read_edges(path).edges(size=3).sum()
    np.int64(4)
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        given = found if isinstance(found, dict) else {"edges": found}
        edges = tuple((int(one), int(other)) for one, other in given["edges"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} holds no edges ({error}); JSON such as [[0, 1], [1, 2]] is needed, the ranks of two replicas each."
        ) from None
    return Listed(edges, bool(given.get("one_way", False)))


def _undirected(size: int, pairs: list[tuple[int, int]]) -> Edges:
    edges = np.zeros((size, size), dtype=bool)
    for one, other in pairs:
        if one != other:
            edges[one, other] = edges[other, one] = True
    return edges


def _lattice(topology: Topology, size: int, rows: int | None, wrapped: bool) -> Edges:
    count = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0) if rows is None else rows
    if type(count) is not int or count < 1 or size % count:
        raise ConfigurationError(
            f"{topology} with {size} replicas: a number of rows by which {size} divides is needed, such as {_divisor(size)}."
        )
    if rows is None and count == 1 and size > 3:
        raise ConfigurationError(
            f"{topology} with {size} replicas, a prime number, has one row alone: take Ring(), or {type(topology).__name__}(1) "
            "if one row is meant, or another number of replicas."
        )
    columns = size // count
    pairs = []
    for i in range(size):
        row, column = divmod(i, columns)
        if wrapped or column + 1 < columns:
            pairs.append((i, row * columns + (column + 1) % columns))
        if wrapped or row + 1 < count:
            pairs.append((i, (row + 1) % count * columns + column))
    return _undirected(size, pairs)


def _divisor(size: int) -> int:
    return next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
