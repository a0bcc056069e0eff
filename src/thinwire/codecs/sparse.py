"""Sparse codecs send a few of the values and their indices. The values are encoded in any dense codec.

Payload: the payload of the values, then the indices (none if both sides can draw them).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.base import (
    VALUES,
    Codec,
    chance,
    check_finite,
    check_fit,
    check_inner,
    check_whole,
    kernels_for,
    not_finite,
)
from thinwire.codecs.cast import Cast
from thinwire.codecs.layout import Part, Places, check_ascending
from thinwire.errors import ConfigurationError
from thinwire.rng import Key

# factors of a density, dense near 1, because policies trade in small steps
_FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)


class LargestOfChunks(Codec, ABC):
    """The common part of `TopK` and `ChunkedTopK`: the largest values of each chunk in the codec `values`, then their indices in the chunk."""

    values: Codec

    any_device: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    @abstractmethod
    def _places(self, numel: int) -> Places: ...

    @property
    def claims(self) -> frozenset[str]:
        return (self.values.claims & {"odd", "contractive"}) | {"refuses"} | chance([self.values], fair=False)

    def nbytes(self, numel: int) -> int:
        places = self._places(numel)
        return self.values.nbytes(places.kept) + places.nbytes

    def layout(self, numel: int) -> tuple[Part, ...]:
        places = self._places(numel)
        return (*self.values.layout(places.kept), places)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        places = self._places(x.numel())
        within = _largest(self, x, payload, places)
        begin = self.values.nbytes(len(within))
        self.values.encode(x.index_select(0, _index(within, places)), payload[:begin], key)
        payload[begin:] = places.pack(within)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        _add_sent(self, payload, out, key, weight)

    def few(self, numel: int) -> int:
        return self._places(numel).kept

    def sent(self, payload: Tensor, numel: int, index: Tensor, values: Tensor, key: Key, weight: float = 1.0) -> None:
        places = self._places(numel)
        begin = self.values.nbytes(places.kept)
        places.unpack(payload[begin:], index)
        if not places.together:
            check_ascending(index[index >= places.chunk], places.chunk)  # empty if the chunk is a power of two
            index.copy_(_index(index, places))
            check_ascending(index, numel)
        self.values.decode_add(payload[:begin], values.zero_(), key, weight)


@dataclass(frozen=True)
class TopK(LargestOfChunks):
    """Send exactly the k = ⌈density·n⌉ largest values by magnitude of the whole tensor; the first ones among equals. For many values a
    threshold from a sample finds them.

        q(x)_i = x_i if |x_i| is one of the k largest, 0 if not

    Contractive: ‖q(x) − x‖² ≤ (1 − k/n)·‖x‖² if the values are exact. Without feedback it is much worse on deltas than few
    bits for every value (Streaming DiLoCo, arXiv 2501.18512, §3); use it with feedback.

    *Source*: Sparsified SGD (Stich, Cordonnier, Jaggi, arXiv 1809.07599). *Differs*: the kept values are rounded too, to bf16 by default.

    *Wire*: the values in ascending order of index, then the indices in the code of Elias (1974) and Fano (1971), which has
    k·l + k + ⌊(n − 1) / 2^l⌋ bits, l = ⌊log₂ n/k⌋; each part ends with a whole byte. With the default `values` this is about
    density·(18 + log₂ 1/density) bits per parameter: 0.25 for 1 %.

    Args:
        density: k/n, in (0, 1].
        values: the codec of the values that are kept.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> TopK(density=0.01).nbytes(1_000_000)
    30703
    """

    density: float = 0.01
    values: Codec = Cast("bf16")

    def __post_init__(self) -> None:
        _check(self, self.density, self.values)

    def _places(self, numel: int) -> Places:
        return Places(numel, max(1, numel), max(1, math.ceil(self.density * numel)), together=True)

    def denser(self, density: float) -> TopK:
        return replace(self, density=max(density, self.density))

    def forms(self) -> tuple[TopK, ...]:
        return tuple(replace(self, density=min(1.0, factor * self.density)) for factor in _FACTORS)


@dataclass(frozen=True)
class ChunkedTopK(LargestOfChunks):
    """Send the `count` largest values by magnitude of each `chunk` neighbours, so that an index needs few bits.

        q(x)_i = x_i if |x_i| is one of the `count` largest of its chunk, 0 if not

    *Source*: SparseLoCo (Sarfi et al., arXiv 2508.15706) and DeMo (arXiv 2411.19870), which cut matrices into squares of 64 × 64.
    *Differs*: here a chunk is a range of the flat fragment (`Squares` cuts squares). A shorter last chunk keeps its share, rounded up.

    *Wire*: the values, chunk by chunk in ascending order of index, then their indices within the chunk in
    ⌈log₂ chunk⌉ bits each: 12 for 4096, two in three bytes. count/chunk·(b + 12) bits per parameter: 0.44 for 64 of
    4096 in bf16, 0.20 with `values=Sign()`.

    Args:
        chunk: number of neighbours from which values are kept.
        count: number of values kept per chunk, at most `chunk`.
        values: the codec of the values that are kept.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> ChunkedTopK(4096, 64).nbytes(1 << 20)
    57344
    """

    chunk: int = 4096
    count: int = 64
    values: Codec = Cast("bf16")

    def __post_init__(self) -> None:
        check_whole(self)
        if not 0 < self.count <= self.chunk:
            raise ConfigurationError(
                f"ChunkedTopK(chunk={self.chunk}, count={self.count}): 0 < count <= chunk is needed; 64 of 4096 are SparseLoCo's."
            )
        _check(self, 1.0, self.values)

    def denser(self, density: float) -> ChunkedTopK:
        return replace(self, count=max(math.ceil(density * self.chunk), self.count))

    def forms(self) -> tuple[ChunkedTopK, ...]:
        counts = {min(self.chunk, math.ceil(factor * self.count)) for factor in _FACTORS} - {self.count}
        return tuple(replace(self, count=count) for count in sorted(counts))

    def _places(self, numel: int) -> Places:
        return Places(numel, self.chunk, self.count)


@dataclass(frozen=True)
class RandomK(Codec):
    """Send k = ⌈density·n⌉ random values, times n/k. The round's shared random stream chooses them, so no indices are sent.

        q(x)_i = n/k·x_i for k random i, 0 for the others;   E q(x) = x,   E ‖q(x)‖² = n/k·‖x‖²

    Unbiased, if `values` is (`Identity`, or "stochastic" rounding). Each round has other coordinates. *Not contractive*, so not for
    error feedback, which would amplify the residual.

    *Source*: subsampling of Konečný et al. (arXiv 1610.05492). *Differs*: exactly k values are sent, and the same coordinates by
    all replicas in a round. So an all-reduce can add the values, which it does in fp32 for any `values`.

    *Wire*: density·b bits per parameter, for values of b bits.

    Args:
        density: k/n, in (0, 1].
        values: the codec of the values that are kept.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> RandomK(density=0.25).nbytes(1024)
    512
    """

    density: float = 0.1
    values: Codec = Cast("bf16")

    any_device: ClassVar[bool] = True
    sparse: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self, self.density, self.values)

    def nbytes(self, numel: int) -> int:
        return self.values.nbytes(math.ceil(self.density * numel))

    def layout(self, numel: int) -> tuple[Part, ...]:
        return self.values.layout(math.ceil(self.density * numel))

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        self.values.encode(x.index_select(0, self._drawn(x.numel(), key, x.device)), payload, key)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        _add_sent(self, payload, out, key, weight)

    def few(self, numel: int) -> int:
        return math.ceil(self.density * numel)

    def sent(self, payload: Tensor, numel: int, index: Tensor, values: Tensor, key: Key, weight: float = 1.0) -> None:
        most = torch.finfo(torch.float32).max
        kernels.of(index).select_drawn(key.shared("coordinates"), numel, index)
        self.values.decode_add(payload, values.zero_(), key)
        values.mul_(numel / max(1, len(index))).clamp_(-most, most).mul_(weight)

    @property
    def claims(self) -> frozenset[str]:
        if not self.samples:
            return (self.values.claims & VALUES) | chance([self.values])
        return (self.values.claims & {"odd"}) | chance([self.values], own="unbiased")

    @property
    def samples(self) -> bool:
        return self.density < 1

    def denser(self, density: float) -> RandomK:
        return replace(self, density=max(density, self.density))

    def sizes(self, numel: int) -> tuple[int, ...]:
        return (math.ceil(self.density * numel),)

    def project(self, x: Tensor, means: tuple[Tensor, ...], key: Key) -> Tensor:
        check_finite(x)
        return x.index_select(0, self._drawn(x.numel(), key, x.device))

    def expand(self, codes: tuple[Tensor, ...], numel: int, key: Key) -> Tensor:
        index, most = self._drawn(numel, key, codes[0].device), torch.finfo(torch.float32).max
        values = (codes[0] * (numel / max(1, len(index)))).clamp_(-most, most)
        return torch.zeros(numel, device=values.device).index_copy_(0, index, values)

    def _drawn(self, numel: int, key: Key, device: torch.device) -> Tensor:
        """The indices of the k smallest of n distinct random numbers: all sets are equally likely, and equal on every machine."""
        index = torch.empty(math.ceil(self.density * numel), dtype=torch.int64, device=device)
        kernels.of(index).select_drawn(key.shared("coordinates"), numel, index)
        return index


def _check(codec: object, density: float, values: Codec) -> None:
    name = type(codec).__name__
    if not 0 < density <= 1:
        raise ConfigurationError(f"{name}(density={density}): more than 0 and at most 1 is needed; 0.01 is usual.")
    check_inner(codec, "values", values)


def _largest(codec: Codec, x: Tensor, payload: Tensor, places: Places) -> Tensor:
    """The ascending indices of each chunk's largest values by magnitude, as many as are sent."""
    index = torch.empty(places.kept, dtype=torch.int64, device=x.device)
    if not kernels_for(codec, x, payload).select_largest(x, places.chunk, places.count, index):
        raise not_finite(x)
    return index


def _index(within: Tensor, places: Places) -> Tensor:
    """The indices of the sent values in the whole tensor, from their indices `within` their chunks."""
    if places.chunk >= places.numel:
        return within
    starts = torch.arange(0, places.numel, places.chunk, device=within.device)
    return within + starts.repeat_interleave(places.count)[: places.kept]


def _add_sent(codec: Codec, payload: Tensor, out: Tensor, key: Key, weight: float) -> None:
    count = codec.few(out.numel())
    index = torch.empty(count or 0, dtype=torch.int64, device=out.device)
    values = torch.empty(len(index), device=out.device)
    codec.sent(payload, out.numel(), index, values, key, weight)
    kernels.of(index, values, out).add_at(index, values, out)
