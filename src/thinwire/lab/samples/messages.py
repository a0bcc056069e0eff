"""The messages between peers that train in samples (Plexus): packets (packet.py) with the round and the sender in their header.

The payload is a fixed-size record (the notes), then the sample, then the sender's view, then the model; `part` is the kind.

| PING, PONG    | are you there, for the sample of `round`?                                         | notes                |
| TRAINED       | a participant's model of `round`, for the aggregator of the next one              | notes, sample, view, model |
| MEAN          | the model of `round`, for its participants                                        | notes, sample, view, model |
| FINAL         | the model in which the run ends                                                   | notes, view, model   |
| GOT           | a MEAN or FINAL has arrived                                                       | notes                |
| ACK, NACK     | a TRAINED is in a model that has arrived elsewhere; it is not, and must go to another | notes            |
| JOIN, LEAVE   | the sender has come or goes                                                       | notes                |
| ASK           | send me the FINAL                                                                 | notes                |
| BYE           | the sender's last message                                                         | notes                |

Lengths are compared with the group's size and the model before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.errors import PacketError
from thinwire.lab.samples.peer_view import PeerView
from thinwire.packet import HEADER_NBYTES, STOP, Header, empty_packet, identity, open_packet, payload, read_header, seal


class Kind(IntEnum):
    """The kind of a message."""

    PING = 0
    PONG = 1
    TRAINED = 2
    MEAN = 3
    FINAL = 4
    GOT = 5
    ACK = 6
    NACK = 7
    JOIN = 8
    LEAVE = 9
    ASK = 10
    BYE = 11


WITH_MODEL = (Kind.TRAINED, Kind.MEAN, Kind.FINAL)
_NOTES = struct.Struct("<IIIII")  # counter, known, step, peers of the sample, bytes of the view
_PEER = struct.Struct("<H")
_MOST = 1 << 31  # most rounds, and most changes of a peer
_CODEC = identity(Identity())


@dataclass(frozen=True)
class PeerMessage:
    """A message from one peer to another.

    kind       one of the kinds above
    sender     its number
    round      the round of the message; with PING and PONG the round whose sample is drawn
    counter    how often the sender has joined or left
    known      the newest round whose model the sender knows to exist
    step       with a model: inner steps of the run in it
    stop       with a model: the run ends after it
    sample     with a model: the participants of `round`
    view       with a model: the sender's view of all peers
    model      the weights and the momentum that belongs to them
    """

    kind: Kind
    sender: int
    round: int = 0
    counter: int = 1
    known: int = 0
    step: int = 0
    stop: bool = False
    sample: tuple[int, ...] = ()
    view: PeerView | None = None
    model: Any = None


class SampleMessages:
    """Writes and reads the packets of a group of `size` peers, whose models have `numel` fp32 values, momentum included."""

    def __init__(self, size: int, numel: int) -> None:
        self.size, self.numel = size, numel

    def nbytes(self, kind: int, sample: int, peers: int) -> int:
        """Bytes of a message with a sample and a view of so many peers, including the header."""
        small = HEADER_NBYTES + _NOTES.size
        if kind not in WITH_MODEL:
            return small
        return small + sample * _PEER.size + PeerView.nbytes(peers) + 4 * self.numel

    def buffer(self) -> Tensor:
        """A buffer for the largest message."""
        return empty_packet(self.nbytes(Kind.MEAN, self.size, self.size) - HEADER_NBYTES)

    def write(self, message: PeerMessage) -> Tensor:
        view = message.view.write() if message.view is not None else b""
        sample = b"".join(map(_PEER.pack, message.sample))
        notes = _NOTES.pack(message.counter, message.known, message.step, len(message.sample), len(view))
        front = notes + sample + view
        numel = 0 if message.model is None else self.numel
        packet = empty_packet(len(front) + 4 * numel)
        inside = payload(packet)
        inside[: len(front)] = torch.frombuffer(bytearray(front), dtype=torch.uint8)
        if message.model is not None:
            inside[len(front) :] = message.model.contiguous().view(torch.uint8)
        seal(packet, self._header(message.kind, message.sender, message.round, numel, inside.numel(), message.stop))
        return packet

    def read(self, packet: Tensor, sender: int) -> PeerMessage:
        """Parse a message of `sender`. Raises `PacketError`."""
        told = read_header(packet)
        with_model = told.part in WITH_MODEL
        least = self.nbytes(told.part, 0, 0) - HEADER_NBYTES
        most = self.nbytes(told.part, self.size, self.size) - HEADER_NBYTES
        if told.part > Kind.BYE or told.round >= _MOST or not least <= told.nbytes <= most:
            raise PacketError(
                f"replica {sender} sent part {told.part} of round {told.round} with {told.nbytes} bytes; at most {Kind.BYE}, with {least} to {most}, "
                "is due. "
                "Do all replicas run the same strategy?"
            )
        numel = self.numel if with_model else 0
        due = self._header(told.part, sender, told.round, numel, told.nbytes, False)
        packet = packet[: HEADER_NBYTES + told.nbytes]
        stop = bool(open_packet(packet, due) & STOP)
        raw = payload(packet)
        counter, known, step, peers, nbytes = _NOTES.unpack(raw[: _NOTES.size].numpy().tobytes())
        front = _NOTES.size + peers * _PEER.size
        if front + nbytes + 4 * numel != raw.numel() or not 0 < counter < _MOST > known:
            raise PacketError(
                f"replica {sender} sent counter {counter}, {peers} peers and a view of {nbytes} bytes in {raw.numel()}; check that replica."
            )
        if not with_model:
            return PeerMessage(Kind(told.part), sender, told.round, counter, known, step, stop)
        sample = tuple(peer for (peer,) in _PEER.iter_unpack(raw[_NOTES.size : front].numpy().tobytes()))
        if len(set(sample)) != len(sample) or any(peer >= self.size for peer in sample):
            raise PacketError(f"replica {sender} sent the sample {sample}, which is none of {self.size} replicas.")
        view = PeerView.read(raw[front : front + nbytes].numpy().tobytes(), self.size)
        model = torch.empty(self.numel)
        model.view(torch.uint8).copy_(raw[front + nbytes :])
        if not bool(torch.isfinite(model).all()):
            raise PacketError(f"replica {sender} sent NaN or infinity; check that replica.")
        return PeerMessage(Kind(told.part), sender, told.round, counter, known, step, stop, sample, view, model)

    def _header(self, kind: int, sender: int, round_: int, numel: int, nbytes: int, stop: bool) -> Header:
        return Header(_CODEC, sender, 0, round_, kind, numel, nbytes, STOP * stop)
