"""Formats of a few bits with one scale per block: small floats and small whole numbers.

They are one thing. A code is a sign (its highest bit) and a magnitude that counts upward through the format's grid: in even
steps from zero to the least normal number, above it in steps that double at each power of two. Whole numbers are the
format that never gets to its least normal number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from thinwire.codecs.base import check_finite
from thinwire.codecs.bits import pack, packed_nbytes
from thinwire.errors import ConfigurationError
from thinwire.seeds import Key, draw

Scale = Literal["exponent", "bf16", "fp32"]
Rounding = Literal["nearest", "stochastic"]
_SCALES = {"exponent": torch.int8, "bf16": torch.bfloat16, "fp32": torch.float32}
_CHUNK = 1 << 16  # elements worked on at a time, so that intermediates stay in the cache


@dataclass(frozen=True)
class Grid:
    """The values of a format: `mantissa` bits, the least `normal` number (a power of two), the highest magnitude's code `top`."""

    bits: int
    mantissa: int
    normal: float
    top: int

    @cached_property
    def values(self) -> Tensor:
        """For every code its value: [2^bits]."""
        code = torch.arange(1 << (self.bits - 1))
        binade, steps = (code >> self.mantissa).sub(1).clamp_(0), 1 << self.mantissa
        within = torch.where(code < steps, code, code % steps + steps)
        magnitudes = torch.ldexp(within * (self.normal / steps), binade)
        return torch.cat([magnitudes, -magnitudes])

    @cached_property
    def bytes(self) -> Tensor:
        """For every byte the values in it, in order: [256, 8 / bits]."""
        codes = torch.arange(256)[:, None] >> torch.arange(0, 8, self.bits)
        return self.values[codes & ((1 << self.bits) - 1)]

    @cached_property
    def largest(self) -> float:
        return self.values[self.top].item()

    def codes(self, scaled: Tensor, stream: int | None, begin: int) -> Tensor:
        """Round to the grid: to the nearest, ties to the even code, or with a `stream` to one of the two neighbours
        by chance. Int32.

        Above the least normal number a code is what is left of fp32's bits when the lower ones are rounded away.
        """
        signed, dropped = scaled.view(torch.int32), 23 - self.mantissa
        bits = signed & 0x7FFFFFFF
        normal = int(torch.tensor(self.normal).view(torch.int32))
        low = bits.view(torch.float32) * ((1 << self.mantissa) / self.normal)
        if stream is None:
            low.round_()
            high = (bits >> dropped).bitwise_and_(1).add_(bits).add_((1 << (dropped - 1)) - 1)
        else:
            noise = draw(stream, begin, scaled.numel()).bitwise_and_(0xFFFFFF).int().view(scaled.shape)
            low = low.floor().add_(low.frac() > noise * 2.0**-24)
            high = bits + noise.bitwise_and_((1 << dropped) - 1)
        high.bitwise_right_shift_(dropped).sub_((normal >> dropped) - (1 << self.mantissa))
        code = torch.where(bits < normal, low.int(), high).clamp_(max=self.top)
        return code.bitwise_or_((signed < 0).logical_and_(code > 0).int().mul_(1 << (self.bits - 1)))


