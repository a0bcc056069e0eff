"""Steps before a robust rule: replicas' values are mixed with their nearest, averaged in buckets, or clipped."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.lab.robust.coordinates import Median, RobustRule, Stated
from thinwire.lab.robust.products import squared_distances, times
from thinwire.rng import Key, draw


@dataclass(frozen=True)
class Before(RobustRule):
    """Mixes the replicas' values by the matrix `first` before `rule` gets them. The rule's inner products are those of the mixed values: P·G·Pᵀ."""

    rule: RobustRule = Median()

    needs_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rule, RobustRule) or isinstance(self.rule, type):
            raise ConfigurationError(
                f"{self}: a robust rule for the mixed values is needed, such as Median(); see `thinwire docs robust`."
            )

    @abstractmethod
    def first(self, products: Tensor, key: Key) -> Tensor:
        """The matrix P [K, M] in fp64 that mixes M replicas' values into K."""

    def tolerates(self, size: int) -> int:
        return self.rule.tolerates(size)

    def check(self, size: int) -> None:
        self.rule.check(size)

    def without(self, count: int) -> Self:
        return replace(self, rule=self.rule.without(count)) if count else self

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        mixed = self.first(products, key)
        seen = times(times(mixed, products), mixed.T.contiguous())
        return times(self.rule.mixing((seen + seen.T) / 2, key), mixed)

    def combine(self, rows: Tensor) -> Tensor:
        return self.rule.combine(rows)


@dataclass(frozen=True)
class BeforeStated(Stated, Before):
    """A pre-aggregation for a stated number of liars; `rule` may have its own number."""

    def __post_init__(self) -> None:
        Before.__post_init__(self)
        Stated.__post_init__(self)

    def tolerates(self, size: int) -> int:
        return min(Stated.tolerates(self, size), self.rule.tolerates(size))

    def check(self, size: int) -> None:
        Stated.check(self, size)
        self.rule.check(size)

    def without(self, count: int) -> Self:
        return replace(self, liars=max(0, self.liars - count), rule=self.rule.without(count)) if count else self


@dataclass(frozen=True)
class NearestNeighbourMixing(BeforeStated):
    """Replace each replica's values by the mean of the M − f that are nearest to them (itself is one), then take `rule`.

        y_i = mean of the M − f values x_j with the least ‖x_i − x_j‖;   x̂ = rule(y_1, …, y_M)          f = `liars`

    It makes a rule nearly optimal if the replicas' data differ.

    *Source*: NNM (Allouah et al., arXiv 2302.01772, Algorithm 2). *Differs*: only in ties: itself counts first, then lower ranks.

    *Wire* and cost: as `Krum`, and with a rule by coordinates M² additions a value.

    Args:
        rule: the rule for the mixed values.
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> x = torch.tensor([[0.0], [1.0], [90.0]], dtype=torch.float64)
    >>> NearestNeighbourMixing(liars=1).first(x @ x.T, Key()).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """

    def first(self, products: Tensor, key: Key) -> Tensor:
        size, squared = len(products), squared_distances(products)
        count = max(1, size - self.liars)
        mixed = torch.zeros(size, size, dtype=torch.float64)
        for i, row in enumerate(squared):
            near = sorted((square, j != i, j) for j, square in enumerate(row))[:count]
            mixed[i, [j for _, _, j in near]] = 1 / count
        return mixed


@dataclass(frozen=True)
class Bucketing(Before):
    """Put the replicas into random buckets of `each`, take the mean of each bucket, then `rule` of these ⌈M/each⌉ means.

        y_b = mean of x_π(i) over (b − 1)·each < i ≤ b·each;   x̂ = rule(y_1, …, y_⌈M/each⌉)          π: a random order

    A liar spoils its bucket, so it tolerates as many liars as `rule` tolerates among ⌈M/each⌉.

    *Source*: Karimireddy et al. (arXiv 2006.09365, Algorithm 1). *Differs*: π is drawn from the run's seed in every round, the same on all
    replicas; a last bucket with fewer replicas is divided by their number.

    *Wire* and cost: as `Krum`.

    Args:
        rule: the rule for the means of the buckets.
        each: replicas of a bucket, 1 or more; the last may have fewer.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Bucketing().first(torch.eye(4, dtype=torch.float64), Key(seed=3)).sum(0).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    each: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.each) is not int or self.each < 1:
            raise ConfigurationError(
                f"{self}: each is the replicas of a bucket, a whole number, 1 or more; 2 is usual."
            )

    def tolerates(self, size: int) -> int:
        return self.rule.tolerates(-(-size // self.each))

    def check(self, size: int) -> None:
        self.rule.check(-(-size // self.each))

    def first(self, products: Tensor, key: Key) -> Tensor:
        size = len(products)
        order = draw(key.shared("buckets"), 0, size).argsort().tolist()
        mixed = torch.zeros(-(-size // self.each), size, dtype=torch.float64)
        for bucket, row in enumerate(mixed):
            members = order[bucket * self.each : (bucket + 1) * self.each]
            row[members] = 1 / len(members)
        return mixed


def _shrunk(products: Tensor, limit: float) -> Tensor:
    """The diagonal matrix that clips each row's norm to `limit`."""
    norms = [math.sqrt(max(0.0, square)) for square in products.diagonal().tolist()]
    return torch.diag(torch.tensor([limit / norm if norm > limit else 1.0 for norm in norms], dtype=torch.float64))


@dataclass(frozen=True)
class StaticClipping(Before):
    """Clip the norm of each replica's values to `norm`, x_i ← x_i·min(1, c/‖x_i‖), then take `rule`.

        y_i = x_i·min(1, c/‖x_i‖);   x̂ = rule(y_1, …, y_M)          c = `norm`

    *Source*: none; the usual clipping. *Wire* and cost: as `Krum`.

    Args:
        rule: what takes the clipped values.
        norm: c, a number above 0, in the unit of a fragment's delta.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> StaticClipping(norm=2.0).first(torch.diag(torch.tensor([16.0, 1.0], dtype=torch.float64)), Key()).tolist()
    [[0.5, 0.0], [0.0, 1.0]]
    """

    norm: float = 2.0

    claims: ClassVar[tuple[str, ...]] = ("clips",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.norm < math.inf:
            raise ConfigurationError(f"{self}: a norm above 0 is needed, in the unit of a fragment's delta.")

    def first(self, products: Tensor, key: Key) -> Tensor:
        return _shrunk(products, self.norm)


@dataclass(frozen=True)
class ARC(BeforeStated):
    """Clip the ⌊(2f/M)·(M − f)⌋ largest norms to the next largest, then take `rule`: adaptive robust clipping, f = `liars`.

        k = ⌊(2f/M)·(M − f)⌋,   C = the (k + 1)-th largest ‖x_i‖;   x̂ = rule(y_1, …, y_M),   y_i = x_i·min(1, C/‖x_i‖)

    The threshold follows from the values, so none must be chosen.

    *Source*: Allouah et al. (arXiv 2405.14432, Algorithm 2). *Differs*: nothing. *Wire* and cost: as `Krum`.

    Args:
        rule: what takes the clipped values.
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> ARC(liars=1).first(torch.diag(torch.tensor([16.0, 1.0, 4.0], dtype=torch.float64)), Key()).diagonal().tolist()
    [0.5, 1.0, 1.0]
    """

    def first(self, products: Tensor, key: Key) -> Tensor:
        size = len(products)
        clipped = 2 * self.liars * (size - self.liars) // size
        square = sorted(products.diagonal().tolist())[size - clipped - 1]
        return _shrunk(products, math.sqrt(max(0.0, square)))
