"""Cuts a vector into messages.

If the codec has a grain, the vector is cut at it, so that parts are encoded, sent, received and decoded at the same
time; the payload bytes are the same in sum. A message is a separate packet (packet.py) with header and checksum. Its
payload contains the payloads of its ranges one after another, and a range fits into the cache. Without a grain a vector is one
range of one message. A codec that `varies` encodes a message as one range, because only the last range of a packet may be shorter
than predicted.

`MESSAGE_NBYTES`: a message of gloo costs about 50 µs of CPU. Smaller messages reduce throughput; larger ones
only lengthen the decoding of the last one, which overlaps with nothing (docs/experiments.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.packet import HEADER_NBYTES

MESSAGE_NBYTES = 1 << 19
PIECE_NUMEL = 1 << 17
STAGE = 1 << 24  # messages of one stage, at most

Signal = Callable[[int, int], Tensor]  # elements begin … end of a replica's signal, flat fp32


@dataclass(frozen=True)
class CodedRange:
    """Elements `begin` … `end`, encoded together, in the bytes `first` … `last` of a payload."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class Message:
    """Elements `begin` … `end` of a vector, in one packet."""

    begin: int
    end: int
    ranges: tuple[CodedRange, ...]

    @property
    def nbytes(self) -> int:
        return self.ranges[-1].last

    @property
    def numel(self) -> int:
        return self.end - self.begin


def cut(codec: Codec, begin: int, end: int) -> tuple[Message, ...]:
    """The messages for elements `begin` … `end`; one message without elements if there are none."""
    return _cut(codec, begin, end)  # type: ignore[arg-type]  # a frozen dataclass is hashable


@lru_cache(maxsize=4096)
def _cut(codec: Codec, begin: int, end: int) -> tuple[Message, ...]:
    if codec.grain is None or begin == end:
        return (Message(begin, end, (CodedRange(begin, end, 0, codec.nbytes(end - begin)),)),)
    numel = codec.grain * max(1, PIECE_NUMEL // codec.grain)
    flag = int(codec.varies)  # the extra byte must not make more messages
    count = max(1, MESSAGE_NBYTES // max(1, codec.nbytes(numel) - flag))
    if codec.varies:
        numel, count = numel * count, 1
    messages = []
    for start in range(begin, end, numel * count):
        stop, at, ranges = min(start + numel * count, end), 0, []
        for one in range(start, stop, numel):
            other = min(one + numel, stop)
            ranges.append(CodedRange(one, other, at, at := at + codec.nbytes(other - one)))
        messages.append(Message(start, stop, tuple(ranges)))
    return tuple(messages)


def shards(codec: Codec, numel: int, size: int) -> tuple[tuple[int, int], ...]:
    """The ranges of the shards of `size` owners, in whole grains (the last grain may be shorter); the first shards are the longer ones."""
    grain = codec.grain or 1
    least, more = divmod(-(-numel // grain), size)
    ends = [min(numel, grain * (least * (k + 1) + min(more, k + 1))) for k in range(size)]
    return tuple(zip([0, *ends], ends))


def packets_nbytes(messages: Sequence[Message], marks: int = 0) -> int:
    """Bytes of all `messages`, headers included, with `marks` additional bytes each."""
    return sum(HEADER_NBYTES + message.nbytes + marks for message in messages)
