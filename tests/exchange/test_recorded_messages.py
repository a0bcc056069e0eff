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
from thinwire.exchange import AllReduce, Direct, Hierarchy, Round, SendContext, TwoShot, chunks
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
    Case(Direct(), E3M0(4), 3, "6ea3c52920188039"),
    Case(Direct(), Identity(), 3, "f7360eab3e581179", Median()),
    Case(Direct(), Identity(), 3, "1b6076431fdd4b60", Krum(0)),
    Case(Star(1, Feedback()), DRAWN, 3, "f2cb3d979beb6aeb"),
    Case(Star(), TopK(0.3), 2, "efadc81e27000ae7"),
    Case(TwoShot(), DRAWN, 4, "f6efba9ccf439f26"),
    Case(TwoShot(Feedback()), Sign(), 3, "12eadd27f7e797f1"),
    Case(TwoShot(), Identity(), 3, "1d3e6994a0f3d5fa", Median()),
    Case(TwoShot(), Identity(), 3, "ee831c33cac3f85a", Krum(0)),
    Case(AllReduce(), Cast(), 3, "0d202e91558ccd60"),
    Case(AllReduce(), RandomK(0.25, Identity()), 3, "4b53d7058ab7802d"),
    Case(AllReduce(), LowRank(1, shapes=((7, 10), (27,))), 3, "e089dd6e766e810a", exact=False),
    Case(Hierarchy((2, 1)), DRAWN, 3, "3a39f62b74a82839"),
    Case(Hierarchy((2, 2)), Identity(), 4, "4bcc5ccbad6711e1"),
    Case(Hierarchy((2, 2)), Hadamard(Identity(), 4), 4, "6b39ba9805c3d11d"),
    Case(Hierarchy(((3, 0), (2, 4, 1)), Feedback()), E3M0(4), 5, "72104f887a165e6b"),
    Case(Hierarchy((1, 2, 2)), TopK(0.3), 5, "14a3ae22658bf51f"),
    Case(Gossip(Ring(), NoLoCo()), DRAWN, 4, "8fce45f41993ddcf"),
    Case(Gossip(MoshpitGrid(4), NoLoCo()), DRAWN, 4, "ee3f440e2a05ef79"),
    Case(Gossip(MoshpitGrid(3), AdaptThenCombine()), Identity(), 3, "0256e7b65994f8bb"),
    Case(Gossip(MoshpitGrid(2), AdaptThenCombine()), Identity(), 4, "2cdd73aff30d9d0e"),
    Case(Gossip(Listed(((0, 1), (0, 2), (0, 3))), AdaptThenCombine()), Identity(), 4, "e9557ec51357ccc6"),
    Case(Gossip(Listed(UNLIKE, one_way=True), PushSum()), Identity(), 4, "89ed3543bd9f3f3c"),
    Case(Gossip(Exponential(), MGS(PushSum(), 2)), E3M0(4), 4, "9acf22be9522295b"),
    Case(Gossip(OnePeerExponential(), MGS(PushSum(), 2)), Identity(), 5, "7bb2f4a634e88e97"),
    Case(with_liars(Direct(), Sybils(IPM()), 2), Identity(), 4, "fdf10f8c58eb3fe0", exact=False),
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

            def settle(begin, mean, sent, said=said):
                own = sent()
                said[0, begin : begin + len(mean)] = mean
                said[1, begin : begin + len(own)] = own

            flags = STOP if (rank, number) == (1, 4) else 0
            key = Key(9, 2, number, rank)
            round_ = Round(context, case.codec, NUMEL, key, lambda b, e, x=x: x[b:e], flags, step=7)
            round_.aggregate = case.aggregate
            arrival = case.exchange.arrive(case.exchange.depart(round_, state), settle)
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
    for case in CASES:
        print(case.exchange, case.codec, case.aggregate, run(case))
