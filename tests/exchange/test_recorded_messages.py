"""Every message of an exchange stays, byte by byte and with its tag: replicas of one version must agree on them. So do the estimates.

The values are multiples of 1/32, so that sums and products are exact on every processor. To change messages on purpose, record the
digests again: python tests/exchange/test_recorded_messages.py
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest
import torch

import thinwire as tw
from thinwire.codecs import E3M0, Cast, Hadamard, Identity, Int, RandomK, Sign, TopK
from thinwire.comm.group import WrappedGroup
from thinwire.exchange import AllReduce, Arriving, Direct, Hierarchy, Round, SendContext, TwoShot, chunks
from thinwire.lab.codecs.lowrank import LowRank
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import AdaptThenCombine, NoLoCo, PushSum
from thinwire.lab.robust.attacked import with_liars
from thinwire.lab.robust.attacks import IPM, Sybils
from thinwire.lab.robust.by_products import Krum
from thinwire.lab.robust.coordinates import Median
from thinwire.lab.star.exchange import Star
from thinwire.lab.topology import Exponential, Listed, MoshpitGrid, OnePeerExponential, Ring
from thinwire.packet import HEADER_NBYTES, STOP
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key

UNLIKE = ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 3), (3, 0), (3, 1))  # each sends to two, and hears one to three
DRAWN = Int(4, 4, "fp32", "stochastic")
NUMEL = 97  # shards have different numbers of messages


@dataclass(frozen=True)
class Case:
    exchange: tw.exchange.Exchange
    codec: tw.codecs.Codec
    size: int
    digest: str
    aggregate: Aggregate = Mean()
    exact: bool = True  # whether every processor computes the same bits; if not, headers alone are recorded


CASES = [
    Case(Direct(), E3M0(4), 3, "38a0f0c679204dfd"),
    Case(Direct(), Identity(), 3, "963bd6c50f0fb518", Median()),
    Case(Direct(), Identity(), 3, "1855a8ff699d9410", Krum(0)),
    Case(Star(1, Feedback()), DRAWN, 3, "7038bfb6ded5c5fd"),
    Case(Star(), TopK(0.3), 2, "cb032a2486467bbe"),
    Case(TwoShot(), DRAWN, 4, "15ca25a7b4522d54"),
    Case(TwoShot(Feedback()), Sign(), 3, "702961e907b0606d"),
    Case(TwoShot(), Identity(), 3, "542a7e0792aaa972", Median()),
    Case(TwoShot(), Identity(), 3, "c78b25f1d02173b4", Krum(0)),
    Case(AllReduce(), Cast(), 3, "3d747816ccee3bca"),
    Case(AllReduce(), RandomK(0.25, Identity()), 3, "bd0557be9a86b78e"),
    Case(AllReduce(), LowRank(1, shapes=((7, 10), (27,))), 3, "144dfbfb800ecc33", exact=False),
    Case(Hierarchy((2, 1)), DRAWN, 3, "6450e488ae7b2d42"),
    Case(Hierarchy((2, 2)), Identity(), 4, "bb9629440ea4713f"),
    Case(Hierarchy((2, 2)), Hadamard(Identity(), 4), 4, "33e1adac6f5aa5cd"),
    Case(Hierarchy(((3, 0), (2, 4, 1)), Feedback()), E3M0(4), 5, "7305680fd245a565"),
    Case(Hierarchy((1, 2, 2)), TopK(0.3), 5, "61efdb297952e4d9"),
    Case(Gossip(Ring(), NoLoCo()), DRAWN, 4, "7b9f86dd148ea2ad"),
    Case(Gossip(MoshpitGrid(4), NoLoCo()), DRAWN, 4, "347a8d49999763e7"),
    Case(Gossip(MoshpitGrid(3), AdaptThenCombine()), Identity(), 3, "2d82f7f9013b32ad"),
    Case(Gossip(MoshpitGrid(2), AdaptThenCombine()), Identity(), 4, "2069c9c9021bf9ba"),
    Case(Gossip(Listed(((0, 1), (0, 2), (0, 3))), AdaptThenCombine()), Identity(), 4, "a5eecc199d2978e5"),
    Case(Gossip(Listed(UNLIKE, one_way=True), PushSum()), Identity(), 4, "d893560764540fe3"),
    Case(Gossip(Exponential(), MGS(PushSum(), 2)), E3M0(4), 4, "d15591507b909bdc"),
    Case(Gossip(OnePeerExponential(), MGS(PushSum(), 2)), Identity(), 5, "d71a9a93586b30ec"),
    Case(with_liars(Direct(), Sybils(IPM()), 2), Identity(), 4, "82e14b1e79d3df49", exact=False),
]


class Noted(WrappedGroup):
    """Notes each message that is sent."""

    def __init__(self, group: tw.Group) -> None:
        super().__init__(group)
        self.sent: list[tuple[int, int, int, str, bytes]] = []

    def post(self, tag, send, recv, purpose="packet", sized=None):
        self.sent += [(self.rank, tag, peer, purpose, packet.numpy().tobytes()) for peer, packet in send.items()]
        return self.group.post(tag, send, recv, purpose, sized)


def values(rank: int, number: int) -> torch.Tensor:
    """A vector for each of the round's numbers; in the last, replica 1 has a value that is not finite."""
    drawn = (torch.arange(2 * NUMEL) * 2654435761 + 40503 * (rank + 5 * number)) % 2**16 // 2**10
    drawn = (drawn - 32) / 32
    if (rank, number) == (1, 5):
        drawn[NUMEL // 2] = torch.nan
    return drawn


def run(case: Case) -> str:
    """Returns the digest of three rounds: plain, with a replica that wants to stop, and refused (which ends a gossip run)."""

    def replica(group: tw.Group) -> list[object]:
        noted, rank = Noted(group), group.rank
        context, state = SendContext(noted), case.exchange.init(case.codec, NUMEL, rank, case.size)
        ends: list[object] = []
        for number in (3, 4) if isinstance(case.exchange, Gossip) else (3, 4, 5):
            x, said = values(rank, number), torch.zeros(2, 2 * NUMEL)
            flags = STOP if (rank, number) == (1, 4) else 0
            key = Key(9, 2, number, rank)
            round_ = Round(context, case.codec, NUMEL, key, lambda b, e, x=x: x[b:e], flags, step=7)
            round_.aggregate = case.aggregate
            arriving = Arriving(case.exchange.arrive(case.exchange.depart(round_, state)))
            for begin, mean, own in arriving:
                said[0, begin : begin + len(mean)] = mean
                said[1, begin : begin + len(own)] = own
            round_.close()
            arrival = arriving.arrival
            assert round_.nbytes_sent == case.exchange.nbytes_sent(case.codec, NUMEL, case.size, rank)
            ends.append((arrival.flags, arrival.void, round_.nbytes_sent))
            if number != 5:
                state = arrival.state
                ends += [said.numpy().tobytes(), *(kept.numpy().tobytes() for _, kept in sorted(state.items()))]
        context.close(wait=True)
        products = sum(len(packet) for *_, purpose, packet in noted.sent if purpose == "products")
        assert products == 3 * case.exchange.nbytes_products(case.size) * case.aggregate.needs_products
        if case.exact:
            return [sorted(noted.sent), ends]
        return sorted((*place, packet[: HEADER_NBYTES - 4]) for *place, packet in noted.sent)  # without the checksum

    seen = tw.run_threads(case.size, replica, timeout=600.0)
    return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()


def test_sizes_of_messages_and_ranges_stay():
    assert (chunks.MESSAGE_NBYTES, chunks.PIECE_NUMEL) == (1 << 19, 1 << 17)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.exchange}-{case.codec}-{case.aggregate}")
def test_messages_and_estimates_stay(case, small):
    assert run(case) == case.digest


if __name__ == "__main__":
    chunks.MESSAGE_NBYTES, chunks.PIECE_NUMEL = 64, 8  # as `small`
    for case in CASES:
        print(case.exchange, case.codec, case.aggregate, run(case))
