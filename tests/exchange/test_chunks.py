"""How a vector is cut into pieces, by hand."""

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
    assert chunks.packets_nbytes(messages) == sum(HEADER_NBYTES + m.nbytes for m in messages)
    assert chunks.packets_nbytes(messages, 3) == sum(HEADER_NBYTES + m.nbytes + 3 for m in messages)


def test_sizes_of_messages_and_ranges_stay():
    """They are part of the wire format, as replicas of one version must cut alike."""
    assert (chunks.MESSAGE_NBYTES, chunks.PIECE_NUMEL, chunks.STAGE) == (1 << 19, 1 << 17, 1 << 24)
    for codec, numel, nbytes, ranges in (
        (tw.codecs.Identity(), 1 << 17, 1 << 19, 1),
        (tw.codecs.E3M0(128), 7 << 17, 7 * 66560, 7),
        (tw.codecs.TopK(0.5), (1 << 20) + 1, tw.codecs.TopK(0.5).nbytes((1 << 20) + 1), 1),
        (
            tw.lab.codecs.Entropy(tw.codecs.Cast()),
            1 << 18,
            (1 << 19) + 1,
            1,
        ),  # its additional byte makes no more messages
    ):
        messages = chunks.cut(codec, 3, (1 << 20) + 4)
        first, last = messages[0], messages[-1]
        assert (first.numel, first.nbytes, len(first.ranges)) == (numel, nbytes, ranges)
        assert (first.begin, last.end) == (3, (1 << 20) + 4)


def test_shards_cover_everything_once():
    """They are whole grains, and the first ones are longer."""
    assert chunks.shards(tw.codecs.E3M0(4), 22, 4) == ((0, 8), (8, 16), (16, 20), (20, 22))
    assert chunks.shards(tw.codecs.TopK(0.5), 7, 3) == ((0, 3), (3, 5), (5, 7))
    for codec in (tw.codecs.Identity(), tw.codecs.E3M0(128), tw.codecs.Sign(block=33), tw.codecs.TopK(0.1)):
        for numel in (0, 1, 5, 127, 128, 129, 1000):
            for size in (1, 2, 3, 7):
                spans = chunks.shards(codec, numel, size)
                assert [end for _, end in spans[:-1]] == [begin for begin, _ in spans[1:]]
                assert spans[0][0] == 0 and spans[-1][1] == numel and len(spans) == size
                sizes = [end - begin for begin, end in spans]
                assert sizes == sorted(sizes, reverse=True)
                assert all(begin % (codec.grain or 1) == 0 or begin == numel for begin, _ in spans)
