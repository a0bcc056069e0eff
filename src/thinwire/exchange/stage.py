"""A stage of a round: messages that all replicas send and expect at the same time, with their headers and tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import TAGS, Transfer
from thinwire.errors import DisagreementError, PacketError
from thinwire.exchange.chunks import STAGE, Message, Signal
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import PACKET, Outgoing
from thinwire.packet import FLAGS, HEADER_NBYTES, Header, identity, open_packet, payload, said_nbytes, seal
from thinwire.rng import Key

MOST_STAGES = 32  # most stages of a round: a tag has five bits for their number


class _Expected(NamedTuple):
    transfer: Transfer
    messages: dict[int, Message]  # by peer
    packets: dict[int, Tensor]


class Stage:
    """One set of a round's messages. Every replica knows their senders and sizes beforehand; if the codec `varies`, their largest
    sizes.

    The stages of a round have different numbers. `marks` bytes follow every payload; `purpose` is for the ledger.
    If the stage forwards packets of another stage, `passes` is that stage's number.
    """

    def __init__(
        self,
        round_: Round,
        codec: Codec,
        number: int = 0,
        marks: int = 0,
        purpose: str = PACKET,
        passes: int | None = None,
    ) -> None:
        self.round, self.codec, self.number, self.marks, self.purpose = round_, codec, number, marks, purpose
        self._named = number if passes is None else passes
        self._codec_name = identity(codec)
        self._sized = said_nbytes if codec.varies else None
        self._expected: list[_Expected] = []

    def expect(self, due: Mapping[int, Sequence[Message]]) -> None:
        """Start receiving the messages of each peer.

        The first peer to be checked changes from message to message, because a carrier may notice a message only after earlier ones.
        """
        sizes = {peer: [HEADER_NBYTES + m.nbytes + self.marks for m in of_peer] for peer, of_peer in due.items()}
        self.round.trace.expect(self.number, sizes, self.round.context.clock())
        peers = list(due)
        for index in range(max(map(len, due.values()), default=0)):
            first = (self.round.key.round + index) % len(peers)
            messages = {peer: due[peer][index] for peer in peers[first:] + peers[:first] if index < len(due[peer])}
            packets = {p: self._room(message) for p, message in messages.items()}
            transfer = self.round.context.group.post(self._tag(index), {}, packets, self.purpose, self._sized)
            self._expected.append(_Expected(transfer, messages, packets))

    def receive(self, index: int, authors: Mapping[int, int] | None = None) -> dict[int, int]:
        """Wait for the message `index` of all senders, and return the flags of each. `authors` are the replicas whose packets a
        peer forwards. Raises `LinkError`, `PacketError`.
        """
        if index >= len(self._expected):
            return {}
        transfer, messages, packets = self._expected[index]
        began = self.round.context.clock()
        try:
            transfer.wait()
        except BaseException:
            self._look_around(index)
            raise
        finally:
            self.round.trace.came(self.number, index, list(packets), began, transfer.arrivals)
        senders = {peer: peer for peer in sorted(packets)} | dict(authors or {})
        flags = {}
        for peer, sender in senders.items():
            if peer in packets:
                try:
                    flags[peer], packet = self._opened(sender, index, messages[peer], packets[peer])
                except PacketError as error:
                    error.peer = peer
                    raise
                self.round.trace.shorter(self.number, peer, packets[peer].numel() - packet.numel())
                packets[peer] = packet
        return flags

    def _opened(self, sender: int, index: int, message: Message, room: Tensor) -> tuple[int, Tensor]:
        """The flags of the packet of `sender` in `room`, and the packet's part of `room`. Raises `PacketError`."""
        due = self._header(replace(self.round.key, sender=sender), index, message)
        if self._sized is None:
            return open_packet(room, due), room
        packet = room[: self._sized(room)]
        return open_packet(packet, due, least=self.marks), packet

    def _look_around(self, index: int) -> None:
        """Record the messages from `index` on that have arrived without a wait, because an earlier one is missing."""
        for number, expected in enumerate(self._expected[index:], index):
            for peer, packet in expected.packets.items():
                with suppress(PacketError, DisagreementError):
                    if number > index or peer not in expected.transfer.arrivals:
                        self._opened(peer, number, expected.messages[peer], packet)
                        self.round.trace.lies_there(self.number, peer)

    def packet(self, index: int, peer: int) -> Tensor:
        """The packet that came from `peer`."""
        return self._expected[index].packets[peer]

    def write(
        self, index: int, message: Message, signal: Signal, key: Key, flags: int, marks: Sequence[int] = ()
    ) -> Outgoing:
        """Encode a message in this thread."""
        packet = self._outgoing(index, message)
        packet.write(self.codec, signal, key, replace(self._header(key, index, message), flags=flags), marks)
        return packet

    def post(self, packet: Outgoing, to: Sequence[int]) -> None:
        """Queue a packet that is written."""
        packet.to = to
        self.round.context.send_queue.send(self.round.order, packet)

    def pass_on(self, index: int, message: Message, packet: Tensor, to: Sequence[int]) -> None:
        """Queue another replica's packet, unchanged."""
        outgoing = self._outgoing(index, message, packet)
        outgoing.written.set_result(None)
        self.post(outgoing, to)

    def send(self, index: int, message: Message, to: Sequence[int], signal: Signal, key: Key) -> Outgoing:
        """Queue a message, which is encoded on the sending thread, with the round's own flags."""
        packet, due = self._outgoing(index, message), replace(self._header(key, index, message), flags=self.round.flags)
        packet.to = to
        write = partial(packet.write, self.codec, signal, key, due)
        self.round.context.send_queue.send(self.round.order, packet, write)
        return packet

    def send_bytes(self, message: Message, body: Tensor, to: Sequence[int]) -> None:
        """Queue `body`, which is not an encoded delta, as the only message of this stage."""
        outgoing = self._outgoing(0, message)
        payload(outgoing.packet).copy_(body)
        seal(outgoing.packet, self._header(self.round.key, 0, message))
        outgoing.written.set_result(None)
        self.post(outgoing, to)

    def _outgoing(self, index: int, message: Message, packet: Tensor | None = None) -> Outgoing:
        room = self._room(message) if packet is None else packet
        tag, round_ = self._tag(index), self.round
        outgoing = Outgoing(
            message, room, self.number, index, tag, self.purpose, trace=round_.trace, on_stream=round_.on_stream
        )
        self.round.outgoing.append(outgoing)
        return outgoing

    def _room(self, message: Message) -> Tensor:
        """A buffer for the packet of `message`, which the round gives back."""
        room = self.round.context.buffers.bytes(HEADER_NBYTES + message.nbytes + self.marks)
        self.round.packets.append(room)
        return room

    def _header(self, key: Key, index: int, message: Message) -> Header:
        """The header that is expected from `key`'s sender, with the largest size."""
        part, nbytes = self._named * STAGE + index, message.nbytes + self.marks
        return Header(
            self._codec_name, key.sender, key.fragment, key.round, part, message.numel, nbytes, step=self.round.step
        )

    def _tag(self, index: int) -> int:
        """The tag of message `index`. Rounds that may be in flight together, stages, and messages have different
        tags; if there are too few numbers, the order of posting distinguishes them.
        """
        return tag_of(self.round.key, self.number, index)


def tag_of(key: Key, stage: int, index: int = 0) -> int:
    """The tag of the message `index` of a `stage` of the round that `key` names."""
    return (key.round << 24 | (key.fragment & 0x3FF) << 14 | stage << 9 | index & 0x1FF) % TAGS


def heard(packet: Tensor, size: int, sender: int) -> list[int]:
    """The flags of each of `size` replicas as the sender received them, one byte each, behind the payload."""
    marks: list[int] = payload(packet)[-size:].tolist()
    if any(mark & ~FLAGS for mark in marks):
        raise PacketError(f"replica {sender} forwarded unknown flags {marks}; run the same version everywhere.")
    return marks
