"""Packs integers of a few bits without gaps, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels


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
