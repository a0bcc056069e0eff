"""Aggregates: how the values of all replicas become one estimate."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import Codec
from thinwire.codecs.exact import divide
from thinwire.rng import Key
from thinwire.types import State


@dataclass(frozen=True)
class Values:
    """One replica's encoded values of a range.

    Args:
        codec: what encoded them.
        payload: the encoded values, uint8 bytes.
        key: the round and the sender, for codecs that draw random numbers.
        numel: the number of elements of the range.
        refused: the replica sent no values, and they count as not finite.

    >>> from thinwire.codecs import Identity
    >>> Values(Identity(), torch.tensor([1.0, 8.0]).view(torch.uint8), Key(), 2).decoded().tolist()
    [1.0, 8.0]
    """

    codec: Codec
    payload: Tensor
    key: Key
    numel: int
    refused: bool = False

    def add_to(self, out: Tensor, weight: float = 1.0) -> None:
        """out ← out + weight · values (flat fp32), decoded and added in one pass."""
        self.codec.decode_add(self.payload, out, self.key, weight)

    def decoded(self) -> Tensor:
        """The values, flat and in fp32."""
        out = torch.zeros(self.numel)
        if self.refused:
            return out.fill_(torch.nan)
        self.add_to(out)
        return out


@runtime_checkable
class Aggregate(Protocol):
    """How the values of all replicas become one estimate. An exchange calls it range by range, with the replicas in rank order.

    Laws (tests/pieces/test_aggregates.py): the estimate from one replica is its values; a range alone gives the same as in the whole; the estimate
    depends on values and weights only, so that it has the same bits on all replicas.

    An aggregate that `needs_products` gets the inner products of all replicas' values of the whole fragment in each round (`given`), and
    returns the aggregate that is called range by range. It may keep a state of each round (`init`, `measured`).
    """

    @property
    def linear(self) -> bool:
        """Whether partial sums are possible: the aggregate of the aggregates of parts, weighted by their replicas, is that of the whole.
        `AllReduce`, `Hierarchy`, a `Membership` and `Feedback(kappa=1)` need it.
        """
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round, as the end of a sentence that begins with the aggregate; empty: the membership
        may change, and deltas may have different weights.
        """
        return "is no mean over all, where a delta may count more than another; Mean() is" if not self.linear else ""

    @property
    def needs_products(self) -> bool:
        """Whether it needs inner products of whole fragments; an exchange that `multiplies` has them."""
        return False

    def tolerates(self, size: int) -> int:
        """Its breakdown point: the number of `size` replicas that may send any values, even not finite ones, while the estimate stays bounded."""
        return 0

    def check(self, size: int) -> None:
        """Raise `ConfigurationError` if `size` replicas are too few."""
        return

    def init(self, numel: int, size: int) -> State:
        """The first state for the `numel` elements that this replica aggregates: flat fp32 tensors of `numel`."""
        return {}

    def measured(self, values: Tensor, before: State, after: State) -> Tensor:
        """The rows, one a replica, whose inner products are taken, from the `values` [size, n] of a range. Writes the next state to `after`."""
        return values

    def given(self, products: Tensor, key: Key) -> Aggregate:
        """The aggregate to call for the ranges of a round with these inner products [size, size] in fp64. A row that is not finite belongs to a
        replica that sent NaN or infinity. `key` is the round's, the same on all replicas.
        """
        return self

    @abstractmethod
    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        """Write the estimate into `out` (flat fp32 zeros). The sum of `weights` is 1; None: equal weights."""


@dataclass(frozen=True)
class Mean(Aggregate):
    """The weighted mean: x̂ = Σ_m w_m·c_m, with w_m = 1/M for equal weights. Added in fp32, in rank order.

        x̂ ← Σ_m w_m·c_m,   Σ_m w_m = 1          c_m: the decoded values of replica m;   without weights x̂ ← (Σ_m c_m) / M

    *Source*: none; the usual mean. Cost: one pass a packet, which also decodes it.

    >>> from thinwire.codecs import Identity
    >>> packets = [Values(Identity(), torch.tensor([x, 8.0]).view(torch.uint8), Key(), 2) for x in (1.0, 3.0)]
    >>> out = torch.zeros(2)
    >>> Mean().into(out, packets)
    >>> out.tolist()
    [2.0, 8.0]
    """

    linear: ClassVar[bool] = True

    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        for one, weight in zip(values, weights or [1.0] * len(values)):
            one.add_to(out, weight)
        if weights is None and len(values) > 1:
            divide(out, len(values))


@dataclass(frozen=True)
class MeanOverSenders(Aggregate):
    """The mean over the replicas that have sent a value, not over all: x̂_i = Σ_m w_m·c_mi / Σ_{m: c_mi ≠ 0} w_m.

        x̂_i ← Σ_m w_m·c_mi / Σ_{m: c_mi ≠ 0} w_m,   0 if nobody has sent value i          c_mi: value i that replica m sent

    For sparse codecs. If replicas choose differently, the mean over all shrinks a value that few have sent. This mean does
    not, so it is *no estimate of the mean delta*, and larger. For a mean in a codec's own basis, as DeMo takes it, wrap that codec in
    `OverSenders` and leave this at `Mean()`.

    *Source*: SparseLoCo's released code (Sarfi et al., arXiv 2508.15706; the paper's equation has the mean over all). *Differs*: a replica
    that sends a zero has not sent it. *Wire*: nothing. Cost: one pass a packet.

    >>> from thinwire.codecs import Identity
    >>> packets = [Values(Identity(), torch.tensor([x, 8.0]).view(torch.uint8), Key(), 2) for x in (0.0, 3.0)]
    >>> out = torch.zeros(2)
    >>> MeanOverSenders().into(out, packets)
    >>> out.tolist()
    [3.0, 8.0]
    """

    def into(self, out: Tensor, values: Sequence[Values], weights: Sequence[float] | None = None) -> None:
        shares = weights or [1.0] * len(values)
        out.copy_(mean_over_senders(((one.decoded(), share) for one, share in zip(values, shares)), out.numel()))


def mean_over_senders(values: Iterable[tuple[Tensor, float]], numel: int) -> Tensor:
    """Σ w·x / Σ_{x ≠ 0} w of each element, in fp32 and in the given order; 0 where all x are 0.

    Args:
        values: flat fp32 values of `numel` elements each, with their weights; they are zeros afterwards.
        numel: number of elements.

    >>> mean_over_senders([(torch.tensor([2.0, 0.0]), 1.0), (torch.tensor([4.0, 6.0]), 1.0)], numel=2)
    tensor([3., 6.])
    """
    total, counted = torch.zeros(numel), torch.zeros(numel)
    for one, weight in values:
        kernels.of(one, total, counted).add_sent(one, total, counted, weight)
    kernels.of(total, counted).divide_sent(total, counted)
    return total
