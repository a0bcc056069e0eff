"""Robust rules, whose estimates liars cannot move far: their common part, and the rules that treat each coordinate separately.

A rule is two pure functions. `mixing` turns the inner products of all replicas' values into a matrix [K, M], whose rows mix the M replicas'
values into K; `combine` turns K rows into one, coordinate by coordinate. A rule by coordinates does not mix, a rule by inner products makes
one row, and Bulyan and rules after a pre-aggregation (lab/robust/pre_aggregation.py) do both.

A liar is a replica that may send anything as its delta. Carriers and owners of shards are honest (docs/robust.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.pieces.aggregate import Aggregate, Values
from thinwire.rng import Key

_COLUMNS = 1 << 15  # columns that are sorted at a time


class RobustRule(Aggregate):
    """A robust rule. All replicas have the same weight, because a liar could claim any.

    A replica with values that are not finite counts as a liar: it is left out, and the rule for one liar and one replica fewer is used.
    If more must be left out than the rule tolerates, the estimate is NaN and the round is refused.
    """

    def without(self, count: int) -> Self:
        """The rule for a group after `count` liars were left out."""
        return self

    def mixing(self, products: Tensor, key: Key) -> Tensor:
        """The matrix [K, M] in fp64 for finite `products` [M, M]."""
        return torch.eye(len(products), dtype=torch.float64)

    def combine(self, rows: Tensor) -> Tensor:
        """One estimate from `rows` [K, n], for each coordinate; values are added in sorted order. By default the only row that `mixing` made."""
        assert len(rows) == 1, f"{self} combines no rows"
        return rows[0]

    def given(self, products: Tensor, key: Key) -> Aggregate:
        size = len(products)
        sound = torch.isfinite(products.diagonal()).nonzero().flatten()
        gone = size - len(sound)
        if gone > self.tolerates(size):
            return Mixed(self, torch.full((1, size), torch.nan, dtype=torch.float64))
        rule = self.without(gone)
        mixed = rule.mixing(products[sound][:, sound], key)
        matrix = torch.zeros(len(mixed), size, dtype=torch.float64)
        matrix[:, sound] = mixed
        return Mixed(rule, matrix)

    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        rows = torch.stack([one.decoded() for one in values])
        sound = torch.isfinite(rows).all(1)
        gone = len(rows) - int(sound.sum())
        if gone > self.tolerates(len(rows)):
            out.fill_(torch.nan)
        else:
            by_columns(self.without(gone).combine, rows[sound] if gone else rows, out)


@dataclass(frozen=True, eq=False)
class Mixed(Aggregate):
    """`rule` in one round: combines the rows of `matrix` times the values."""

    rule: RobustRule
    matrix: Tensor

    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        if len(self.matrix) == 1:
            for one, weight in zip(values, self.matrix[0].tolist()):
                if weight:
                    one.add_to(out, weight)
            return
        rows = torch.zeros(len(self.matrix), out.numel())
        for one, shares in zip(values, self.matrix.T.tolist()):
            if any(shares):
                decoded = one.decoded()
                for row, share in zip(rows, shares):
                    if share:
                        row.add_(decoded * share)
        by_columns(self.rule.combine, rows, out)


def by_columns(combine: Callable[[Tensor], Tensor], rows: Tensor, out: Tensor) -> None:
    """out ← combine(rows), some columns at a time."""
    for begin in range(0, out.numel(), _COLUMNS):
        out[begin : begin + _COLUMNS] = combine(rows[:, begin : begin + _COLUMNS])


def middle(ordered: Tensor) -> Tensor:
    """The median of sorted rows; for an even number the mean of the middle two."""
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else ordered[half - 1] * 0.5 + ordered[half] * 0.5


def mean_of(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """The mean of the rows, added from first to last, so that the bits do not depend on the machine."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))


def nearest(rows: Tensor, count: int) -> Tensor:
    """For each coordinate the mean of the `count` values nearest to the median; in a tie the smaller value counts."""
    ordered = rows.sort(0).values
    near = (ordered - middle(ordered)).abs().argsort(stable=True, dim=0)[:count].sort(0).values
    return mean_of(ordered.gather(0, near))


