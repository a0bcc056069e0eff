"""Robust rules that weigh whole replicas by the inner products of their values: x̂ = Σ_i w_i·x_i. Also Bulyan, which selects by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.lab.robust.coordinates import RobustRule, Stated, nearest
from thinwire.lab.robust.products import squared_distances, times
from thinwire.rng import Key

MOST_SUBSETS = 200_000  # most subsets that MDA compares


def as_row(weights: Sequence[float]) -> Tensor:
    """The weights as a matrix [1, M] in fp64."""
    return torch.tensor([list(weights)], dtype=torch.float64)


def selected(ranks: Sequence[int], size: int) -> Tensor:
    """The matrix [1, M] that takes the mean of the replicas `ranks`."""
    return as_row([1 / len(ranks) if rank in ranks else 0.0 for rank in range(size)])


def krum_scores(squared: Sequence[Sequence[float]], ranks: Sequence[int], liars: int) -> list[tuple[float, float]]:
    """For each of `ranks` the sum of its |ranks| − f − 2 (at least one) smallest squared distances to the others. The second value, the sum
    of all distances, decides between equal scores, such as those of two that are each other's nearest.
    """
    count = max(1, len(ranks) - liars - 2)
    squares = [sorted(squared[i][j] for j in ranks if j != i) for i in ranks]
    return [(math.fsum(of[:count]), math.fsum(of)) for of in squares]


class ByScores(Stated):
    """A rule that selects by `krum_scores`, which need 3 replicas in addition to those for the liars."""

    needs_products: ClassVar[bool] = True
    beside: ClassVar[int] = 3

    def ranked(self, products: Tensor) -> list[int]:
        """All replicas, those with the least scores first; in a tie the lower rank first."""
        ranks = range(len(products))
        scores = krum_scores(squared_distances(products), ranks, self.liars)
        return sorted(ranks, key=scores.__getitem__)


@dataclass(frozen=True)
class Krum(ByScores):
    """The values of one replica: of the one whose M − f − 2 nearest others are nearest, f = `liars`.

        score_i = Σ over the M − f − 2 smallest ‖x_i − x_j‖²;   x̂ = x_i with the least score

    *Source*: Blanchard et al. (NeurIPS 2017, Machine Learning with Adversaries). It needs 2f + 3 replicas. Nothing is averaged: its estimate is
    as noisy as one replica's delta. *Differs*: of equal scores the one with the least sum of all distances wins, then the lower rank; in the
    paper the lower rank. Codes differ: byzfl and byzpy take M − f − 1 neighbours, epfml squares twice.

    *Wire*: 8·M² bytes of inner products to each other replica with `TwoShot`, nothing with `Direct`. Cost: M² products a value.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> x = torch.tensor([[0.0], [1.0], [1.4], [2.5], [90.0]], dtype=torch.float64)
    >>> Krum(1).mixing(x @ x.T, Key()).tolist()
    [[0.0, 1.0, 0.0, 0.0, 0.0]]
    """

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        return selected(self.ranked(products)[:1], len(products))


@dataclass(frozen=True)
class MultiKrum(ByScores):
    """The mean of the M − f replicas with the least of `Krum`'s scores, f = `liars`.

        x̂ ← 1/(M − f) · Σ x_i over the M − f replicas with the least score_i

    *Source*: Blanchard et al. (NeurIPS 2017). It needs 2f + 3 replicas. *Differs*: the paper leaves open how many are averaged; here M − f, as
    in byzfl (Garfield takes M − f − 2). Ties as in `Krum`.

    *Wire* and cost: as `Krum`.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> x = torch.tensor([[0.0], [1.0], [1.4], [2.5], [90.0]], dtype=torch.float64)
    >>> MultiKrum(1).mixing(x @ x.T, Key()).tolist()
    [[0.25, 0.25, 0.25, 0.25, 0.0]]
    """

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        size = len(products)
        return selected(self.ranked(products)[: size - self.liars], size)


@dataclass(frozen=True)
class Bulyan(ByScores):
    """Select M − 2f replicas by `Krum`, one after another; then, of each coordinate, the mean of the M − 4f values nearest to the median.

        S ← S ∪ {Krum of the replicas that are not in S}, M − 2f times;   x̂_k ← mean of the M − 4f values x_ik, i ∈ S, nearest to their median

    *Source*: El Mhamdi et al. (arXiv 1802.07927, §4), f = `liars`. Scores are computed again after each selection, from those that are left. It
    needs 4f + 3 replicas. *Differs*: a score counts at least one neighbour, even if of the few that are left the paper's number is 0. The
    released code of the Flag Aggregator, which others copy, does not compute scores again.

    *Wire*: as `Krum`. Cost: M² products and a sort of M values a coordinate.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Bulyan(1)
    Bulyan(liars=1)
    """

    per_liar: ClassVar[int] = 4

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        size, squared = len(products), squared_distances(products)
        left, chosen = list(range(size)), list[int]()
        while len(chosen) < size - 2 * self.liars:
            scores = krum_scores(squared, left, self.liars)
            chosen.append(left.pop(scores.index(min(scores))))
        matrix = torch.zeros(len(chosen), size, dtype=torch.float64)
        matrix[range(len(chosen)), sorted(chosen)] = 1.0
        return matrix

    def combine(self, rows: Tensor) -> Tensor:
        return nearest(rows, len(rows) - 2 * self.liars)


@dataclass(frozen=True)
class MDA(Stated):
    """The mean of the M − f replicas that are nearest together: the subset with the smallest diameter, f = `liars`.

        S = argmin over |S| = M − f of max_{i, j ∈ S} ‖x_i − x_j‖;   x̂ = 1/(M − f) · Σ_{i ∈ S} x_i

    *Source*: minimum diameter averaging (El Mhamdi et al., arXiv 1905.03853, §3). It needs 2f + 1 replicas. *Differs*: of subsets with the same
    diameter the one with the least sum of squared distances counts (byzfl: the first), and more than 200,000 subsets are refused.

    *Wire*: as `Krum`. Cost: M² products a value, and all M-choose-f subsets.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> x = torch.tensor([[0.0], [1.0], [1.4], [2.5], [90.0]], dtype=torch.float64)
    >>> MDA(1).mixing(x @ x.T, Key()).tolist()
    [[0.25, 0.25, 0.25, 0.25, 0.0]]
    """

    needs_products: ClassVar[bool] = True

    def check(self, size: int) -> None:
        super().check(size)
        if math.comb(size, self.liars) > MOST_SUBSETS:
            raise ConfigurationError(
                f"{self} among {size} replicas: {math.comb(size, self.liars):,} subsets, at most {MOST_SUBSETS:,} are compared; choose "
                f"MultiKrum({self.liars}) or GeometricMedian()."
            )

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        size, squared = len(products), squared_distances(products)
        subsets = combinations(range(size), size - self.liars)

        def spread(subset: Sequence[int]) -> tuple[float, float]:
            squares = [squared[i][j] for i, j in combinations(subset, 2)]
            return max(squares, default=0.0), math.fsum(squares)

        return selected(min(subsets, key=spread), size)


def distances_from(products: Tensor, weights: Tensor) -> list[float]:
    """‖x_i − Σ_j w_j·x_j‖ for each i, by d_i² = G_ii − 2(Gw)_i + w'Gw."""
    pulled = times(products, weights[:, None])
    own = float(times(weights[None, :], pulled))
    squares = (products.diagonal() - 2 * pulled[:, 0] + own).tolist()
    return [math.sqrt(max(0.0, square)) for square in squares]


