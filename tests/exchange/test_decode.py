"""What a decoder makes of the packets of three replicas, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import cut
from thinwire.exchange.decode import Decoder
from thinwire.packet import REFUSED, empty_packet, payload
from thinwire.pieces.aggregate import Aggregate
from thinwire.pieces.by_products import GeometricMedian
from thinwire.pieces.products import inner_products
from thinwire.pieces.robust import Median, TrimmedMean
from thinwire.rng import Key
from thinwire.testing.toy import same_bits

NUMEL = 5
VALUES = [torch.arange(1.0, 6.0), torch.arange(5.0, 0.0, -1.0), torch.tensor([9.0, -9.0, 2.0, 2.0, 0.5])]


def decoder(group: tw.ThreadGroup, aggregate: Aggregate) -> Decoder:
    round_ = Round(SendContext(group), Identity(), NUMEL, Key(), lambda begin, end: torch.zeros(end - begin))
    round_.aggregate = aggregate
    return Decoder(round_, Identity(), cut(Identity(), 0, NUMEL))


def packet(values: Tensor) -> Tensor:
    made = empty_packet(4 * len(values))
    payload(made).copy_(values.view(torch.uint8))
    return made


def test_refused_packets_are_those_that_are_flagged():
    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, Median()), cut(Identity(), 0, NUMEL)
        (coded,), packets = message.ranges, {rank: packet(values) for rank, values in enumerate(VALUES)}
        said = [room.mean(coded, packets, Key(), flags=flags).clone() for flags in ((), (0, 0, 0), (0, REFUSED, 0))]
        assert same_bits(said[0], torch.stack(VALUES).median(0).values) and same_bits(said[1], said[0])
        assert not same_bits(said[2], said[0])
        room.close()

    tw.run_threads(3, replica)


def test_what_an_owner_has_aggregated_is_not_aggregated_again():
    """A rule that leaves out a replica at each end has nothing to say of one packet."""

    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, TrimmedMean(1)), cut(Identity(), 0, NUMEL)
        assert same_bits(room.owners(message.ranges[0], 1, packet(VALUES[1]), Key()), VALUES[1])
        room.close()

    tw.run_threads(3, replica)


def test_products_are_of_all_ranges():
    def replica(group: tw.ThreadGroup) -> None:
        room, (message,) = decoder(group, GeometricMedian()), cut(Identity(), 0, NUMEL)
        packets = {rank: packet(values) for rank, values in enumerate(VALUES)}
        for _ in range(2):
            room.measure(message.ranges[0], 0, packets, Key(), (0, 0, 0))
        torch.testing.assert_close(room.products, 2 * inner_products(torch.stack(VALUES)))
        room.close()

    tw.run_threads(3, replica)
