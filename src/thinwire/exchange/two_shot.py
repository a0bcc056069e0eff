"""The exchange with owners of shards: shards go to their owners, and the owners' means to all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm.uplink import Link
from thinwire.exchange.base import Arrival, Exchange, ExchangeTraits, Range, Ranges
from thinwire.exchange.chunks import CodedRange, Message, Signal, cut, packets_nbytes, shards
from thinwire.exchange.decode import Decoder
from thinwire.exchange.owner import Owner, check_means, check_owners
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import MOST_STAGES, Stage, heard
from thinwire.packet import HEADER_NBYTES, REFUSED, payload
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.types import State


@dataclass(frozen=True)
class TwoShot(Exchange):
    """Each replica owns a shard, receives it from all, and sends its mean to all: 2(M−1)/M·nbytes each. `Direct` sends
    (M−1)·nbytes, which is more for three replicas or more.

        x̂ = C(1/M · Σ_m c_m + e)      of each shard; c_m: replica m's decoded packet; e: what its owner's `feedback` kept; C: the codec

    The owner adds in fp32 and in rank order, and encodes the mean in the same codec: a second rounding, and a second
    delay. All replicas decode the same bytes, the owner too, so they agree bit for bit. With `feedback` the owner adds
    its rounding error to its next mean. Both sums telescope: Σ c + e = Σ mean at the owner, Σ sent + e = Σ Δ at each replica.

    Shards are cut at the codec's grain. *A codec without a grain encodes each shard separately*: with its own scale, its own largest
    values, and its own random numbers. A codec that needs shapes is refused (a shard has none), and so
    is RandomK (it would sample twice): `AllReduce` and `Direct` take both.

    *Source*: 1-bit Adam (Tang et al., arXiv 2102.02888, Algorithm 1), with error feedback on both sides if the strategy has `Feedback()` as
    well. *Differs*: any codec that can encode a shard, not signs alone; feedback on each side is a choice.

    *Wire*: 2(M−1)/M·nbytes from each replica, and M bytes behind each mean, which tell which replicas refused. Predicted: 2 delays +
    8·(bytes sent) / rate. State of the owner: 4/M bytes per parameter, with `feedback`.

    Args:
        feedback: keeps the error of the owners' second rounding; None: it is lost.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> TwoShot()
    TwoShot(feedback=None)
    """

    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        check_owners(self, self.feedback)

    traits: ClassVar[ExchangeTraits] = ExchangeTraits(gathers=True, multiplies=True)

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        begin, end = shards(codec, numel, size)[rank]
        return end - begin

    def nbytes_products(self, size: int) -> int:
        return (size - 1) * (HEADER_NBYTES + 8 * size * size)

    @property
    def needs_fixed_group(self) -> str:
        return "keeps what each owner holds back of its shard" if self.feedback else ""

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        check_means(self, codec)

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        return self.feedback.init(self.owns(codec, numel, rank, size)) if self.feedback else {}

    def depart(self, round_: Round, state: State) -> Reduction:
        reduction = Reduction(round_, round_.codec, round_.numel, feedback=self.feedback, state=state)
        reduction.expect()
        reduction.send(round_.signal)
        return reduction

    def arrive(self, departure: Reduction) -> Ranges:
        return (yield from departure.arrive())

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return reduction_nbytes(codec, numel, size, rank or 0)

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return link.seconds(self.nbytes_sent(codec, numel, size)) + link.delay_seconds if size > 1 else 0.0


def reduction_nbytes(codec: Codec, numel: int, size: int, rank: int, marks: int | None = None) -> int:
    """Bytes that member `rank` of `size` sends: the shards of the others, and its own mean to each of them with `marks` more bytes (None: `size`)."""
    messages = [cut(codec, *span) for span in shards(codec, numel, size)]
    others = sum(packets_nbytes(of) for owner, of in enumerate(messages) if owner != rank)
    return others + (size - 1) * packets_nbytes(messages[rank], marks=size if marks is None else marks)


def _matrix(size: int) -> Message:
    """The message that holds inner products, in fp64."""
    return Message(0, size * size, (CodedRange(0, size * size, 0, 8 * size * size),))


def _doubles(body: Tensor) -> Tensor:
    """The bytes of `body`, at any address, as fp64."""
    return torch.empty(body.numel() // 8, dtype=torch.float64).view(torch.uint8).copy_(body).view(torch.float64)


class Reduction:
    """The mean of a vector of `numel` over `members` (ranks in order; None: all), in two stages from `number` on: scatter, gather."""

    def __init__(
        self,
        round_: Round,
        codec: Codec,
        numel: int,
        number: int = 0,
        feedback: Feedback | None = None,
        state: State | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.round, self.codec, self.numel = round_, codec, numel
        self._feedback, self._state = feedback, state or {}
        self.members = list(range(round_.size)) if members is None else list(members)
        self.peers = [member for member in self.members if member != round_.rank]
        spans = shards(codec, numel, len(self.members))
        self.messages = {member: cut(codec, *span) for member, span in zip(self.members, spans)}
        self._scatter = Stage(round_, codec, number)
        self._gather = Stage(round_, codec, number + 1, marks=round_.size)
        self._products = Stage(round_, Identity(), MOST_STAGES - 2, purpose="products")
        self._own: dict[tuple[int, int], Outgoing] = {}  # by owner and index of the message

    def expect(self) -> None:
        """Post all receives."""
        self._scatter.expect(dict.fromkeys(self.peers, self.messages[self.round.rank]))
        self._gather.expect({peer: self.messages[peer] for peer in self.peers})
        if self.round.aggregate.needs_products:
            self._products.expect(dict.fromkeys(self.peers, (_matrix(self.round.size),)))

    def send(self, signal: Signal) -> None:
        """Send each owner its shard, in the order of ranks from the next rank on."""
        rank, place = self.round.rank, self.members.index(self.round.rank) + 1
        owners = [*self.members[place:], *self.members[:place]]
        for index in range(max(map(len, self.messages.values()))):
            for owner in owners:
                if index < len(self.messages[owner]):
                    message, to = self.messages[owner][index], [owner] if owner != rank else []
                    self._own[owner, index] = self._scatter.send(index, message, to, signal, self._scattered(owner))

    def arrive(self) -> Ranges:
        """Average the own shard, then receive all means."""
        room = Decoder(self.round, self.codec)
        rank = self.round.rank
        owner = Owner(self._gather, self._gathered(rank), self.messages[rank], self._feedback, self._state)
        count = len(self.messages[rank])
        if room.needs_products:
            said = [self._scattered_flags(index) for index in range(count)]
            self._multiply(room, said)
            own = [self._average(index, flags, owner, room) for index, flags in enumerate(said)]
        else:
            own = [self._average(index, self._scattered_flags(index), owner, room) for index in range(count)]
        flags, void = [0] * self.round.size, False
        for index in range(max(map(len, self.messages.values()))):
            gathered = self._gather.receive(index)
            for sender, messages in self.messages.items():
                if index < len(messages):
                    packet = own[index].packet if sender == rank else self._gather.packet(index, sender)
                    flags = [a | b for a, b in zip(flags, heard(packet, self.round.size, sender))]
                    void |= bool((own[index].flags if sender == rank else gathered[sender]) & REFUSED)
                    if not void:
                        yield from self._ranges(sender, index, packet, room)
        room.close()
        return Arrival(tuple(flags), owner.after, void)

    def _scattered_flags(self, index: int) -> list[int]:
        """Wait for message `index` of the own shard from all, and return the flags of each, by rank."""
        said, mine = self._scatter.receive(index), self._own[self.round.rank, index]
        mine.wait()
        said[self.round.rank] = mine.flags
        return [said.get(rank, 0) for rank in range(self.round.size)]

    def _packets(self, index: int) -> dict[int, Tensor]:
        own = {self.round.rank: self._own[self.round.rank, index].packet}
        return {peer: self._scatter.packet(index, peer) for peer in self.peers} | own

    def _multiply(self, room: Decoder, said: Sequence[Sequence[int]]) -> None:
        """Send the inner products over the own shard to all, and add up those of all owners in rank order."""
        rank, size = self.round.rank, self.round.size
        messages, key, first = self.messages[rank], self._scattered(rank), self.messages[rank][0].begin
        for index, (message, flags) in enumerate(zip(messages, said)):
            for coded in message.ranges:
                room.measure(coded, first, self._packets(index), key, flags)
        message = _matrix(size)
        self._products.send_bytes(message, room.products.view(torch.uint8).flatten(), self.peers)
        self._products.receive(0)
        total = torch.zeros_like(room.products)
        for owner in range(size):
            part = room.products if owner == rank else _doubles(payload(self._products.packet(0, owner)))
            total += part.view(size, size)
        room.choose(total)

    def _average(self, index: int, flags: Sequence[int], owner: Owner, room: Decoder) -> Outgoing:
        """Send the mean of one message of the own shard to all."""
        packets, key = self._packets(index), self._scattered(self.round.rank)
        return owner.say(index, lambda coded: room.mean(coded, packets, key, flags=flags), flags, self.peers, room)

    def _ranges(self, owner: int, index: int, packet: Tensor, room: Decoder) -> Iterator[Range]:
        sent = self._own[owner, index]
        for coded in self.messages[owner][index].ranges:
            mean = room.owners(coded, owner, packet, self._gathered(owner))
            yield Range(coded.begin, mean, room.own(coded, sent, self._scattered(owner)))

    def _scattered(self, owner: int) -> Key:
        """The key of the messages from this replica to `owner`."""
        return replace(self.round.key, part=1 + owner)

    def _gathered(self, owner: int) -> Key:
        """The key of the mean that `owner` sends."""
        return replace(self.round.key, sender=owner, part=1 + self.round.size + owner)
