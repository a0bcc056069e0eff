"""The wire format: a fixed header and a payload whose size, or the most that it may be, is known before it is encoded.

| bytes | field    | meaning                                                          |
|-------|----------|------------------------------------------------------------------|
| 4     | magic    | `TWPK`                                                           |
| 2     | version  | of this format                                                   |
| 2     | flags    | `REFUSED`: no values inside, drop the round; `STOP`: sender wants to stop; `PARTIAL`: some parameters had no gradient |
| 4     | codec    | CRC-32 of the codec's own text, so that its parameters count too |
| 2     | sender   | replica                                                          |
| 2     | fragment | index                                                            |
| 4     | round    | how often this fragment has departed before                      |
| 4     | step     | inner step after which it departs, the same on all; 0: not said  |
| 4     | part     | which message of the round: its stage, and its place there       |
| 8     | numel    | elements of the delta in this message                            |
| 8     | nbytes   | of the payload, at most the expected number if its codec `varies` |
| 4     | checksum | CRC-32 of the header with this field zero, then the payload      |

All little-endian, 48 bytes. Bytes from a peer are hostile until `open_packet` has compared every field with the expected
value; no memory is allocated by a length in them. CRC-32 detects accidents, not forgery: see docs/design.md on open
networks.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.errors import DisagreementError, PacketError

MAGIC = b"TWPK"
VERSION = 1
REFUSED = 1
STOP = 2
PARTIAL = 4
FLAGS = REFUSED | STOP | PARTIAL
FIELD_VALUES = 1 << 16  # replicas of a group, and fragments
_LAYOUT = struct.Struct("<4sHHIHHIIIQQI")
_CHECKSUM = struct.Struct("<I")
_NBYTES = 10  # its place among the fields
HEADER_NBYTES = _LAYOUT.size


@dataclass(frozen=True)
class Header:
    """What a packet says of itself, apart from magic, version and checksum."""

    codec: int
    sender: int
    fragment: int
    round: int
    part: int
    numel: int
    nbytes: int
    flags: int = 0
    step: int = 0


def identity(codec: object) -> int:
    """A codec's name on the wire: CRC-32 of its text, parameters included."""
    return zlib.crc32(repr(codec).encode())


def payload(packet: Tensor) -> Tensor:
    """The bytes behind the header, as a view."""
    return packet[HEADER_NBYTES:]


def flags_of(packet: Tensor) -> int:
    """The flags in the header of a packet that was sealed here, or opened."""
    return int(_LAYOUT.unpack_from(packet.numpy().data)[2])


def seal(packet: Tensor, header: Header) -> None:
    """Write `header` and the checksum in front of the payload that `packet` already holds. Raises `PacketError`."""
    view = packet.numpy().data
    try:
        _LAYOUT.pack_into(
            view, 0, MAGIC, VERSION, header.flags, header.codec, header.sender, header.fragment,
            header.round, header.step, header.part, header.numel, header.nbytes, 0,
        )  # fmt: skip
    except struct.error as error:
        raise PacketError(
            f"a packet cannot be written: {header} ({error}); the fields have 16, 32 or 64 bits."
        ) from None
    _CHECKSUM.pack_into(view, HEADER_NBYTES - _CHECKSUM.size, zlib.crc32(view))


def said_nbytes(packet: Tensor) -> int:
    """The number of bytes that the packet in a buffer declares, header included; at most the buffer's."""
    if packet.numel() < HEADER_NBYTES:
        return packet.numel()
    return min(packet.numel(), HEADER_NBYTES + int(_LAYOUT.unpack_from(packet.numpy().data)[_NBYTES]))


def open_packet(packet: Tensor, due: Header, least: int | None = None) -> int:
    """Compare `packet` with the one that is `due` (its flags aside) and return its flags.

    With `least`, the payload may have any number of bytes from that to `due.nbytes`. Raises `PacketError` naming the first
    field that differs, `DisagreementError` if only the inner step does. Reads only `packet`, allocates nothing.
    """
    sender = due.sender
    if least is not None and HEADER_NBYTES + least <= packet.numel() <= HEADER_NBYTES + due.nbytes:
        due = replace(due, nbytes=packet.numel() - HEADER_NBYTES)
    if packet.numel() != HEADER_NBYTES + due.nbytes:
        raise PacketError(
            f"replica {sender} sent {packet.numel()} bytes, {HEADER_NBYTES + due.nbytes} were expected. "
            "Do all replicas run the same strategy?"
        )
    view = packet.numpy().data
    magic, version, flags, *fields, checksum = _LAYOUT.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise PacketError(
            f"replica {sender} sent magic {magic!r} version {version}, {MAGIC!r} version {VERSION} is needed. "
            "Run the same version of Thinwire on every replica."
        )
    body = zlib.crc32(view[HEADER_NBYTES:], zlib.crc32(bytes(4), zlib.crc32(view[: HEADER_NBYTES - 4])))
    if checksum != body:
        raise PacketError(f"the packet of replica {sender} is damaged: checksum {checksum:08x}, computed {body:08x}.")
    names = ("codec", "sender", "fragment", "round", "step", "part", "numel", "nbytes")
    for name, got in zip(names, fields):
        if name == "step" and due.step and got != due.step:
            raise DisagreementError(other_steps(sender, f"is in this round after {got}", due.step))
        if got != getattr(due, name):
            raise PacketError(
                f"replica {sender} sent {name} {got}, {getattr(due, name)} was expected. "
                "Do all replicas run the same strategy from the same step?"
            )
    if flags & ~FLAGS:
        raise PacketError(f"replica {sender} sent unknown flags {flags:#x}; run the same version everywhere.")
    return int(flags)


def other_steps(peer: int, does: str, own: int) -> str:
    """What to say if a replica has counted other inner steps than this one."""
    return (
        f"replica {peer} {does} inner steps, this replica has counted {own}. Every replica must take the same number: give all as "
        "many batches, and let none skip `optimizer.step()`: with a GradScaler, which does, go on until `replica.step` is what it shall be; "
        "else call it with gradients set to None where an update is to be left out. To end earlier, call `replica.request_stop()`: "
        "`replica.stopping` is then true on all after the same step."
    )


def empty_packet(nbytes: int) -> Tensor:
    """Room for a packet with a payload of `nbytes`."""
    return torch.empty(HEADER_NBYTES + nbytes, dtype=torch.uint8)


def read_header(packet: Tensor) -> Header:
    """What `packet` says of itself, which is not to be trusted: for a receiver to whom several may come, before `open_packet`. Raises
    `PacketError` if it is too short.
    """
    if packet.numel() < HEADER_NBYTES:
        raise PacketError(f"{packet.numel()} bytes came, which is no packet: a header alone has {HEADER_NBYTES}.")
    _, _, flags, codec, sender, fragment, round_, step, part, numel, nbytes, _ = _LAYOUT.unpack_from(
        packet.numpy().data
    )
    return Header(codec, sender, fragment, round_, part, numel, nbytes, flags, step)
