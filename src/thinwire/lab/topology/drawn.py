"""Random graphs, and graphs that change from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.errors import ConfigurationError
from thinwire.lab.topology.base import Edges, Topology, reachable
from thinwire.rng import derive

_TRIES = 1000  # most draws until a graph is simple and connected


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In round k replica i sends to i + 2^(k mod ⌈log₂ M⌉) only (Assran et al., arXiv 1811.10792; Ying et al., arXiv 2110.13363).

        N(i) = {i + 2^((k + f) mod ⌈log₂ M⌉) mod M}      in round k of fragment f,   w = ½

    If M is a power of two, ⌈log₂ M⌉ rounds give the exact mean. *Differs*: fragments begin at different distances.

    >>> [int(OnePeerExponential().edges(8, number)[0].argmax()) for number in range(4)]
    [1, 2, 4, 1]
    """

    fixed: ClassVar[bool] = False

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        edges = np.zeros((size, size), dtype=bool)
        if size > 1:
            distance = 1 << ((number + fragment) % self.rounds(size))
            edges[np.arange(size), (np.arange(size) + distance) % size] = True
        return edges

    def rounds(self, size: int) -> int:
        return max(1, (size - 1).bit_length())


@dataclass(frozen=True)
class RandomPairs(Topology):
    """Random pairs in every round: a function of seed, round and fragment, so every fragment has its own pairs.

        N(p(2n)) = {p(2n + 1)},   N(p(2n + 1)) = {p(2n)}      p: a random permutation of the replicas

    Among M replicas the squared distance from the mean shrinks by (M/2 − 1)/(M − 1) in a round, on average.

    *Source*: the pairs of NoLoCo (Kolehmainen et al., arXiv 2506.10911). *Differs*: its code draws from the step
    alone, so that all parameters have the same pairs.

    >>> RandomPairs().edges(4).sum(1)
    array([1, 1, 1, 1])
    """

    fixed: ClassVar[bool] = False
    drawn: ClassVar[int] = 2

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        if size % 2 and size > 1:
            raise ConfigurationError(
                f"{self} among {size} replicas: an even number is needed, otherwise one has no partner; give {size + 1} or {size - 1} replicas, "
                "or choose another topology, such as Ring()."
            )
        order = np.random.default_rng(derive(seed, "pairs", fragment, number)).permutation(size)
        edges = np.zeros((size, size), dtype=bool)
        if size > 1:
            edges[order[::2], order[1::2]] = edges[order[1::2], order[::2]] = True
        return edges

    def rounds(self, size: int) -> int:
        return 0


@dataclass(frozen=True)
class RandomGroups(Topology):
    """Random groups in every round, in which all send to all (Moshpit, Ryabinin et al., arXiv 2103.03239, §3.2).

        E ‖x − mean‖² ← (r − 1)/(M − 1)·‖x − mean‖²      in a round, for M replicas in r = M / group groups

    *Differs*: groups are equally large and drawn from the seed, with no search for peers. The paper's sizes may differ, with the factor
    (r − 1)/M + r/M².

    Args:
        group: number of replicas in a group, at least 2; it must divide the number of all replicas.

    Raises:
        ConfigurationError: a group has fewer than 2 replicas.

    >>> RandomGroups(4).edges(8).sum(1)
    array([3, 3, 3, 3, 3, 3, 3, 3])
    """

    group: int = 4

    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group < 2:
            raise ConfigurationError(f"{self}: groups of at least 2 replicas are needed.")

    @property
    def drawn(self) -> int:
        return self.group

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        if size % self.group:
            raise ConfigurationError(
                f"{self} among {size} replicas: a multiple of {self.group} is needed, {size % self.group} would be left over; give "
                f"{size - size % self.group + self.group} replicas, or choose MoshpitGrid({self.group})."
            )
        order = np.random.default_rng(derive(seed, "groups", fragment, number)).permutation(size)
        edges = np.zeros((size, size), dtype=bool)
        for members in order.reshape(-1, self.group):
            edges[np.ix_(members, members)] = True
        return edges & ~np.eye(size, dtype=bool)

    def rounds(self, size: int) -> int:
        return 0


