"""The messages between a replica and the syncer: packets (packet.py) whose payload begins with a fixed-size record (the notes).

| to the syncer   | notes, then the encoded delta: `DELTA` at its step, `REST` at the end; `END`: the replica's last message    |
| from the syncer | notes, then the encoded estimate: `MOVE`, at the end `LAST`, from above a site `MERGE`; `END`: the run ended |

The flag `STOP`, in both directions, requests a stop of the training. The flag `REFUSED`, to the syncer, means that the delta was not
finite and the replica keeps it; from it, with `END`, that the receiver counts as lost. `round` counts the sender's messages of this kind
for the fragment; from the syncer it is the version of the fragment to which the estimate is applied. All replicas get the same bytes. A
packet may be of any fragment, so both sides receive into a buffer for the largest and read the fragment from the header; `open_packet`
checks a packet before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import PacketError
from thinwire.packet import (
    HEADER_NBYTES,
    REFUSED,
    STOP,
    Header,
    empty_packet,
    identity,
    open_packet,
    payload,
    read_header,
    seal,
)

DELTA, REST, MOVE, LAST, END, MERGE = range(6)  # a message's part
UP, DOWN = 1, 2  # tags
_UP = struct.Struct("<IIQdd")
_DOWN = struct.Struct("<8s")
_EACH = struct.Struct("<BfQf")
COUNTED, LEFT_OUT = 1, 2
_MOST_STEPS = 1 << 40


@dataclass(frozen=True)
class Up:
    """A delta in transit to the syncer, with its replica's measurements.

    base       version of the fragment's anchor from which the delta starts
    steps      inner steps in which the delta was trained
    taken      inner steps of this replica since the start
    tokens     number of tokens in `steps`
    seconds    seconds of an inner step on this replica, 1e-9 or more; 0: not known
    """

    kind: int
    sender: int
    fragment: int = 0
    number: int = 0
    base: int = 0
    steps: int = 0
    taken: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    stop: bool = False
    refused: bool = False
    body: Tensor | None = None


@dataclass(frozen=True)
class ReplicaReport:
    """The part of a message from the syncer about one replica.

    outcome    the outcome of its delta: `COUNTED`, `LEFT_OUT`, or 0 if the round had no delta of it
    waited     seconds that the delta waited for the round
    taken      inner steps of this replica since the start, as far as the syncer knows
    speed      inner steps per second; 0: not known
    """

    outcome: int = 0
    waited: float = 0.0
    taken: int = 0
    speed: float = 0.0


@dataclass(frozen=True)
class Down:
    """An estimate in transit to all replicas. `digest` is the digest of the fragment's anchor and outer state before it is applied."""

    kind: int
    fragment: int = 0
    version: int = 0
    digest: bytes = bytes(8)
    reports: tuple[ReplicaReport, ...] = ()
    stop: bool = False
    left: bool = False  # the receiver took no messages: it counts as lost, and the run goes on without it
    body: Tensor | None = None


