"""Everybody to everybody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from thinwire.codecs import Codec
from thinwire.comm.emulated import Link
from thinwire.exchange.base import Arrival, Exchange, Settle
from thinwire.exchange.chunks import Message, cut, packets_nbytes
from thinwire.exchange.decode import Decoder
from thinwire.exchange.round import Outgoing, Round
from thinwire.exchange.stage import Stage
from thinwire.packet import REFUSED
from thinwire.state import State


@dataclass(frozen=True)
class _Departure:
    round: Round
    stage: Stage
    messages: tuple[Message, ...]
    own: list[Outgoing]


@dataclass(frozen=True)
class Direct(Exchange):
    """Each replica sends its packet to all others: (M−1)·nbytes sent by each, and no second rounding. Best for few replicas.

    Accumulation is in fp32 and in rank order, and a replica decodes its own packet too, so every replica computes the
    same bits. Takes any codec. Predicted: delay + 8·(M−1)·nbytes / rate. (gloo asks the receiver first, which is one
    delay more unless it stood ready.)

    >>> Direct()
    Direct()
    """

    gathers: ClassVar[bool] = True
    needs_fixed_group: ClassVar[str] = ""

    def depart(self, round_: Round, state: State) -> _Departure:
        messages, stage = cut(round_.codec, 0, round_.numel), Stage(round_, round_.codec)
        stage.expect(dict.fromkeys(round_.peers, messages))
        own = [
            stage.send(index, message, round_.peers, round_.signal, round_.key)
            for index, message in enumerate(messages)
        ]
        return _Departure(round_, stage, messages, own)

    def arrive(self, departure: _Departure, settle: Settle) -> Arrival:
        round_, stage, own = departure.round, departure.stage, departure.own
        flags = [0] * round_.size
        room = Decoder(round_, round_.codec, departure.messages)
        for index, message in enumerate(departure.messages):
            heard = stage.receive(index)
            packets = {peer: stage.packet(index, peer) for peer in heard} | {round_.rank: own[index].wait()}
            for rank, said in {**heard, round_.rank: own[index].flags}.items():
                flags[rank] |= said
            if not any(f & REFUSED for f in flags):
                for coded in message.ranges:
                    mean = room.mean(coded, packets, round_.key)
                    settle(coded.begin, mean, partial(room.sent, coded, own[index].packet, round_.key))
        room.close()
        round_.close()
        return Arrival(tuple(flags), {})

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return (size - 1) * packets_nbytes(cut(codec, 0, numel))

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return link.seconds(self.nbytes_sent(codec, numel, size)) if size > 1 else 0.0
