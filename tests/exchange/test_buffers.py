"""Buffers that exchanges share, by hand."""

from __future__ import annotations

import pytest
import torch

from thinwire.exchange.buffers import Buffers


@pytest.mark.parametrize(
    ("count", "room"),
    [(0, 64), (1, 64), (64, 64), (65, 128), (512, 512), (1000, 1024), (1025, 1152), (2048, 2048), (2049, 2304)],
)  # fmt: skip
def test_sizes_are_rounded_up_to_one_of_eight_in_each_power_of_two(count, room):
    lent = Buffers().bytes(count)
    assert len(lent) == count and lent.untyped_storage().nbytes() == room


@pytest.mark.parametrize("count", [0, 1, 2, 33, 1000])
def test_a_buffer_has_as_many_values_of_its_kind_as_were_asked_for(count):
    buffers = Buffers()
    lent = buffers.bytes(count), buffers.floats(count), buffers.longs(count), buffers.like(torch.zeros(count).double())
    assert [len(one) for one in lent] == [count] * 4
    assert [one.dtype for one in lent] == [torch.uint8, torch.float32, torch.int64, torch.float64]


def test_only_returned_buffers_are_lent_again():
    buffers, own = Buffers(), torch.zeros(100)
    first, second = buffers.floats(100), buffers.like(own)
    assert first.data_ptr() != second.data_ptr() and second.shape == (100,)
    assert second.data_ptr() in buffers._lent and buffers.like(torch.zeros(3, device="meta")).is_meta
    buffers.give(own)
    buffers.swap([first, second], [second[:50]])
    assert buffers.floats(99).data_ptr() == first.data_ptr()
    assert buffers.floats(100).data_ptr() not in (own.data_ptr(), first.data_ptr(), second.data_ptr())
