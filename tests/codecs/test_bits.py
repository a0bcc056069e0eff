"""Packed integers and ascending indices, beside Python's integers."""

from __future__ import annotations

import pytest
import torch
from pieces import over

import thinwire as tw
from thinwire.codecs.layout import ascending_nbytes, pack, pack_ascending, packed_nbytes, unpack, unpack_ascending
from thinwire.rng import draw as rng


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 12, 20, 33])
@over("count", [0, 1, 2, 7, 8, 1001])
def test_packed_numbers_are_one_little_endian_number(width, count):
    numbers = rng(width, 0, count) & ((1 << width) - 1)
    packed = pack(numbers, width)
    assert len(packed) == packed_nbytes(count, width)
    assert int.from_bytes(bytes(packed.tolist()), "little") == sum(int(x) << (i * width) for i, x in enumerate(numbers))
    assert torch.equal(unpack(packed, count, width), numbers)


def ascending(packed: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    index = torch.full((count,), -1)
    unpack_ascending(packed, index, numel)
    return index


@pytest.mark.parametrize("numel", [1, 2, 8, 9, 110, 1000, 4096])
@over("count", [0, 1, 2, 7, 110, 999, 4096])
def test_ascending_numbers_are_their_low_bits_and_a_bit_for_each(numel, count):
    """The code of Elias and Fano, in Python's integers. Where the high parts are equal, the bits stand side by side."""
    count = min(count, numel)
    index = rng(numel, 0, numel).argsort()[:count].sort().values
    packed = pack_ascending(index, numel)
    low = max(0, (numel // count).bit_length() - 1) if count else 0
    lows = sum((int(one) & ((1 << low) - 1)) << (i * low) for i, one in enumerate(index))
    highs = sum(1 << ((int(one) >> low) + i) for i, one in enumerate(index))
    begin = packed_nbytes(count, low)
    due = lows.to_bytes(begin, "little") + highs.to_bytes(ascending_nbytes(count, numel) - begin, "little")
    assert packed.numpy().tobytes() == due and torch.equal(ascending(packed, count, numel), index)
    if count:
        assert 8 * (len(due) - 2) <= count * (low + 1) + (numel - 1 >> low) <= 8 * len(due)
        with pytest.raises(tw.PacketError, match=f"indices are not ascending below {numel}"):
            ascending(torch.zeros(len(due), dtype=torch.uint8), count, numel)
