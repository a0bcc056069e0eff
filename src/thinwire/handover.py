"""Tensors from one replica to another: safetensors in a frame, in pieces, checked before they are believed.

| bytes | field    | meaning                                    |
|-------|----------|--------------------------------------------|
| 4     | magic    | `TWHO`                                     |
| 4     | version  | of this format                             |
| 8     | nbytes   | of what follows                            |
| 32    | digest   | BLAKE2b of what follows                    |

All little-endian, 48 bytes, then one safetensors file: names, shapes, dtypes, values, and the sender's facts as JSON in its
metadata. The receiver says how much it is ready to take; nothing is allocated for more. Nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from thinwire.errors import PacketError
from thinwire.group.base import Group

MAGIC = b"TWHO"
VERSION = 1
PIECE = 1 << 22  # bytes of one message, so that a long transfer shares the link
_LAYOUT = struct.Struct("<4sIQ32s")
_FACTS = "facts"
_TAG = 0x7A0


def give(group: Group, peers: list[int], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> int:
    """Send `tensors` and `facts` (JSON) to each of `peers`, who `take` them. Returns the bytes sent."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    body = save(whole, {_FACTS: json.dumps(facts)})
    header = _LAYOUT.pack(MAGIC, VERSION, len(body), hashlib.blake2b(body, digest_size=32).digest())
    for message in (
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        *_pieces(torch.frombuffer(bytearray(body), dtype=torch.uint8)),
    ):
        group.post(_TAG, {peer: message for peer in peers}, {}, "handover").wait()
    return len(peers) * (len(header) + len(body))


def take(group: Group, peer: int, limit: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `peer` gives, at most `limit` bytes. Raises `PacketError` naming `peer` and what is wrong, `LinkError`."""
    header = torch.empty(_LAYOUT.size, dtype=torch.uint8)
    group.post(_TAG, {}, {peer: header}, "handover").wait()
    magic, version, nbytes, digest = _LAYOUT.unpack(header.numpy().tobytes())
    if (magic, version) != (MAGIC, VERSION) or nbytes > limit:
        raise PacketError(
            f"replica {peer} began a handover with {magic!r}, version {version}, {nbytes:,} bytes; {MAGIC!r}, {VERSION} and at most "
            f"{limit:,} are due. Run the same version and model on every replica."
        )
    body = torch.empty(nbytes, dtype=torch.uint8)
    for piece in _pieces(body):
        group.post(_TAG, {}, {peer: piece}, "handover").wait()
    data = body.numpy().tobytes()
    if hashlib.blake2b(data, digest_size=32).digest() != digest:
        raise PacketError(
            f"the handover of replica {peer} was damaged on its way ({nbytes:,} bytes); it is asked for again."
        )
    try:
        tensors = load(data)
        facts = json.loads(_metadata(data)[_FACTS])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PacketError(
            f"the handover of replica {peer} cannot be read ({error}); run the same version on every replica."
        ) from None
    return tensors, facts


def _pieces(whole: Tensor) -> Iterator[Tensor]:
    for begin in range(0, whole.numel(), PIECE):
        yield whole[begin : begin + PIECE]


def _metadata(data: bytes) -> dict[str, str]:
    """Of a safetensors file that has been read without error: 8 bytes of length, then JSON."""
    (length,) = struct.unpack_from("<Q", data)
    return dict(json.loads(data[8 : 8 + length])["__metadata__"])
