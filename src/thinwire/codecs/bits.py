"""Whole numbers of a few bits, packed without gaps, lowest bit first."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_nbytes(count: int, width: int) -> int:
    """Bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Flat whole numbers below 2^width as bytes; what is left of the last byte is zero."""
    if 8 % width:  # such as 12: bit by bit, for numbers that are few
        numbers = (numbers[:, None] >> torch.arange(width)).bitwise_and_(1).view(-1)
        width = 1
    share = 8 // width
    missing = -numbers.numel() % share
    columns = (torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers).to(torch.uint8).view(-1, share)
    packed = columns[:, 0].clone()
    for place in range(1, share):
        packed |= columns[:, place] << (width * place)
    return packed


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """The first `count` numbers in `packed`, as int64."""
    if 8 % width:
        return (unpack(packed, count * width, 1).view(count, width) << torch.arange(width)).sum(dim=1)
    places = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed[:, None] >> places).bitwise_and_((1 << width) - 1).view(-1)[:count].long()
