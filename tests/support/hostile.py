"""What must hold for any bytes from a peer. The tests use it, and tests/support/fuzz.py uses it for longer."""

from __future__ import annotations

import tracemalloc
from functools import cache
from typing import Any

import torch
from pieces import CODECS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire as tw
from thinwire.packet import Header, identity, open_packet
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.testing.values import encoded

NUMELS = (0, 1, 2, 129, 700)
DUE = Header(codec=identity(tw.codecs.E3M0()), sender=3, fragment=2, round=77, part=5, numel=90, nbytes=46)


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it, views included: `total`, and the `largest`."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                nbytes = tensor.numel() * tensor.element_size()
                self.total, self.largest = self.total + nbytes, max(self.largest, nbytes)
        return result


def tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def repeated(raw: bytes, nbytes: int) -> bytes:
    """Returns `raw` repeated to `nbytes`, so that a few drawn bytes fill a payload."""
    raw = raw or b"\0"
    return (raw * (nbytes // len(raw) + 1))[:nbytes]


def decoded(codec: tw.codecs.Codec, raw: bytes, numel: int) -> tuple[Tensor, Tensor, bool, Allocated]:
    """Decodes `raw` onto a tensor. Returns the tensor before and after, whether it was refused, and the allocations."""
    before = torch.linspace(-1, 1, numel)
    after, made, refused = before.clone(), Allocated(), False
    payload = tensor(raw)
    with made:
        try:
            codec.decode_add(payload, after, Key(round=1, sender=1))
        except tw.PacketError:
            refused = True
    return before, after, refused, made


@cache
def honest(place: int, numel: int) -> Allocated:
    """Returns the allocations of decoding an honest payload, without the tables that the first decoding makes and keeps."""
    codec = CODECS[place].piece
    raw = encoded(codec, torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    return [decoded(codec, raw, numel)[3] for _ in range(2)][1]


def check_payload(place: int, numel: int, raw: bytes) -> None:
    """Any bytes of the expected size either decode, always to the same values, or are refused and write nothing. They need no
    more memory than an honest payload.
    """
    row = CODECS[place]
    raw = repeated(raw, row.piece.nbytes(numel))
    due = honest(place, numel)
    before, after, refused, made = decoded(row.piece, raw, numel)
    assert not refused or ("refuses" in row.claims and same_bits(before, after))
    assert same_bits(after, decoded(row.piece, raw, numel)[1])
    assert made.total <= due.total + 32 * numel + 1024 and made.largest <= max(due.largest, 8 * numel + 64)


def check_python_memory(place: int, numel: int, raw: bytes) -> None:
    """Checks that the peak memory of numpy and Python is proportional to the number of elements."""
    codec = CODECS[place].piece
    honest(place, numel)
    raw = repeated(raw, codec.nbytes(numel))
    tracemalloc.start()
    try:
        decoded(codec, raw, numel)
        assert tracemalloc.get_traced_memory()[1] < (1 << 18) + 256 * numel
    finally:
        tracemalloc.stop()


def check_header(raw: bytes, good: bytes) -> None:
    """Any bytes are the expected packet, or a `PacketError` that names the sender. No length from the bytes is allocated.

    A fitting checksum does not restrict the payload, and a peer may set REFUSED or STOP; every other field is as expected.
    """
    made = Allocated()
    packet = tensor(raw)
    with made:
        try:
            open_packet(packet, DUE)
        except tw.PacketError as error:
            assert "replica 3" in str(error)
        else:
            assert len(raw) == len(good) and raw[:6] + raw[8:44] == good[:6] + good[8:44] and raw[6] < 4 and not raw[7]
    assert made.total <= 4 * len(raw)
