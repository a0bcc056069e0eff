"""Formats of a few bits with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError

_MAGNITUDES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_EIGHTH = 0x3E000000  # the bits of ⅛ in fp32
_LOWEST, _HIGHEST = -126, 123  # exponents of the scale: 2**e and 2**-e are normal fp32 numbers, and 16 * 2**e is finite
_CHUNK = 1 << 16  # elements worked on at a time, so that intermediates stay in the cache


def _pairs() -> Tensor:
    """For every byte the two values in it, low nibble first: [256, 2]."""
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)


_PAIRS = _pairs()


@dataclass(frozen=True)
class E3M0:
    """4-bit floats: a sign, three bits of exponent, no mantissa, and one power-of-two scale per block.

    Values are ±{0, ¼, ½, 1, 2, 4, 8, 16}·2^e with e = ⌈log₂(max|x| / 16)⌉ over a block of `block` elements, rounded
    to the nearest (ties to the even code). The error is about 3.8 % of the energy whatever the distribution, because
    the grid is logarithmic.

    Source: Streaming DiLoCo (arXiv 2501.18512, §2.3) names the format; scale, bias and rounding are not in the paper
    and follow oneDNN's f4_e3m0 with a block scale. On the wire: ⌈n/2⌉ bytes of codes (low nibble first; sign in bit
    3), then ⌈n/block⌉ signed bytes of exponents: 4 + 8/block bits per parameter.

    >>> E3M0(block=128).nbytes(1024)
    520
    """

    block: int = 128

    def __post_init__(self) -> None:
        if self.block < 2 or self.block % 2:
            raise ConfigurationError(f"E3M0(block={self.block}): an even block of at least 2 is needed; 128 is usual.")

    def nbytes(self, numel: int) -> int:
        return -(-numel // 2) + -(-numel // self.block)

    def encode(self, x: Tensor, payload: Tensor) -> None:
        codes, exponents = self._split(payload, x.numel())
        for begin, end in self._chunks(x.numel()):
            blocks = _padded(x[begin:end], self.block)
            mantissa, exponent = torch.frexp(blocks.abs().amax(dim=1))
            # max|x| = mantissa · 2^exponent with mantissa in [½, 1): the ceiling of log₂ is exponent, but for exact powers of two
            exponent = (exponent - (mantissa == 0.5).int() - 4).clamp_(_LOWEST, _HIGHEST)
            code = _round_to_code(blocks * _power_of_two(-exponent)[:, None]).to(torch.uint8)
            pairs = code.view(-1)[: end - begin + (end - begin) % 2].view(-1, 2)
            codes[begin // 2 : begin // 2 + len(pairs)] = pairs[:, 0] | (pairs[:, 1] << 4)
            exponents[begin // self.block : begin // self.block + len(exponent)] = exponent.to(torch.int8)

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        codes, exponents = self._split(payload, out.numel())
        for begin, end in self._chunks(out.numel()):
            packed = codes[begin // 2 : -(-end // 2)].int()
            blocks = _padded(_PAIRS.index_select(0, packed).view(-1)[: end - begin], self.block)
            exponent = exponents[begin // self.block : -(-end // self.block)]
            out[begin:end].add_((blocks * _power_of_two(exponent.int())[:, None]).view(-1)[: end - begin])

    def _split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Codes and exponents, as views of the payload."""
        count = -(-numel // 2)
        return payload[:count], payload[count:].view(torch.int8)

    def _chunks(self, numel: int) -> list[tuple[int, int]]:
        """Ranges of whole blocks (the last may be cut)."""
        size = max(1, _CHUNK // self.block) * self.block
        return [(begin, min(begin + size, numel)) for begin in range(0, numel, size)]


def _round_to_code(scaled: Tensor) -> Tensor:
    """The nearest code, ties to the even one, read off the bits of fp32 (destroys nothing, returns int32).

    From ¼ up the grid is the powers of two, so rounding the 23 bits of mantissa away, half to even, leaves the code
    in the exponent. Below, 0 and ¼ meet at ⅛.
    """
    signed = scaled.view(torch.int32)
    bits = signed & 0x7FFFFFFF
    above_eighth = bits > _EIGHTH
    odd = (bits >> 23).bitwise_and_(1)
    code = bits.add_(odd).add_(0x3FFFFF).bitwise_right_shift_(23).sub_(124).clamp_(0, 7)
    code = torch.maximum(code, above_eighth.int())
    return code.bitwise_or_((signed < 0).logical_and_(code > 0).int().mul_(8))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent for int32 in -126..127, exactly."""
    return exponent.add(127).bitwise_left_shift_(23).view(torch.float32)


def _padded(x: Tensor, block: int) -> Tensor:
    """`x` as [blocks, block], filled up with zeros."""
    missing = -x.numel() % block
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).view(-1, block)
