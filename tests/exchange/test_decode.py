"""Decoding the packets of three replicas, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs import Codec, Identity, TopK
from thinwire.codecs.base import Said
from thinwire.exchange import Round, SendContext, decode
from thinwire.exchange.chunks import cut
from thinwire.exchange.decode import Decoder
from thinwire.exchange.products import inner_products
from thinwire.exchange.send_queue import Outgoing
from thinwire.lab.robust.by_products import GeometricMedian
from thinwire.lab.robust.coordinates import Median, TrimmedMean
from thinwire.packet import REFUSED, empty_packet, payload
from thinwire.pieces.aggregate import Aggregate, Mean, MeanOverSenders
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.types import State

NUMEL = 5
VALUES = [torch.arange(1.0, 6.0), torch.arange(5.0, 0.0, -1.0), torch.tensor([9.0, -9.0, 2.0, 2.0, 0.5])]


def decoder(group: tw.ThreadGroup, aggregate: Aggregate, codec: Codec = Identity(), begin: int = 0) -> Decoder:
    """Returns a decoder of the elements from `begin` on."""
    key = Key(sender=group.rank)
    round_ = Round(SendContext(group), codec, begin + NUMEL, key, lambda begin, end: torch.zeros(end - begin))
    round_.aggregate, round_.remembered = aggregate, {"kept": torch.arange(begin + NUMEL + 9.0)}
    return Decoder(round_, codec)


def packet(values: Tensor) -> Tensor:
    made = empty_packet(4 * len(values))
    payload(made).copy_(values.view(torch.uint8))
    return made


def test_only_flagged_packets_are_refused():
    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, Median()), cut(Identity(), 0, NUMEL)
        (coded,), packets = message.ranges, {rank: packet(values) for rank, values in enumerate(VALUES)}
        said = [room.mean(coded, packets, Key(), flags=flags).clone() for flags in ((), (0, 0, 0), (0, REFUSED, 0))]
        assert same_bits(said[0], torch.stack(VALUES).median(0).values) and same_bits(said[1], said[0])
        assert not same_bits(said[2], said[0])
        room.close()

    tw.run_threads(3, replica)


def test_an_owners_aggregate_is_not_aggregated_again():
    """A rule that leaves out one replica at each end cannot be applied to a single packet."""

    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, TrimmedMean(1)), cut(Identity(), 0, NUMEL)
        assert same_bits(room.owners(message.ranges[0], 1, packet(VALUES[1]), Key()), VALUES[1])
        room.close()

    tw.run_threads(3, replica)


def test_inner_products_sum_over_all_ranges():
    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, GeometricMedian()), cut(Identity(), 0, NUMEL)
        packets = {rank: packet(values) for rank, values in enumerate(VALUES)}
        for _ in range(2):
            room.measure(message.ranges[0], 0, packets, Key(), (0, 0, 0))
        torch.testing.assert_close(room.products, 2 * inner_products(torch.stack(VALUES)))
        room.close()

    tw.run_threads(3, replica)


class Noting(GeometricMedian):
    """An aggregate that records its arguments in `seen`."""

    seen: ClassVar[list[object]] = []

    def measured(self, values: Tensor, before: State, after: State) -> Tensor:
        self.seen += [before["kept"].tolist(), after["kept"].numel()]
        return values

    def given(self, products: Tensor, key: Key) -> Aggregate:
        self.seen.append(key)
        return self


def test_an_aggregate_gets_the_values_and_state_of_its_range():
    """It gets only the values and state of these elements, and the key, which is the same on all replicas."""
    Noting.seen.clear()

    def replica(group: tw.ThreadGroup) -> None:
        if group.rank == 2:
            room, (message,) = decoder(group, Noting(), begin=7), cut(Identity(), 7, 7 + NUMEL)
            packets = {rank: packet(values) for rank, values in enumerate(VALUES)}
            room.measure(message.ranges[0], 5, packets, Key(), (0, 0, 0))
            room.choose(room.products)
            assert Noting.seen == [[2.0, 3.0, 4.0, 5.0, 6.0], 5, Key(sender=0)]
            median = decoder(group, Median(), begin=7).mean(message.ranges[0], packets, Key())
            assert same_bits(median, torch.stack(VALUES).median(0).values)

    tw.run_threads(3, replica)


@dataclass(frozen=True)
class Apart(TopK):
    """Writes its values apart, and records how often."""

    decoded: ClassVar[list[float]] = []

    def sent(self, payload: Tensor, numel: int, index: Tensor, values: Tensor, key: Key, weight: float = 1.0) -> None:
        self.decoded.append(weight)
        super().sent(payload, numel, index, values, key, weight)


class AtOnce(TopK):
    """The same values, only all together."""

    def decode_add(self, payload: Tensor, out: Tensor, key: Key, weight: float = 1.0) -> None:
        TopK(self.density).decode_add(payload, out, key, weight)

    def few(self, numel: int) -> Any:
        return None


PIECE = 4096
WHOLE = 2 * PIECE + 5  # three pieces, the last one short


def settled(aggregate: Aggregate, codec: Codec, refused: int) -> list[tuple[int, Tensor, Tensor]]:
    """What replica 1 of three hands over: the first elements, the aggregates and the own values. `refused` refused, or nobody."""
    packets, made = {}, list[tuple[int, Tensor, Tensor]]()
    for rank in range(3):
        packets[rank] = empty_packet(codec.nbytes(WHOLE))
        if rank != refused:
            values = torch.randn(WHOLE, generator=torch.Generator().manual_seed(rank))
            codec.encode(values, payload(packets[rank]), Key(sender=rank))
    (message,) = cut(codec, 0, WHOLE)

    def replica(group: tw.ThreadGroup) -> None:
        if group.rank == 1:
            own, room = Outgoing(message, packets[1]), decoder(group, aggregate, codec)
            own.flags = REFUSED * (refused == 1)
            flags = [REFUSED * (rank == refused) for rank in range(3)]
            for begin, mean, sent in room.pieces(message.ranges[0], packets, Key(sender=1), own, flags):
                made.append((begin, mean.clone(), sent.clone()))
            room.close()

    tw.run_threads(3, replica)
    return made


@pytest.mark.parametrize("refused", [None, 0, 1])
@pytest.mark.parametrize("aggregate", [Mean(), Median(), MeanOverSenders()])
def test_few_values_are_decoded_once_and_aggregated_in_pieces(aggregate, refused, monkeypatch):
    monkeypatch.setattr(decode, "PIECE", PIECE)
    if refused is not None and not aggregate.tolerates(3):
        return
    Apart.decoded.clear()
    pieces = settled(aggregate, Apart(0.1), refused)
    assert [begin for begin, _, _ in pieces] == [0, PIECE, 2 * PIECE]
    assert Apart.decoded == [1.0] * (3 - (refused is not None)), "the own packet is decoded once too"
    ((begin, mean, own),) = settled(aggregate, AtOnce(0.1), refused)
    assert begin == 0 and bool(own.isnan().all()) == (refused == 1)
    assert same_bits(torch.cat([one for _, one, _ in pieces]), mean)
    assert same_bits(torch.cat([one for _, _, one in pieces]), own)


class Together(Identity):
    """Decodes all packets together. Its estimate has the weight and sender of each packet."""

    joint = True

    def decode_joint(self, packets: Sequence[Said], numel: int) -> Tensor:
        return torch.tensor([10 * key.sender + count for _, key, count in packets])


def test_a_joint_codec_gets_each_packets_weight():
    """It computes the estimate by itself, so no products are made for it."""

    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, GeometricMedian(), Together()), cut(Identity(), 0, 3)
        packets = {rank: packet(values) for rank, values in enumerate(VALUES)}
        assert room.mean(message.ranges[0], packets, Key()).tolist() == [1.0, 11.0, 21.0]
        shares = {0: 0.5, 1: 0.25, 2: 0.75}
        assert room.mean(message.ranges[0], packets, Key(), shares).tolist() == [0.5, 10.25, 20.75]
        needing = [
            decoder(group, rule, codec).needs_products
            for rule in (GeometricMedian(), Median())
            for codec in (Identity(), Together())
        ]
        assert needing == [True, False, False, False]

    tw.run_threads(3, replica)