class Blocks(ABC):
    """What all formats here share: `block`, the form of its `scale`, the `rounding`, and the layout on the wire.

    ⌈n·bits/8⌉ bytes of codes (lowest bits first), then ⌈n/block⌉ scales: "exponent" is a signed byte e for 2^e, e =
    ⌈log₂(max|x| / largest)⌉; "bf16" (rounded up) and "fp32" hold max|x| / largest itself. Nothing is clipped, so
    "stochastic" rounding is unbiased, to 2⁻²⁴ of a step; it draws from the key's own stream.
    """

    block: int
    scale: Scale
    rounding: Rounding

    def __post_init__(self) -> None:
        name, share = type(self).__name__, 8 // self.grid.bits
        if self.block < 1 or self.block % share:
            raise ConfigurationError(
                f"{name}(block={self.block}): a multiple of {share}, at least {share}, is needed; 128 is usual."
            )
        if self.scale not in _SCALES or self.rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(
                f"{name}(scale={self.scale!r}, rounding={self.rounding!r}): 'exponent', 'bf16' or 'fp32', and 'nearest' or "
                "'stochastic', are needed."
            )

    @property
    @abstractmethod
    def grid(self) -> Grid: ...

    @property
    def grain(self) -> int | None:
        return self.block if self.rounding == "nearest" else None  # each element has its own place in the stream

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, self.grid.bits) + -(-numel // self.block) * _SCALES[self.scale].itemsize

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_finite(x)
        grid, count = self.grid, packed_nbytes(x.numel(), self.grid.bits)
        stream = key.own("rounding") if self.rounding == "stochastic" else None
        scales = torch.empty(-(-x.numel() // self.block), dtype=_SCALES[self.scale])
        for begin, end in self._chunks(x.numel()):
            blocks = _padded(x[begin:end], self.block)
            first = begin // self.block
            kept = scales[first : first + len(blocks)]
            kept.copy_(self._scales(blocks.abs().amax(dim=1)))
            codes = grid.codes(blocks / self._factors(kept)[:, None], stream, begin)
            packed = pack(codes.view(-1)[: end - begin], grid.bits)
            payload[begin * grid.bits // 8 :][: len(packed)] = packed
        payload[count:] = scales.view(torch.uint8)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        grid, count = self.grid, packed_nbytes(out.numel(), self.grid.bits)
        factors = self._factors(payload[count:].clone().view(_SCALES[self.scale])) * weight
        for begin, end in self._chunks(out.numel()):
            packed = payload[begin * grid.bits // 8 : -(-end * grid.bits // 8)].int()
            blocks = _padded(grid.bytes.index_select(0, packed).view(-1)[: end - begin], self.block)
            factor = factors[begin // self.block :][: len(blocks)]
            out[begin:end].add_((blocks * factor[:, None]).view(-1)[: end - begin])

    def _scales(self, most: Tensor) -> Tensor:
        """For each block's max|x| its scale, such that it and the largest value are normal fp32 numbers."""
        grid = self.grid
        part, binade = torch.frexp(torch.tensor(grid.largest))
        highest = min(128 - int(binade), 126)
        if self.scale == "exponent":
            # max|x| = mantissa · 2^exponent with mantissa in [½, 1): no logarithm, no rounding
            mantissa, exponent = torch.frexp(most)
            fits = (mantissa >= 0.5) & (mantissa <= part)
            return (exponent - fits.int() - (int(binade) - 1)).clamp_(-126, highest)
        factor = (most / grid.largest).clamp_(2.0**-126, 2.0**highest)
        if self.scale == "bf16":
            factor = (factor.view(torch.int32) + 0xFFFF).bitwise_and_(~0xFFFF).view(torch.float32)
        return factor

    def _factors(self, scales: Tensor) -> Tensor:
        """What to multiply a block's codes by, in fp32."""
        if self.scale != "exponent":
            return scales.float()
        return scales.int().add_(127).bitwise_left_shift_(23).view(torch.float32)

    def _chunks(self, numel: int) -> list[tuple[int, int]]:
        """Ranges of whole blocks and whole bytes (the last may be cut)."""
        size = max(1, _CHUNK // self.block) * self.block
        return [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]


@dataclass(frozen=True)
class E3M0(Blocks):
    """4-bit floats: a sign, three bits of exponent, no mantissa, and a scale per block: ±{0, ¼, ½, 1, 2, 4, 8, 16}.

    The error is about 3.8 % of the energy whatever the distribution, because the grid is logarithmic.

    Source: Streaming DiLoCo (arXiv 2501.18512, §2.3) names the format; scale, bias and rounding are not in the paper
    and follow oneDNN's f4_e3m0 with a block scale. On the wire 4 + 8/block bits per parameter, with a one-byte
    exponent as scale; see `Blocks`.

    >>> E3M0(block=128).nbytes(1024)
    520
    """

    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    grid = Grid(bits=4, mantissa=0, normal=0.25, top=7)


@dataclass(frozen=True)
class E2M1(Blocks):
    """4-bit floats with one bit of mantissa, and a scale per block: ±{0, ½, 1, 1½, 2, 3, 4, 6}.

    Source: OCP Microscaling Formats (MX) 1.0, FP4. Less than half of E3M0's error on light tails with fine blocks
    (1.6 % of the energy for Gaussians in blocks of 128), more on heavy tails. 4 + 8/block bits per parameter.

    >>> E2M1(block=32, scale="bf16").nbytes(1024)
    576
    """

    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    grid = Grid(bits=4, mantissa=1, normal=1.0, top=7)


@dataclass(frozen=True)
class E4M3(Blocks):
    """8-bit floats with three bits of mantissa, up to 448, and a scale per block. A code is a `torch.float8_e4m3fn`.

    Source: OCP 8-bit floating point 1.0 (E4M3, saturating; the two NaN are never made). A scale there must be: the
    format spans 2⁻⁹ … 448, and deltas are smaller. 8 + 8/block bits per parameter, with a one-byte exponent.

    >>> E4M3().nbytes(1024)
    1032
    """

    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    grid = Grid(bits=8, mantissa=3, normal=2.0**-6, top=126)


@dataclass(frozen=True)
class E5M2(Blocks):
    """8-bit floats with two bits of mantissa, up to 57344, and a scale per block. A code is a `torch.float8_e5m2`.

    Source: OCP 8-bit floating point 1.0 (E5M2, saturating; infinities and NaN are never made). Half the precision of
    E4M3 and 2¹⁶ times its range. 8 + 8/block bits per parameter, with a one-byte exponent.

    >>> E5M2(block=4096).nbytes(4096)
    4097
    """

    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    grid = Grid(bits=8, mantissa=2, normal=2.0**-14, top=123)


@dataclass(frozen=True)
class Int(Blocks):
    """Whole numbers of 8, 4 or 2 bits, symmetric: −L … L with L = 2^(bits−1) − 1, and a scale per block.

    The uniform quantiser (as QSGD, arXiv 1610.02132, with the maximum as norm, where rounding is "stochastic"). On
    the wire sign and magnitude, so that all codes but −0 are used: bits + 8/block bits per parameter.

    >>> Int(bits=2, block=64, scale="fp32").nbytes(1024)
    320
    """

    bits: Literal[8, 4, 2] = 8
    block: int = 128
    scale: Scale = "exponent"
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise ConfigurationError(f"Int(bits={self.bits}): 8, 4 or 2 is needed; for 1 bit use Sign().")
        super().__post_init__()

    @property
    def grid(self) -> Grid:
        return _INTS[self.bits]


_INTS = {b: Grid(bits=b, mantissa=b - 1, normal=2.0 ** (b - 1), top=2 ** (b - 1) - 1) for b in (8, 4, 2)}


def _padded(x: Tensor, block: int) -> Tensor:
    """`x` as [blocks, block], filled up with zeros; [1, x.numel()] if it is less than a block."""
    missing = -x.numel() % min(block, x.numel())
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, min(block, x.numel()))
