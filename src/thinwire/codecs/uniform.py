"""Even levels between the smallest and the largest value of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Part, Symbols, check_finite, check_fit
from thinwire.codecs.bits import pack, packed_nbytes, unpack
from thinwire.codecs.exact import saturated
from thinwire.errors import ConfigurationError
from thinwire.rng import Key

_CHUNK = 1 << 16  # elements processed at a time, so that intermediates stay in the cache


@dataclass(frozen=True)
class Levels(Codec):
    """2^bits even levels from the smallest to the largest value of each block:

        unit = (max − min) / (2^bits − 1),   level = ⌊(x − min) / unit + ½⌋,   decoded min + level·unit

    No level is wasted if most values have one sign. If they have both, *zero is no level*, and may decode to half a unit.
    ‖q(x) − x‖² ≤ block / (2·(2^bits − 1)²)·‖x‖², so it is contractive for 4 bits in blocks of up to 450. Idempotent; not odd.

    Source: the quantiser of CGX (Markov et al., arXiv 2111.08617). *Differs*: min and max are sent, where CGX sends min and a unit
    that is rounded to fp32; units below 1e-10 are kept.

    On the wire: the levels (lowest bits first), then min and max of each block in fp32: bits + 64/block bits per parameter. It runs in
    plain torch on the CPU: a hundred times slower than the formats with kernels, and a delta on a GPU is copied to the host in fp32.

    Args:
        bits: 1 to 8.
        block: number of neighbours that share a smallest and a largest value; a multiple of 8.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Levels(bits=4, block=512).nbytes(1024)
    528
    """

    bits: int = 4
    block: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigurationError(f"Levels(bits={self.bits}): 1 to 8 are needed; 4 is usual.")
        if self.block < 8 or self.block % 8:
            raise ConfigurationError(f"Levels(block={self.block}): a multiple of 8 is needed; 512 is usual.")

    claims: ClassVar[frozenset[str]] = frozenset({"idempotent", "local"})

    @property
    def grain(self) -> int:
        return self.block

    def nbytes(self, numel: int) -> int:
        return packed_nbytes(numel, self.bits) + 8 * -(-numel // self.block)

    def layout(self, numel: int) -> tuple[Part, ...]:
        return Symbols(packed_nbytes(numel, self.bits)), Symbols(8 * -(-numel // self.block), 4)

    def encode(self, x: Tensor, payload: Tensor, key: Key) -> None:
        check_fit(self, x, payload)
        check_finite(x)
        ends = [torch.zeros(0, 2)]
        for place, part in self._parts(x):
            blocks = self._blocks(part)
            least, largest = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
            unit = (largest.double() - least) / self._top
            level = blocks.double().sub_(least).div_(unit.masked_fill_(unit == 0, torch.inf)).add_(0.5).long()
            codes = pack(level.clamp_(max=self._top).view(-1)[: part.numel()], self.bits)
            payload[place : place + len(codes)] = codes
            ends.append(torch.cat([least, largest], 1))
        payload[packed_nbytes(x.numel(), self.bits) :] = torch.cat(ends).view(-1).view(torch.uint8)

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        check_fit(self, out, payload)
        ends = payload[packed_nbytes(out.numel(), self.bits) :].clone().view(torch.float32).view(-1, 2).double()
        share = torch.arange(self._top + 1) / torch.tensor(self._top, dtype=torch.float64)
        begin = 0
        for place, part in self._parts(out):
            level = self._blocks(
                unpack(payload[place:][: packed_nbytes(part.numel(), self.bits)], part.numel(), self.bits)
            )
            least, largest = torch.split(ends[begin : begin + len(level)], 1, 1)
            values = saturated(least * (1 - share) + largest * share).mul_(
                weight
            )  # the value of each level; exact at both ends
            part.add_(values.gather(1, level).view(-1)[: part.numel()])
            begin += len(level)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _parts(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield runs of whole blocks of flat `x`, with the offset of their levels in the payload."""
        place = 0
        for part in torch.split(x, max(1, _CHUNK // self.block) * self.block):
            yield place, part
            place += packed_nbytes(part.numel(), self.bits)

    def _blocks(self, x: Tensor) -> Tensor:
        """Flat `x` as [blocks, block]; the last block is filled with its last value."""
        missing = -x.numel() % self.block
        return (torch.cat([x, x[-1:].expand(missing)]) if missing else x).view(-1, self.block)
