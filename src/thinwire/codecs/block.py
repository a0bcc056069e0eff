"""Formats of a few bits with one scale per block: small floats and small integers.

All have the same form. A code is a sign (its highest bit) and a magnitude, an index into the format's grid. The grid has even
steps from zero to the smallest normal number; above it the steps double at each power of two. Integers are the
format whose grid ends below its smallest normal number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from thinwire.codecs.base import Codec, check_whole, kernels_for, not_finite
from thinwire.codecs.layout import Part, Symbols, packed_nbytes
from thinwire.errors import ConfigurationError
from thinwire.kernels import Grid, Scale
from thinwire.rng import Key

Rounding = Literal["nearest", "stochastic"]
_SCALE_NBYTES = {"exponent": 1, "bf16": 2, "fp32": 4}


class Blocks(Codec, ABC):
    """The common part of the formats here: `block`, the form of its `scale`, the `rounding`, and the layout on the wire.

    ⌈n·bits/8⌉ bytes of codes (lowest bits first), then ⌈n/block⌉ scales: "exponent" is a signed byte e for 2^e, e =
    ⌈log₂(max|x| / largest)⌉; "bf16" (rounded up) and "fp32" hold max|x| / largest itself. Nothing is clipped, so
    "stochastic" rounding is unbiased, to 2⁻²⁴ of a step; it draws from the key's own stream.
    """

    block: int
    scale: Scale
    rounding: Rounding

    any_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole(self)
        name, share = type(self).__name__, 8 // self.grid.bits
        if self.block < 1 or self.block % share:
            raise ConfigurationError(
                f"{name}(block={self.block}): a multiple of {share}, at least {share}, is needed; 128 is usual."
            )
        if self.scale not in _SCALE_NBYTES or self.rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(
                f"{name}(scale={self.scale!r}, rounding={self.rounding!r}): 'exponent', 'bf16' or 'fp32', and 'nearest' or "
                "'stochastic', are needed."
            )

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    @property
    def grain(self) -> int | None:
        return self.block if self.rounding == "nearest" else None  # an element's random number depends on its index

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({"odd", "local", "contractive" if self.rounding == "nearest" else "unbiased"})

    @property
    def biased(self) -> bool:
        return self.rounding == "nearest"

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, self.grid.bits) + -(-numel // self.block) * _SCALE_NBYTES[self.scale]

    def layout(self, numel: int) -> tuple[Part, ...]:
        each = _SCALE_NBYTES[self.scale]
        return Symbols(packed_nbytes(numel, self.grid.bits)), Symbols(-(-numel // self.block) * each, each)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        stream = key.own("rounding") if self.rounding == "stochastic" else None
        kernels = kernels_for(self, x, payload)
        if not kernels.encode_blocks(x, payload, self.grid, self.block, self.scale, stream):
            raise not_finite(x)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        kernels_for(self, out, payload).add_blocks(payload, out, self.grid, self.block, self.scale, weight)


@dataclass(frozen=True)
class Floats(Blocks):
    """Small floats; each class has its own `grid`."""

    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"


@dataclass(frozen=True)
class E3M0(Floats):
    """4-bit floats: a sign, three bits of exponent, no mantissa, and a scale per block: ±{0, ¼, ½, 1, 2, 4, 8, 16}.

        q(x) = s·nearest(x / s),   s = 2^⌈log₂(max|x| / 16)⌉ of the block      nearest: in the grid, ties to the even code

    The error is about 3.8 % of the energy for any distribution, because the grid is logarithmic.

    *Source*: Streaming DiLoCo (arXiv 2501.18512, §2.3) names the format. *Differs*: scale, bias and rounding are not in the paper.
    The grid is that of oneDNN's f4_e3m0, and the scale is one per block.

    *Wire*: 4 + 8/block bits per parameter, with a one-byte exponent as scale; see `Blocks`.

    Args:
        block: number of neighbours that share a scale; even.
        scale: its form, 'exponent' (one byte, a power of two), 'bf16' (two bytes) or 'fp32' (four).
        rounding: 'nearest', or 'stochastic', which is unbiased.

    >>> E3M0(block=128).nbytes(1024)
    520
    """

    grid = Grid(bits=4, mantissa=0, normal=0.25, top=7)


@dataclass(frozen=True)
class E2M1(Floats):
    """4-bit floats with one bit of mantissa, and a scale per block: ±{0, ½, 1, 1½, 2, 3, 4, 6}.

        q(x) = s·nearest(x / s),   s = 2^⌈log₂(max|x| / 6)⌉ of the block      nearest: in the grid, ties to the even code

    Less than half of E3M0's error on light tails with fine blocks (1.6 % of the energy for Gaussians in blocks of 128), more on
    heavy tails.

    *Source*: FP4 of OCP Microscaling Formats (MX) 1.0. *Differs*: MX has blocks of 32 and s = 2^(⌊log₂ max|x|⌋ − 2), where values
    above 6·s are clipped. Here s is rounded up, so nothing is clipped.

    *Wire*: 4 + 8/block bits per parameter, with a one-byte exponent as scale; see `Blocks`.

    Args:
        block: number of neighbours that share a scale; even.
        scale: its form, 'exponent' (one byte, a power of two), 'bf16' (two bytes) or 'fp32' (four).
        rounding: 'nearest', or 'stochastic', which is unbiased.

    >>> E2M1(block=32, scale="bf16").nbytes(1024)
    576
    """

    grid = Grid(bits=4, mantissa=1, normal=1.0, top=7)


@dataclass(frozen=True)
class E4M3(Floats):
    """8-bit floats with three bits of mantissa, up to 448, and a scale per block. A code is a `torch.float8_e4m3fn`.

        q(x) = s·nearest(x / s),   s = 2^⌈log₂(max|x| / 448)⌉ of the block      nearest: in the grid, ties to the even code

    *Source*: E4M3 of OCP 8-bit Floating Point (OFP8) 1.0. *Differs*: blocks have a scale, because the format spans 2⁻⁹ … 448 and
    deltas are smaller. The two NaN are never made.

    *Wire*: 8 + 8/block bits per parameter, with a one-byte exponent as scale; see `Blocks`.

    Args:
        block: number of neighbours that share a scale; even.
        scale: its form, 'exponent' (one byte, a power of two), 'bf16' (two bytes) or 'fp32' (four).
        rounding: 'nearest', or 'stochastic', which is unbiased.

    >>> E4M3().nbytes(1024)
    1032
    """

    grid = Grid(bits=8, mantissa=3, normal=2.0**-6, top=126)


@dataclass(frozen=True)
class E5M2(Floats):
    """8-bit floats with two bits of mantissa, up to 57344, and a scale per block. A code is a `torch.float8_e5m2`.

        q(x) = s·nearest(x / s),   s = 2^⌈log₂(max|x| / 57344)⌉ of the block      nearest: in the grid, ties to the even code

    It has half the precision of E4M3 and 2¹⁶ times its range.

    *Source*: E5M2 of OCP 8-bit Floating Point (OFP8) 1.0. *Differs*: blocks have a scale. Infinities and NaN are never made.

    *Wire*: 8 + 8/block bits per parameter, with a one-byte exponent as scale; see `Blocks`.

    Args:
        block: number of neighbours that share a scale; even.
        scale: its form, 'exponent' (one byte, a power of two), 'bf16' (two bytes) or 'fp32' (four).
        rounding: 'nearest', or 'stochastic', which is unbiased.

    >>> E5M2(block=4096).nbytes(4096)
    4097
    """

    grid = Grid(bits=8, mantissa=2, normal=2.0**-14, top=123)


@dataclass(frozen=True)
class Int(Blocks):
    """Symmetric integers of 8, 4 or 2 bits, −L … L with L = 2^(bits−1) − 1, and a scale per block.

        q(x) = s·round(x / s),   s = 2^⌈log₂(max|x| / L)⌉ of the block

    *Source*: QSGD (Alistarh et al., arXiv 1610.02132), with "stochastic" rounding. *Differs*: the norm is the maximum, not ‖x‖₂; s is
    rounded up, except in fp32; codes have a fixed length, without Elias coding; "nearest" is the default.

    *Wire*: sign and magnitude, so all codes except −0 are used: bits + 8/block bits per parameter; see `Blocks`.

    Args:
        bits: 8, 4 or 2.
        block: number of neighbours that share a scale; even.
        scale: its form, 'exponent' (one byte, a power of two), 'bf16' (two bytes) or 'fp32' (four).
        rounding: 'nearest', or 'stochastic', which is unbiased.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Int(bits=2, block=64, scale="fp32").nbytes(1024)
    320
    """

    bits: Literal[8, 4, 2] = 8
    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (8, 4, 2):
            raise ConfigurationError(f"Int(bits={self.bits!r}): 8, 4 or 2 is needed; for 1 bit use Sign().")
        super().__post_init__()

    @property
    def grid(self) -> Grid:
        return _INTS[self.bits]

    def forms(self) -> tuple[Int, ...]:
        blocks = {self.block} | {block for block in (self.block // 4, 4 * self.block) if block % 4 == 0 < block}
        bits: tuple[Literal[8, 4, 2], ...] = (8, 4, 2)
        pairs = ((each, block) for each in bits for block in sorted(blocks) if block * each % 8 == 0)
        return tuple(
            replace(self, bits=each, block=block) for each, block in pairs if (each, block) != (self.bits, self.block)
        )


_INTS = {b: Grid(bits=b, mantissa=b - 1, normal=2.0 ** (b - 1), top=2 ** (b - 1) - 1) for b in (8, 4, 2)}
