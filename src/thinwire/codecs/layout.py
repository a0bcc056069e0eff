"""How numbers lie in a payload: packed in a few bits, lowest bit first, or as ascending indices; and its parts, which `Codec.layout` names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import PacketError


def packed_nbytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Pack flat int64 below 2^width into bytes; unused bits of the last byte are zero."""
    packed = torch.empty(packed_nbytes(numbers.numel(), width), dtype=torch.uint8, device=numbers.device)
    kernels.of(numbers, packed).pack(numbers, packed, width)
    return packed


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return the first `count` numbers in `packed` as int64."""
    numbers = torch.empty(count, dtype=torch.int64, device=packed.device)
    kernels.of(packed, numbers).unpack(packed, numbers, width)
    return numbers


# ---- ascending indices


def low_bits(count: int, numel: int) -> int:
    """l: the low bits of each of `count` indices below `numel` that `pack_ascending` writes as they are."""
    return max(0, (numel // count).bit_length() - 1) if count else 0


def ascending_nbytes(count: int, numel: int) -> int:
    """Bytes of `count` ascending indices below `numel`: about 2 + log₂(numel/count) bits each."""
    low = low_bits(count, numel)
    return packed_nbytes(count, low) + packed_nbytes(count + (numel - 1 >> low), 1) if count else 0


def pack_ascending(index: Tensor, numel: int) -> Tensor:
    """The code of Elias (1974) and Fano (1971) for ascending int64 `index` below `numel`: the low l bits of each index, then a bit set
    at (index >> l) + i for the i-th. Its size depends on the two numbers only.
    """
    count = index.numel()
    packed = torch.empty(ascending_nbytes(count, numel), dtype=torch.uint8, device=index.device)
    kernels.of(index, packed).pack_ascending(index, packed, low_bits(count, numel))
    return packed


def unpack_ascending(packed: Tensor, index: Tensor, numel: int) -> None:
    """Fill flat int64 `index` from `packed`. Raises `PacketError` if these bytes are no code of so many ascending indices below `numel`."""
    if not kernels.of(packed, index).unpack_ascending(packed, index, low_bits(index.numel(), numel), numel):
        raise not_ascending(numel)


def check_ascending(index: Tensor, numel: int) -> None:
    """Raise `PacketError` unless a peer's indices ascend below `numel`."""
    if len(index) and (int(index[-1]) >= numel or not bool((index[1:] > index[:-1]).all())):
        raise not_ascending(numel)


def not_ascending(numel: int) -> PacketError:
    return PacketError(f"a packet's indices are not ascending below {numel}; run the same version on every replica.")


# ---- the parts of a payload


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