@dataclass(frozen=True)
class Stated(RobustRule):
    """A rule for a stated number of `liars`, which needs at least `per_liar`·liars + `beside` replicas."""

    liars: int = 1

    per_liar: ClassVar[int] = 2
    beside: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if type(self.liars) is not int or self.liars < 0:
            raise ConfigurationError(
                f"{self}: liars is the number of replicas that may lie, a whole number, 0 or more."
            )

    def tolerates(self, size: int) -> int:
        return max(0, min(self.liars, (size - self.beside) // self.per_liar))

    def check(self, size: int) -> None:
        least = self.per_liar * self.liars + self.beside
        if size < least:
            raise ConfigurationError(
                f"{self} among {size} replicas: with {self.liars} liar(s) at least {self.per_liar}·{self.liars} + {self.beside} = {least} are "
                f"needed; it tolerates {self.tolerates(size)} here. Add replicas, or state fewer liars."
            )

    def without(self, count: int) -> Self:
        return replace(self, liars=max(0, self.liars - count)) if count else self


@dataclass(frozen=True)
class Median(RobustRule):
    """The median of each coordinate: x̂_k = median_i x_ik; for an even number of replicas the mean of the middle two.

        x̂_k = (x_(⌈M/2⌉)k + x_(⌊M/2⌋ + 1)k) / 2          x_(1)k ≤ … ≤ x_(M)k: the sorted values of coordinate k

    It tolerates fewer than half: ⌊(M − 1)/2⌋ liars. It is not a mean: if a coordinate is skewed over replicas, as with sparse codecs, it is
    biased, and it averages little noise.

    *Source*: Yin et al. (arXiv 1803.01498, §2). *Differs*: nothing, if all values are finite; replicas that send others are left out.

    *Wire*: nothing more than a mean. Cost: a sort of M values a coordinate; 4·M bytes a value of a range.

    >>> from thinwire.codecs import Identity
    >>> packets = [Values(Identity(), torch.tensor([x, 8.0]).view(torch.uint8), Key(), 2) for x in (1.0, 3.0, 1e9)]
    >>> out = torch.zeros(2)
    >>> Median().into(out, packets)
    >>> out.tolist()
    [3.0, 8.0]
    """

    def tolerates(self, size: int) -> int:
        return (size - 1) // 2

    def combine(self, rows: Tensor) -> Tensor:
        return middle(rows.sort(0).values)


@dataclass(frozen=True)
class TrimmedMean(Stated):
    """The mean of each coordinate without its f largest and its f smallest values, f = `liars`.

        x̂_k = 1/(M − 2f) · (x_(f + 1)k + … + x_(M − f)k)          x_(1)k ≤ … ≤ x_(M)k: the sorted values of coordinate k

    It needs 2f + 1 replicas; with f = 0 it is the mean.

    *Source*: Yin et al. (arXiv 1803.01498, §2). *Differs*: the number f is given, in the paper the share β = f/M.

    *Wire*: nothing more than a mean. Cost: a sort of M values a coordinate; 4·M bytes a value of a range.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> TrimmedMean(1).combine(torch.tensor([[1.0], [2.0], [4.0], [1e9]])).tolist()
    [3.0]
    """

    def combine(self, rows: Tensor) -> Tensor:
        return mean_of(rows.sort(0).values[self.liars : len(rows) - self.liars])


@dataclass(frozen=True)
class MeaMed(Stated):
    """The mean, of each coordinate, of the M − f values nearest to its median, f = `liars`.

        x̂_k = mean of the M − f values x_ik with the least |x_ik − median_j x_jk|

    It needs 2f + 1 replicas; with f = 0 it is the mean.

    *Source*: mean around median (Xie et al., arXiv 1802.10116, §4). *Differs*: only in ties, where the smaller value counts.

    *Wire*: nothing more than a mean. Cost: two sorts of M values a coordinate; 4·M bytes a value of a range.

    Args:
        liars: f, the number of replicas that may lie.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> MeaMed(1).combine(torch.tensor([[1.0], [2.0], [3.0], [1e9]])).tolist()
    [2.0]
    """

    def combine(self, rows: Tensor) -> Tensor:
        return nearest(rows, len(rows) - self.liars)
