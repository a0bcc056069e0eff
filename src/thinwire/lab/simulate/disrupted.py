"""Replicas of a gossip graph that fail all at once: the rest of the graph, and the accuracy of the survivors.

After Palmieri et al., arXiv 2310.02986. Survivors keep their weights and mix with surviving neighbours only, with Metropolis weights of the
remaining graph. The task is small and the same on all replicas: a linear classifier of ten Gaussian classes, by gradient descent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigurationError
from thinwire.lab.topology import Topology, check_size, metropolis, parts
from thinwire.lab.topology.base import Edges
from thinwire.rng import derive

Who = Literal["degree", "betweenness", "random"]
Data = Literal["everywhere", "hit", "others"]
MOST_ROUNDS = 10_000
CLASSES, FEATURES, SAMPLES, RATE = 10, 20, 8, 0.5  # samples of a replica; learning rate

Alive = NDArray[np.bool_]


@dataclass(frozen=True)
class Left:
    """The shares of surviving replicas that are in the largest component of the graph, and that have no neighbour.

    Args:
        giant: share in the largest component, 0 to 1.
        isolated: share without a neighbour, 0 to 1.

    >>> Left(giant=0.75, isolated=0.25).giant
    0.75
    """

    giant: float
    isolated: float


@dataclass(frozen=True)
class Learned:
    """Accuracies on held-out data: `before` is of all replicas, the others are of the survivors at the end. NaN if there is no such replica.

    Args:
        before: just before the failure, 0 to 1.
        mean: at the end, 0 to 1.
        low: the tenth percentile of the survivors, 0 to 1.
        giant: of survivors in the largest component, 0 to 1.
        isolated: of survivors without a neighbour, 0 to 1.
        undisturbed: of the survivors, if no replica had failed, 0 to 1.
        alone: of the survivors with data, if no replica had ever communicated, 0 to 1.

    >>> Learned(before=0.7, mean=0.8, low=0.6, giant=0.8, isolated=0.5, undisturbed=0.9, alone=0.4).low
    0.6
    """

    before: float
    mean: float
    low: float
    giant: float
    isolated: float
    undisturbed: float
    alone: float


def survivors(edges: Edges, who: Who, share: float, seed: int) -> Alive:
    """The replicas that survive when a `share` of them fails: those with most neighbours, those on most shortest paths, or random ones.

    Args:
        edges: the graph, boolean [size, size], symmetric.
        who: `degree`, `betweenness` or `random`.
        share: share of the replicas that fail, 0 to 1.
        seed: seed of random failures, and of the order among equal replicas.

    Raises:
        ConfigurationError: no replica would be left, or none would fail.

    >>> star = np.zeros((5, 5), dtype=bool)
    >>> star[0, 1:] = star[1:, 0] = True
    >>> survivors(star, "degree", 0.2, seed=0).tolist()
    [False, True, True, True, True]
    """
    size = len(edges)
    count = round(min(max(0.0, share), 1.0) * size)
    if not 0 < count < size:
        raise ConfigurationError(
            f"share={share:g} of {size} replicas: that is {count}; at least 1 must fail and 1 survive, so give {1 / size:g} to {1 - 1 / size:g}."
        )
    rng = np.random.default_rng(derive(seed, "hit"))
    chance = rng.permutation(size)
    score = edges.sum(1) if who == "degree" else betweenness(edges) if who == "betweenness" else 0 * chance
    alive = np.ones(size, dtype=bool)
    alive[np.lexsort((chance, -np.asarray(score, dtype=np.float64)))[:count]] = False
    return alive


def left(edges: Edges, alive: Alive) -> Left:
    """The shares of survivors in the largest component, and without a neighbour.

    Args:
        edges: the graph, boolean [size, size], symmetric.
        alive: which replicas survive, boolean [size].

    >>> line = np.diag(np.ones(4, dtype=bool), 1)
    >>> left(line | line.T, np.array([True, False, True, True, True]))
    Left(giant=0.75, isolated=0.25)
    """
    rest = edges[np.ix_(alive, alive)]
    return Left(max(map(len, parts(rest))) / len(rest), float((rest.sum(1) == 0).mean()))


def betweenness(edges: Edges) -> NDArray[np.float64]:
    """The number of shortest paths between two others on which each replica is (Brandes, 2001); paths of equal length share one.

    Args:
        edges: the graph, boolean [size, size], symmetric.

    >>> line = np.diag(np.ones(3, dtype=bool), 1)
    >>> betweenness(line | line.T).tolist()
    [0.0, 2.0, 2.0, 0.0]
    """
    size, total = len(edges), np.zeros(len(edges))
    near = [np.flatnonzero(row).tolist() for row in edges]
    for source in range(size):
        far, paths, order = [-1] * size, [0.0] * size, []
        far[source], paths[source], queue = 0, 1.0, deque([source])
        while queue:
            one = queue.popleft()
            order.append(one)
            for other in near[one]:
                if far[other] < 0:
                    far[other] = far[one] + 1
                    queue.append(other)
                if far[other] == far[one] + 1:
                    paths[other] += paths[one]
        passing = [0.0] * size
        for one in reversed(order):
            for other in near[one]:
                if far[other] == far[one] + 1:
                    passing[one] += paths[one] / paths[other] * (1 + passing[other])
            if one != source:
                total[one] += passing[one]
    return total / 2


def structure(topology: Topology, replicas: int, who: Who, share: float, seeds: int) -> Left:
    """Like `left`, as the mean over several graphs.

    Args:
        topology: one that is the same in every round.
        replicas: number of replicas.
        who: `degree`, `betweenness` or `random`.
        share: share of the replicas that fail, 0 to 1.
        seeds: number of graphs, with the seeds 0, 1, ...

    Raises:
        ConfigurationError: the graph changes from round to round, does not fit the replicas, or no replica would fail or survive.

    >>> from thinwire.lab.topology import Ring
    >>> structure(Ring(), 8, "degree", 0.125, seeds=2)  # a ring that loses one replica is a line
    Left(giant=1.0, isolated=0.0)
    """
    found = []
    for seed in range(seeds):
        edges = _checked(topology, replicas, seed)
        found.append(left(edges, survivors(edges, who, share, seed)))
    return Left(float(np.mean([one.giant for one in found])), float(np.mean([one.isolated for one in found])))


@dataclass(frozen=True)
class Disaster:
    """The failure of a share of the replicas after `at_round` of `rounds`. `data`: all replicas have data, only those that fail, or only the others.

    Args:
        topology: one that is the same in every round.
        replicas: number of replicas.
        who: `degree`, `betweenness` or `random`.
        share: share of the replicas that fail, 0 to 1.
        at_round: number of rounds before the failure.
        rounds: total number of rounds.
        data: `everywhere`, `hit` or `others`.

    Raises:
        ConfigurationError: a setting cannot work.

    >>> from thinwire.lab.topology import Ring
    >>> learned = Disaster(Ring(), replicas=8, share=0.25, at_round=2, rounds=4).learned(seed=0)
    >>> 0 <= learned.low <= learned.mean <= 1
    True
    """

    topology: Topology
    replicas: int = 50
    who: Who = "degree"
    share: float = 0.2
    at_round: int = 30
    rounds: int = 60
    data: Data = "everywhere"

    def __post_init__(self) -> None:
        if not 0 <= self.at_round < self.rounds:
            raise ConfigurationError(
                f"at_round={self.at_round} of {self.rounds} rounds: 0 <= at_round < rounds is needed."
            )
        if self.rounds > MOST_ROUNDS:
            raise ConfigurationError(f"rounds={self.rounds}: at most {MOST_ROUNDS:,} are needed.")

    def learned(self, seed: int) -> Learned:
        """The accuracies of one run. Raises `ConfigurationError`."""
        edges = _checked(self.topology, self.replicas, seed)
        alive = survivors(edges, self.who, self.share, seed)
        has = {"everywhere": alive | ~alive, "hit": ~alive, "others": alive}[self.data]
        task = _Task(self.replicas, has, seed)
        all_of = np.ones(self.replicas, dtype=bool)
        start = np.zeros((self.replicas, FEATURES + 1, CLASSES))
        middle = task.train(start, edges, all_of, self.at_round)
        end = task.accuracy(task.train(middle, edges, alive, self.rounds - self.at_round))
        rest = edges & alive & alive[:, None]
        largest = max((part for part in parts(rest) if alive[part[0]]), key=len)
        lonely = alive & (rest.sum(1) == 0)
        apart = task.train(start, np.zeros_like(edges), all_of, self.rounds)
        return Learned(
            float(task.accuracy(middle)[alive].mean()),
            float(end[alive].mean()),
            float(np.quantile(end[alive], 0.1)),
            float(end[largest].mean()),
            float(end[lonely].mean()) if lonely.any() else float("nan"),
            float(task.accuracy(task.train(middle, edges, all_of, self.rounds - self.at_round))[alive].mean()),
            float(task.accuracy(apart)[alive & has].mean()) if (alive & has).any() else float("nan"),
        )


class _Task:
    """Ten Gaussian classes; each replica with data has a few samples of its own."""

    def __init__(self, replicas: int, has: Alive, seed: int) -> None:
        rng = np.random.default_rng(derive(seed, "classes"))
        self.centers = rng.normal(size=(CLASSES, FEATURES))
        labels = rng.integers(CLASSES, size=(replicas, SAMPLES))
        self.inputs, self.targets = self._drawn(rng, labels), np.eye(CLASSES)[labels]
        self.targets_of = has[:, None, None] / SAMPLES
        self.asked = rng.integers(CLASSES, size=(1, 2000))
        self.held_out = self._drawn(rng, self.asked)

    def _drawn(self, rng: np.random.Generator, labels: NDArray[np.int64]) -> NDArray[np.float64]:
        inputs = self.centers[labels] + 1.5 * rng.normal(size=(*labels.shape, FEATURES))
        return np.concatenate([inputs, np.ones((*labels.shape, 1))], axis=-1)

    def train(self, weights: NDArray[np.float64], edges: Edges, alive: Alive, rounds: int) -> NDArray[np.float64]:
        """Each round is a step of gradient descent on the own samples, then the mean over surviving neighbours; failed replicas do not change."""
        mixed = metropolis(edges & alive & alive[:, None])
        for _ in range(rounds):
            scores = self.inputs @ weights
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            wrong = (scores / scores.sum(-1, keepdims=True) - self.targets) * self.targets_of * alive[:, None, None]
            stepped = weights - RATE * np.swapaxes(self.inputs, 1, 2) @ wrong
            weights = np.einsum("ij,jfc->ifc", mixed, stepped)
        return weights

    def accuracy(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The accuracy of each replica [M]."""
        return np.asarray(((self.held_out @ weights).argmax(-1) == self.asked).mean(-1), dtype=np.float64)


def _checked(topology: Topology, replicas: int, seed: int) -> Edges:
    if not topology.fixed:
        raise ConfigurationError(
            f"{topology}: a graph that is the same in every round is needed; choose BarabasiAlbert(2)."
        )
    check_size(topology, replicas, seed)
    edges = topology.edges(replicas, seed=seed)
    return edges | edges.T
