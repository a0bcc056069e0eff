"""The exchange in which every replica sends its packet to every other."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.base import whole_anywhere
from thinwire.exchange.base import Arrival, Exchange, ExchangeTraits, Range, Ranges
from thinwire.exchange.buffers import CPU
from thinwire.exchange.chunks import Message, cut, packets_nbytes
from thinwire.exchange.decode import Decoder
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import Stage
from thinwire.pieces.aggregate import Mean
from thinwire.types import State

if TYPE_CHECKING:
    from thinwire.comm.uplink import Link


@dataclass(frozen=True)
class _Departure:
    round: Round
    stage: Stage
    messages: tuple[Message, ...]
    own: list[Outgoing]


@dataclass(frozen=True)
class Direct(Exchange):
    """Each replica sends its packet to all others: (M−1)·nbytes each, without a second rounding. Best for few replicas.

        x̂ = Σ_m w_m·decode(packet_m)      w_m = 1/M for equal weights; summed in fp32, in rank order

    A replica decodes its own packet too, so every replica computes the same bits. It takes any codec.

    *Source*: Streaming DiLoCo (arXiv 2501.18512, §2.3), which rounds each replica's delta and adds in fp32. *Differs*: the paper
    names no collective; here each packet goes to all.

    *Wire*: (M−1)·nbytes from each replica. Predicted: delay + 8·(M−1)·nbytes / rate. (gloo waits for the receiver's post,
    which adds one delay unless the receive was posted before.)

    >>> Direct()
    Direct()
    """

    traits: ClassVar[ExchangeTraits] = ExchangeTraits(gathers=True, multiplies=True)
    needs_fixed_group: ClassVar[str] = ""

    def depart(self, round_: Round, state: State) -> _Departure:
        messages, stage = cut(round_.codec, 0, round_.numel), Stage(round_, round_.codec)
        stage.expect(dict.fromkeys(round_.peers, messages))
        own = [
            stage.send(index, message, round_.peers, round_.signal, round_.key)
            for index, message in enumerate(messages)
        ]
        return _Departure(round_, stage, messages, own)

    def arrive(self, departure: _Departure) -> Ranges:
        round_, stage, own = departure.round, departure.stage, departure.own
        flags = [0] * round_.size
        there = whole_anywhere(round_.codec) and isinstance(round_.aggregate, Mean)
        room = Decoder(round_, round_.codec, round_.device if there else CPU)
        for index, message in enumerate(departure.messages):
            heard = stage.receive(index)
            own[index].wait()
            said = [heard.get(rank, own[index].flags) for rank in range(round_.size)]
            flags = [a | b for a, b in zip(flags, said)]
            if room.needs_products:
                for coded in message.ranges:
                    room.measure(coded, 0, self._packets(departure, index), round_.key, said)
            elif not room.void(flags):
                yield from self._ranges(departure, index, room, said)
        if room.needs_products and not room.void(flags):
            room.choose(room.products)
            for index in range(len(departure.messages)):
                yield from self._ranges(departure, index, room, flags)
        room.close()
        return Arrival(tuple(flags), {})

    def _packets(self, departure: _Departure, index: int) -> dict[int, Tensor]:
        round_ = departure.round
        return {peer: departure.stage.packet(index, peer) for peer in round_.peers} | {
            round_.rank: departure.own[index].packet
        }

    def _ranges(self, departure: _Departure, index: int, room: Decoder, flags: list[int]) -> Iterator[Range]:
        packets, key = self._packets(departure, index), departure.round.key
        for coded in departure.messages[index].ranges:
            yield from room.pieces(coded, packets, key, departure.own[index], flags)

    def largest(self, departure: _Departure) -> dict[int, float]:
        """See `Exchange.largest`."""
        round_ = departure.round
        room = Decoder(round_, round_.codec)
        found = dict.fromkeys(range(round_.size), 0.0)
        for index, message in enumerate(departure.messages):
            for rank, packet in self._packets(departure, index).items():
                for coded in message.ranges:
                    values = room.sent(coded, packet, replace(round_.key, sender=rank))
                    most = float(values.abs().max()) if values.numel() else 0.0
                    found[rank] = max(found[rank], most if math.isfinite(most) else math.inf)
        return found

    def checksums(self, departure: _Departure) -> dict[int, str]:
        """See `Exchange.checksums`."""
        sums: dict[int, int] = {}
        for index in range(len(departure.messages)):
            for rank, packet in self._packets(departure, index).items():
                sums[rank] = zlib.crc32(packet.numpy().data, sums.get(rank, 0))
        return {rank: f"{value:08x}" for rank, value in sums.items()}

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return (size - 1) * packets_nbytes(cut(codec, 0, numel))

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return link.seconds(self.nbytes_sent(codec, numel, size)) if size > 1 else 0.0