class SyncerMessages:
    """Writes and reads the packets of a group of `size` replicas; `numels` are the elements of each fragment, `host` is the syncer's rank."""

    def __init__(self, size: int, host: int, numels: Sequence[int], up: Sequence[Codec], down: Sequence[Codec]) -> None:
        self.size, self.host, self.numels, self.up, self.down = size, host, tuple(numels), tuple(up), tuple(down)

    def buffer(self, tag: int) -> Tensor:
        """A buffer for the largest message with this tag."""
        codecs = self.up if tag == UP else self.down
        largest = max(codec.nbytes(numel) for codec, numel in zip(codecs, self.numels))
        return empty_packet(self._notes(tag) + largest)

    def nbytes(self, tag: int, fragment: int) -> int:
        """Bytes of a message with a body, header included."""
        codec = (self.up if tag == UP else self.down)[fragment]
        return HEADER_NBYTES + self._notes(tag) + codec.nbytes(self.numels[fragment])

    def write_up(self, up: Up) -> Tensor:
        notes = _UP.pack(up.base, up.steps, up.taken, up.tokens, up.seconds)
        flags = STOP * up.stop | REFUSED * up.refused
        return self._write(UP, up.kind, up.sender, up.fragment, up.number, flags, notes, up.body)

    def write_down(self, down: Down) -> Tensor:
        reports = down.reports or (ReplicaReport(),) * self.size
        each = (_EACH.pack(one.outcome, one.waited, one.taken, one.speed) for one in reports)
        notes = _DOWN.pack(down.digest) + b"".join(each)
        flags = STOP * down.stop | REFUSED * down.left
        return self._write(DOWN, down.kind, self.host, down.fragment, down.version, flags, notes, down.body)

    def read_up(self, packet: Tensor, sender: int) -> Up:
        """Parse a message to the syncer. Raises `PacketError`."""
        header, notes, body = self._read(UP, packet, sender, (DELTA, REST, END))
        base, steps, taken, tokens, seconds = _UP.unpack(notes)
        if not (0 <= tokens < 1e15 and (seconds == 0 or 1e-9 <= seconds < 1e9) and steps <= taken < _MOST_STEPS):
            raise PacketError(
                f"replica {sender} sent {tokens} tokens, {seconds} s per step and {steps} of {taken} steps; check that replica."
            )
        stop, refused = bool(header.flags & STOP), bool(header.flags & REFUSED)
        return Up(
            header.part, sender, header.fragment, header.round, base, steps, taken, tokens, seconds, stop, refused, body
        )

    def read_down(self, packet: Tensor) -> Down:
        """Parse a message from the syncer. Raises `PacketError`."""
        header, notes, body = self._read(DOWN, packet, self.host, (MOVE, LAST, END, MERGE))
        (digest,) = _DOWN.unpack_from(notes)
        reports = tuple(
            ReplicaReport(*_EACH.unpack_from(notes, _DOWN.size + place * _EACH.size)) for place in range(self.size)
        )
        if not all(math.isfinite(one.waited) and 0 <= one.speed < math.inf for one in reports):
            raise PacketError("the syncer sent times that are not finite; check the replica that hosts it.")
        stop, left = bool(header.flags & STOP), bool(header.flags & REFUSED)
        return Down(header.part, header.fragment, header.round, digest, reports, stop, left, body)

    def _notes(self, tag: int) -> int:
        return _UP.size if tag == UP else _DOWN.size + self.size * _EACH.size

    def _header(self, tag: int, part: int, sender: int, fragment: int, number: int, flags: int, whole: bool) -> Header:
        codec, numel = (self.up if tag == UP else self.down)[fragment], self.numels[fragment] if whole else 0
        nbytes = self._notes(tag) + (codec.nbytes(numel) if whole else 0)
        return Header(identity(codec), sender, fragment, number, part, numel, nbytes, flags)

    def _write(
        self,
        tag: int,
        part: int,
        sender: int,
        fragment: int,
        number: int,
        flags: int,
        notes: bytes,
        body: Tensor | None,
    ) -> Tensor:
        header = self._header(tag, part, sender, fragment, number, flags, body is not None)
        packet = empty_packet(header.nbytes)
        inside = payload(packet)
        inside[: len(notes)] = torch.frombuffer(bytearray(notes), dtype=torch.uint8)
        if body is not None:
            inside[len(notes) :] = body
        seal(packet, header)
        return packet

    def _read(
        self, tag: int, packet: Tensor, sender: int, parts: tuple[int, ...]
    ) -> tuple[Header, bytes, Tensor | None]:
        told = read_header(packet)
        if told.part not in parts or told.fragment >= len(self.numels):
            raise PacketError(
                f"replica {sender} sent part {told.part} of fragment {told.fragment}; parts {parts} of {len(self.numels)} fragments are possible. "
                "Do all replicas run the same strategy?"
            )
        whole = told.numel > 0 or (self.numels[told.fragment] == 0 and told.part != END)
        due = self._header(tag, told.part, sender, told.fragment, told.round, 0, whole)
        packet = packet[: HEADER_NBYTES + due.nbytes]
        flags = open_packet(packet, due)
        inside = payload(packet)
        notes = bytes(inside[: self._notes(tag)].numpy().tobytes())
        return replace(due, flags=flags), notes, inside[self._notes(tag) :] if whole else None
