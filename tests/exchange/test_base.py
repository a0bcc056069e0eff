"""The declarations of exchanges, by hand. Strategies use them to refuse combinations and to lay out tensors."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.comm import Link
from thinwire.exchange import Arrival, Exchange
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.mgs import MGS
from thinwire.lab.gossip.rules import AdaptThenCombine
from thinwire.lab.topology import MoshpitGrid, Ring


class Least(Exchange):
    """An exchange that defines only what it must."""

    def __repr__(self):
        return "Least()"

    def depart(self, round_, state):
        raise NotImplementedError

    def arrive(self, departure):
        raise NotImplementedError

    def nbytes_sent(self, codec, numel, size, rank=None):
        return 0

    def seconds(self, codec, numel, size, link):
        return 0.0


BOTH = tw.exchange.Direct(), tw.exchange.TwoShot()
GOSSIP = Gossip(Ring(), AdaptThenCombine())
DECLARED = [  # gathers, agrees, multiplies, sends_own, and whether replicas may come and go
    (Least(), (False, True, False, True, False)),
    (tw.exchange.Direct(), (True, True, True, True, True)),
    (tw.exchange.TwoShot(), (True, True, True, True, True)),
    (tw.exchange.TwoShot(tw.pieces.feedback.Feedback()), (True, True, True, True, False)),
    (tw.exchange.AllReduce(), (False, True, False, True, True)),
    (tw.exchange.Hierarchy((2, 1)), (False, True, False, False, False)),
    (tw.lab.star.exchange.Star(), (False, True, False, True, True)),
    (tw.lab.star.exchange.Star("hub"), (False, True, False, True, False)),
    (GOSSIP, (False, False, False, True, False)),
    (tw.lab.fastest.Fastest("1mbit"), (False, True, False, True, False)),
    (tw.lab.fastest.Fastest("1mbit", BOTH), (True, True, True, True, False)),
    (
        tw.lab.fastest.Fastest("1mbit", (tw.exchange.Direct(), tw.exchange.Hierarchy((2, 1)))),
        (False, True, False, False, False),
    ),
    (tw.lab.fastest.Fastest("1mbit", (tw.exchange.Direct(), GOSSIP)), (False, False, False, True, False)),
]


@pytest.mark.parametrize(("exchange", "declared"), DECLARED, ids=str)
def test_an_exchange_declares_its_properties(exchange, declared):
    open_ = exchange.needs_fixed_group == ""
    assert (
        exchange.traits.gathers,
        exchange.traits.agrees,
        exchange.traits.multiplies,
        exchange.traits.sends_own,
        open_,
    ) == declared


SKIPS = [tw.lab.codecs.Levelled((tw.codecs.Int(8), tw.codecs.Sign(block=512)), skips=skips) for skips in (0, 1)]


@pytest.mark.parametrize("exchange", [tw.exchange.TwoShot, tw.lab.star.exchange.Star])
def test_owners_refuse_codecs_that_cannot_encode_a_mean(exchange):
    for codec, said in (
        (tw.lab.codecs.LowRank(1), r"choose AllReduce\(\) for LowRank, otherwise Direct\(\)"),
        (tw.codecs.RandomK(0.5, tw.codecs.Identity()), r"would sample twice; choose AllReduce\(\) or Direct\(\)"),
        (SKIPS[1], r"a mean that its owner skips would be lost; .* TwoShot\(Feedback\(\)\)"),
    ):
        with pytest.raises(tw.ConfigurationError, match=said):
            exchange().check(codec, None)
    exchange(feedback=tw.pieces.feedback.Feedback()).check(SKIPS[1], None)
    for codec in (SKIPS[0], tw.codecs.E3M0(), tw.codecs.TopK(0.1)):
        exchange().check(codec, None)
    for feedback, said in (
        (0, r"feedback=0\): Feedback\(\.\.\.\) or None"),
        (tw.pieces.feedback.Feedback(1), "kappa=0 is needed"),
    ):
        with pytest.raises(tw.ConfigurationError, match=rf"{exchange.__name__}\(.*{said}"):
            exchange(feedback=feedback)


def test_all_reduce_refuses_codecs_whose_codes_cannot_be_added():
    for codec in (tw.codecs.Cast(), tw.codecs.Identity(), tw.codecs.RandomK(0.5), tw.lab.codecs.LowRank(1)):
        tw.exchange.AllReduce().check(codec, None)
    with pytest.raises(tw.ConfigurationError, match="a codec whose codes can be added is needed"):
        tw.exchange.AllReduce().check(tw.codecs.E3M0(), None)


@pytest.mark.parametrize("sites", [(), (0, 2), ((0, 1), (1, 2)), ((0, 2),), ("ab",), (1,) * 31, 3], ids=str)
def test_sites_without_each_rank_once_are_refused(sites):
    with pytest.raises(tw.ConfigurationError, match=r"each rank once, such as .* are needed; at most 30 sites"):
        tw.exchange.Hierarchy(sites)


def test_sites_have_their_ranks_and_bytes():
    assert tw.exchange.Hierarchy((1,) * 30).ranks == tuple((rank,) for rank in range(30))
    assert tw.exchange.Hierarchy((3,)).ranks == ((0, 1, 2),)
    two = tw.exchange.Hierarchy((2, 3))  # two shards of fp32: each owner passes on two packets to each mate
    shard, mean = 48 + 4 * 5, 48 + 4 * 5 + 5
    inside = [two.nbytes_inside(tw.codecs.Identity(), 10, 5, rank) for rank in range(5)]
    assert inside == [shard + 2 * mean] * 2 + [shard + 4 * mean] * 2 + [2 * shard]
    assert two.init(tw.codecs.Identity(), 10, 4, 5) == {}
    two.check(tw.codecs.RandomK(0.5), None)
    with pytest.raises(tw.ConfigurationError, match="a contractive codec is needed"):
        tw.exchange.Hierarchy((2, 3), tw.pieces.feedback.Feedback()).check(tw.codecs.RandomK(0.5), None)


def test_undeclared_properties_have_defaults():
    least, codec = Least(), tw.codecs.Identity()
    assert (least.owns(codec, 10, 1, 2), least.nbytes_products(3), least.feedback) == (10, 0, None)
    assert not least.traits.needs_hub and not Arrival((), {}).void
    assert least.needs_fixed_group == "does not declare that replicas may come and go (needs_fixed_group = '')"
    assert (least.init(codec, 10, 0, 2), least.why([(codec, 10)], 2)) == ({}, [])


def test_predicted_seconds_are_bytes_over_rate_plus_delays():
    link, codec, numel = Link(8e6, 0.5), tw.codecs.Cast(), 500_000  # 1 MB in a packet, 1 s
    for size, exchange, seconds in [
        (4, tw.exchange.Direct(), 3 * 1.0 + 0.5),
        (4, tw.exchange.TwoShot(), 1.5 * 1.0 + 1.0),
        (4, tw.exchange.AllReduce(), 1.5 * 1.0 + 1.0),
        (4, tw.lab.star.exchange.Star(), (1.0 + 3.0) + 1.0),
        (4, tw.lab.star.exchange.Star("hub"), (1.0 + 4.0) + 1.0),
        (4, tw.exchange.Hierarchy((2, 2)), 0.5 * 1.0 + 0.5),
        (4, GOSSIP, 2 * 1.0 + 0.5),
        (4, Gossip(Ring(), MGS(AdaptThenCombine(), 3)), 3 * (2 * 1.0 + 0.5)),  # its gossip steps follow each other
        (8, Gossip(MoshpitGrid(8), AdaptThenCombine()), 2 * 7 / 8 * 1.0 + 1.0),  # as TwoShot
        (4, Gossip(MoshpitGrid(2), AdaptThenCombine()), 1.0 + 0.5),
        (2, tw.exchange.Direct(), 1.0 + 0.5),
        (2, tw.exchange.TwoShot(), 1.0 + 1.0),
        (2, tw.exchange.AllReduce(), 1.0 + 1.0),
        (2, tw.lab.star.exchange.Star(), 2.0 + 1.0),
        (2, tw.exchange.Hierarchy((1, 1)), 1.0 + 0.5),
        (2, GOSSIP, 1.0 + 0.5),
        *(
            (1, one, 0.0)
            for one in (
                *BOTH,
                tw.exchange.AllReduce(),
                tw.exchange.Hierarchy((1,)),
                tw.lab.star.exchange.Star(),
                GOSSIP,
            )
        ),
        (3, tw.exchange.Hierarchy((3,)), 0.0),
    ]:
        assert exchange.seconds(codec, numel, size, link) == pytest.approx(seconds, rel=1e-3), (size, exchange)
    low, reduced = tw.lab.codecs.LowRank(1, shapes=((1000, 500),)), tw.exchange.AllReduce()  # two sums, four delays
    assert reduced.seconds(low, numel, 2, link) == reduced.nbytes_sent(low, numel, 2) * 8 / 8e6 + 4 * 0.5
