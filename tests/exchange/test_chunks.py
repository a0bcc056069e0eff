"""How a vector is cut into pieces, by hand. test_exchanges.py holds that the shards cover it."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.exchange import chunks
from thinwire.packet import HEADER_NBYTES


@pytest.mark.parametrize(
    ("codec", "numel", "ranges", "per_message"),
    [
        (tw.codecs.Identity(), 20, 8, 2),
        (tw.codecs.E3M0(128), 300, 128, 1),  # a grain is longer than a piece
        (tw.codecs.E3M0(4), 20, 8, 10),
        (tw.codecs.Cast(), 0, 0, 1),
        (tw.codecs.TopK(0.5), 30, 30, 1),  # without a grain
    ],
    ids=str,
)
def test_messages_are_consecutive_ranges_of_whole_grains(codec, numel, ranges, per_message, monkeypatch):
    monkeypatch.setattr(chunks, "MESSAGE_NBYTES", 64)
    monkeypatch.setattr(chunks, "PIECE_NUMEL", 8)
    messages = chunks._cut.__wrapped__(codec, 0, numel)
    assert [m.begin for m in messages] == [0, *(m.end for m in messages[:-1])] and messages[-1].end == numel
    for message in messages:
        ends = [(message.begin, 0), *((r.end, r.last) for r in message.ranges)]
        assert [(r.begin, r.first) for r in message.ranges] == ends[:-1] and ends[-1] == (message.end, message.nbytes)
        assert all(r.last - r.first == codec.nbytes(r.end - r.begin) for r in message.ranges)
        assert message.numel == message.end - message.begin
    assert all(r.end - r.begin == ranges for m in messages for r in m.ranges if r.end != numel)
    assert messages[0].ranges[0].end == min(ranges, numel)
    assert all(len(m.ranges) == per_message for m in messages[:-1])
    assert chunks.packets_nbytes(messages, 3) == sum(HEADER_NBYTES + m.nbytes + 3 for m in messages)
