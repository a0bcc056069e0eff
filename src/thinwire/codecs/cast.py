"""Dense formats without a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from thinwire.codecs.base import Codec, kernels_for, not_finite
from thinwire.codecs.layout import Part, Symbols
from thinwire.errors import ConfigurationError
from thinwire.rng import Key


class _InFull(Codec, Protocol):
    """Values as they are, in fp32."""

    claims: ClassVar[frozenset[str]] = frozenset({"exact", "odd", "contractive", "idempotent", "local"})
    any_device: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def layout(self, numel: int) -> tuple[Part, ...]:
        return (Symbols(4 * numel, 4),)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        if not kernels_for(self, x, payload).encode_floats(x, payload, "fp32"):
            raise not_finite(x)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        kernels_for(self, out, payload).add_floats(payload, out, "fp32", weight)


@dataclass(frozen=True)
class Identity(_InFull):
    """Send fp32 unchanged: 32 bits per parameter. It is the baseline for comparisons.

        q(x) = x

    *Source*: none; the values are sent as they are. *Wire*: 4 bytes per parameter.

    >>> Identity().nbytes(1000)
    4000
    """

    grain: ClassVar[int] = 1
    all_reduced: ClassVar[bool] = True


@dataclass(frozen=True)
class Dense(_InFull):
    """fp32 for some rounds, instead of a codec with this `grain`: deltas are cut at the same elements, so the exchange's state fits both."""

    grain: int = 1


def in_full(codec: Codec) -> Identity | Dense:
    """The fp32 codec that replaces `codec` in a round; deltas may be cut at the same elements.

    Args:
        codec: the usual one.

    >>> in_full(Cast("bf16"))
    Identity()
    """
    grain = codec.grain or 1
    return Dense(grain) if grain > 1 else Identity()


@dataclass(frozen=True)
class Cast(Codec):
    """Round to the nearest 16-bit float: 16 bits per parameter.

        q(x) = nearest(x),   |q(x) − x| ≤ 2⁻⁸·|x| in bf16, 2⁻¹¹·|x| in fp16      for normal numbers; ties to the even code

    bf16 keeps fp32's range with 8 bits of precision. fp16 has 11 bits of precision.

    *Source*: bf16 as in Kalamkar et al. (arXiv 1905.12322); fp16 is binary16 of IEEE 754. *Differs*: values above the largest number, in
    fp16 ±65504, become this number and not infinite.

    *Wire*: 2 bytes per parameter.

    Args:
        dtype: 'bf16' or 'fp16'.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Cast('bf16').nbytes(1000)
    2000
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    grain: ClassVar[int] = 1
    claims: ClassVar[frozenset[str]] = frozenset({"odd", "contractive", "idempotent", "local"})
    any_device: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    all_reduced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp16"):
            raise ConfigurationError(
                f"Cast(dtype={self.dtype!r}): bf16 or fp16 is needed; for 8 bits use E4M3() or E5M2(), for 4 bits E3M0()."
            )

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def layout(self, numel: int) -> tuple[Part, ...]:
        return (Symbols(2 * numel, 2),)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        if not kernels_for(self, x, payload).encode_floats(x, payload, self.dtype):
            raise not_finite(x)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        kernels_for(self, out, payload).add_floats(payload, out, self.dtype, weight)