@dataclass(frozen=True)
class GeometricMedian(RobustRule):
    """The point from which the sum of the distances to all replicas' values is least: x̂ = argmin_z Σ_i ‖x_i − z‖.

        z ← Σ w_i·x_i / Σ w_i,   w_i = 1 / max(‖x_i − z‖, ν)      (Weiszfeld, smoothed)

    *Source*: RFA (Pillutla et al., arXiv 1912.13445, Algorithm 2). It tolerates fewer than half: ⌊(M − 1)/2⌋ liars. *Differs*: it starts
    from the mean of the narrowest majority (the replicas nearest to one of them) and iterates until no weight moves by 1e-12, at most 1,000
    times; ν is 1e-6 of that majority's radius. So liars, however far away, affect neither the start nor ν. The released code stops after 4
    iterations from the mean, byzfl's default after 3 from 0 with ν = 0.1, before they have converged.

    *Wire* and cost: as `Krum`.

    >>> x = torch.tensor([[0.0], [1.0], [1e9]], dtype=torch.float64)
    >>> [round(w, 3) for w in GeometricMedian().mixing(x @ x.T, Key())[0].tolist()]
    [0.0, 1.0, 0.0]
    """

    needs_products: ClassVar[bool] = True

    def tolerates(self, size: int) -> int:
        return (size - 1) // 2

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        size, squared = len(products), squared_distances(products)
        most = size // 2 + 1
        square, middle = min((sorted(row)[most - 1], rank) for rank, row in enumerate(squared))
        majority = sorted(range(size), key=squared[middle].__getitem__)[:most]
        weights, smooth = selected(majority, size)[0], 1e-6 * math.sqrt(square)
        if not smooth:  # all values are equal
            return weights[None, :]
        for _ in range(1000):
            pulls = [1 / max(distance, smooth) for distance in distances_from(products, weights)]
            total = math.fsum(pulls)
            before, weights = weights, torch.tensor([pull / total for pull in pulls], dtype=torch.float64)
            if float((weights - before).abs().max()) < 1e-12:
                break
        return weights[None, :]