@dataclass(frozen=True)
class RandomRegular(Topology):
    """A random connected graph in which each replica has `degree` neighbours; the same for the whole run.

        d(i) = |N(i)| = degree      for every replica i

    *Source*: the pairing model (Bollobás 1980, European Journal of Combinatorics 1). *Differs*: a loop or a double edge swaps an end with
    another pair, so that graphs are not quite equally likely. A graph that is not connected is drawn again.

    Args:
        degree: number of neighbours, at least 2; degree times replicas must be even.

    >>> RandomRegular(3).edges(8).sum(1)
    array([3, 3, 3, 3, 3, 3, 3, 3])
    """

    degree: int = 3

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        if type(self.degree) is not int or not 2 <= self.degree < size or self.degree * size % 2:
            raise ConfigurationError(
                f"{self} among {size} replicas: a degree from 2 to {size - 1} is needed, and an even number of ends of edges, "
                f"not {self.degree} x {size}."
            )
        for attempt in range(_TRIES):
            ends = np.random.default_rng(derive(seed, "regular", attempt)).permutation(
                np.repeat(np.arange(size), self.degree)
            )
            edges = _repaired(ends.reshape(-1, 2), size, derive(seed, "repair", attempt))
            if edges is not None and reachable(edges).all():
                return edges
        raise ConfigurationError(
            f"{self} among {size} replicas: no connected graph was found in {_TRIES} draws; choose a larger degree."
        )


@dataclass(frozen=True)
class ErdosRenyi(Topology):
    """A random graph in which every two replicas are neighbours with a probability; the same for the whole run.

        P(j ∈ N(i)) = probability      for every two replicas i and j, independently

    *Source*: G(n, p) (Gilbert 1959, Annals of Mathematical Statistics 30). *Differs*: a graph that is not connected is refused.

    Args:
        probability: probability of an edge, in (0, 1]. Below ln M / M most graphs are not connected, and are refused.

    Raises:
        ConfigurationError: the probability is out of range.

    >>> int(ErdosRenyi(1.0).edges(4).sum())
    12
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigurationError(f"{self}: a probability above 0 and at most 1 is needed.")

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        drawn = np.random.default_rng(derive(seed, "erdos-renyi")).random((size, size)) < self.probability
        upper = np.triu(drawn, 1)
        return upper | upper.T


@dataclass(frozen=True)
class BarabasiAlbert(Topology):
    """A random graph with few hubs: replicas are added in turn; each joins `attach` earlier ones, preferring those with many neighbours.

        P(j ∈ N(new)) ~ |N(j)|      in each draw; a replica that is drawn twice counts once, and another is drawn

    The graph is always connected, and the same for the whole run.

    *Source*: Barabási, Albert 1999 (Science 286). *Differs*: the first `attach` + 1 replicas are a star; the paper leaves its start open.

    Args:
        attach: number of neighbours of each added replica, at least 1.

    Raises:
        ConfigurationError: attach is less than 1.

    >>> int(BarabasiAlbert(2).edges(10).sum()) // 2
    16
    """

    attach: int = 2

    def __post_init__(self) -> None:
        if type(self.attach) is not int or self.attach < 1:
            raise ConfigurationError(f"{self}: at least 1 neighbour for each added replica is needed.")

    def edges(self, size: int, number: int = 0, fragment: int = 0, seed: int = 0) -> Edges:
        if size <= self.attach:
            raise ConfigurationError(f"{self} among {size} replicas: more than {self.attach} are needed.")
        rng, edges = np.random.default_rng(derive(seed, "barabasi-albert")), np.zeros((size, size), dtype=bool)
        edges[0, 1 : self.attach + 1] = edges[1 : self.attach + 1, 0] = True
        for newcomer in range(self.attach + 1, size):
            # each replica once for each of its neighbours
            ends = np.repeat(np.arange(newcomer), edges[:newcomer].sum(1))
            chosen: set[int] = set()
            while len(chosen) < self.attach:
                chosen.add(int(ends[rng.integers(len(ends))]))
            for other in chosen:
                edges[newcomer, other] = edges[other, newcomer] = True
        return edges


def _repaired(pairs: np.ndarray, size: int, seed: int) -> Edges | None:
    """A simple graph from these pairs: a loop or a double edge swaps one end with another pair. None if 20 swaps per pair do not suffice."""
    rng, pairs = np.random.default_rng(seed), pairs.copy()
    for _ in range(20 * len(pairs)):
        seen: set[tuple[int, int]] = set()
        bad = None
        for index, (one, other) in enumerate(pairs):
            edge = (min(one, other), max(one, other))
            if one == other or edge in seen:
                bad = index
                break
            seen.add(edge)
        if bad is None:
            edges = np.zeros((size, size), dtype=bool)
            edges[pairs[:, 0], pairs[:, 1]] = edges[pairs[:, 1], pairs[:, 0]] = True
            return edges
        swap = int(rng.integers(len(pairs)))
        pairs[bad, 1], pairs[swap, 1] = pairs[swap, 1], pairs[bad, 1]
    return None
