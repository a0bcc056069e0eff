"""The parts of a payload, which `Codec.layout` names: numbers of whole bytes, and ascending indices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire import kernels
from thinwire.codecs.bits import ascending_nbytes, pack, pack_ascending, packed_nbytes, unpack_ascending


@dataclass(frozen=True)
class Symbols:
    """`nbytes` bytes of a payload that hold numbers of `stride` bytes each (1: codes of 8 bits or fewer)."""

    nbytes: int
    stride: int = 1


@dataclass(frozen=True)
class Places:
    """Ascending indices within a chunk: `count` in each `chunk` neighbours of `numel`, and in a shorter last chunk its share, rounded up.

    An index has `width` bits. Those of one chunk may be coded `together` instead (`pack_ascending`).
    """

    numel: int
    chunk: int
    count: int
    together: bool = False

    @property
    def kept(self) -> int:
        """The number of indices."""
        whole, rest = divmod(self.numel, self.chunk)
        return whole * self.count - (-self.count * rest // self.chunk)

    @property
    def width(self) -> int:
        """Bits of an index in a chunk, at least 1."""
        return max(1, (self.chunk - 1).bit_length())

    @property
    def nbytes(self) -> int:
        return ascending_nbytes(self.kept, self.numel) if self.together else packed_nbytes(self.kept, self.width)

    def pack(self, index: Tensor) -> Tensor:
        """The bytes of these indices."""
        return pack_ascending(index, self.numel) if self.together else pack(index, self.width)

    def unpack(self, packed: Tensor, index: Tensor) -> None:
        """Fill int64 `index` from `packed`, which comes from a peer; only what is coded together is checked. Raises `PacketError`."""
        if self.together:
            unpack_ascending(packed, index, self.numel)
        else:
            kernels.of(packed, index).unpack(packed, index, self.width)


Part = Symbols | Places