@dataclass(frozen=True)
class CenteredClipping(RobustRule):
    """Each replica pulls by at most `radius`:  v ← v + (1/M)·Σ_i (x_i − v)·min(1, τ/‖x_i − v‖), `iterations` times from v = 0.

        x̂ = v after the last iteration,   τ = `radius`, or the median of ‖x_i − v‖ in each iteration

    A liar moves the estimate by at most `iterations`·τ/M; fewer than half are tolerated. Without `radius` τ fits deltas of any size.

    *Source*: Karimireddy et al. (arXiv 2012.10333, Algorithm 2). *Differs*: v begins at 0, as in byzfl's first call, not at the previous
    estimate, because deltas begin at anchors that have moved; the median as τ is ours.

    *Wire* and cost: as `Krum`.

    Args:
        radius: τ, a number above 0, in the unit of a delta's norm; None: the median distance.
        iterations: number of times that v moves, 1 to 1000.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> x = torch.tensor([[1.0], [1.0], [1e9]], dtype=torch.float64)
    >>> float((CenteredClipping(iterations=1).mixing(x @ x.T, Key()) @ x).item())
    1.0
    """

    radius: float | None = None
    iterations: int = 3

    needs_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fits = self.radius is None or 0 < self.radius < math.inf
        if not fits or type(self.iterations) is not int or not 1 <= self.iterations <= 1000:
            raise ConfigurationError(
                f"{self}: a radius above 0 or None, and 1 to 1000 iterations, are needed; 3 is usual."
            )

    def tolerates(self, size: int) -> int:
        return (size - 1) // 2

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        size = len(products)
        weights = torch.zeros(size, dtype=torch.float64)
        for _ in range(self.iterations):
            distances = distances_from(products, weights)
            radius = sorted(distances)[(size - 1) // 2] if self.radius is None else self.radius
            pulls = [1.0 if distance <= radius else radius / distance for distance in distances]
            kept = 1 - math.fsum(pulls) / size
            weights = weights * kept + torch.tensor(pulls, dtype=torch.float64) / size
        return weights[None, :]
