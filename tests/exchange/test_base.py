"""The declarations of exchanges, by hand. Strategies use them to refuse combinations and to lay out tensors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire.comm import Link
from thinwire.exchange import Arrival, Exchange


class Least(Exchange):
    """An exchange that defines only what it must."""

    def __repr__(self):
        return "Least()"

    def depart(self, round_, state):
        raise NotImplementedError

    def arrive(self, departure, settle):
        raise NotImplementedError

    def nbytes_sent(self, codec, numel, size, rank=None):
        return 0

    def seconds(self, codec, numel, size, link):
        return 0.0


BOTH = tw.exchange.Direct(), tw.exchange.TwoShot()
GOSSIP = tw.exchange.Gossip(tw.topology.Ring(), tw.pieces.gossip.AdaptThenCombine())
DECLARED = [  # gathers, agrees, multiplies, sends_own, and whether replicas may come and go
    (Least(), (False, True, False, True, False)),
    (tw.exchange.Direct(), (True, True, True, True, True)),
    (tw.exchange.TwoShot(), (True, True, True, True, True)),
    (tw.exchange.TwoShot(tw.pieces.feedback.Feedback()), (True, True, True, True, False)),
    (tw.exchange.AllReduce(), (False, True, False, True, True)),
    (tw.exchange.Hierarchy((2, 1)), (False, True, False, False, False)),
    (tw.exchange.Star(), (False, True, False, True, True)),
    (tw.exchange.Star("hub"), (False, True, False, True, False)),
    (GOSSIP, (False, False, False, True, False)),
    (tw.exchange.Fastest("1mbit"), (False, True, False, True, False)),
    (tw.exchange.Fastest("1mbit", BOTH), (True, True, True, True, False)),
    (
        tw.exchange.Fastest("1mbit", (tw.exchange.Direct(), tw.exchange.Hierarchy((2, 1)))),
        (False, True, False, False, False),
    ),
    (tw.exchange.Fastest("1mbit", (tw.exchange.Direct(), GOSSIP)), (False, False, False, True, False)),
]


@pytest.mark.parametrize(("exchange", "declared"), DECLARED, ids=str)
def test_an_exchange_declares_its_properties(exchange, declared):
    open_ = exchange.needs_fixed_group == ""
    assert (exchange.gathers, exchange.agrees, exchange.multiplies, exchange.sends_own, open_) == declared


def test_undeclared_properties_have_defaults():
    least, codec = Least(), tw.codecs.Identity()
    assert (least.owns(codec, 10, 1, 2), least.nbytes_products(3), least.feedback) == (10, 0, None)
    assert not least.needs_hub and not Arrival((), {}).void
    assert (least.init(codec, 10, 0, 2), least.why([(codec, 10)], 2)) == ({}, [])


def test_a_choice_declares_the_feedback_of_its_owners():
    """So a policy that would cut its shards differently is refused, as with `TwoShot` alone."""
    feedback = tw.pieces.feedback.Feedback()
    fastest = tw.exchange.Fastest("1mbit", (tw.exchange.Direct(), tw.exchange.TwoShot(feedback)))
    assert fastest.feedback == feedback and tw.exchange.Fastest("1mbit").feedback is None
    policy = tw.pieces.policy.DenseUntil(4)
    with pytest.raises(tw.ConfigurationError, match="all codecs need the same grain"):
        tw.Strategy(codec=tw.codecs.E3M0(), policy=policy, exchange=fastest)


def test_a_choice_is_refused_where_one_of_its_exchanges_is():
    """By the number of replicas, by the other pieces, and by the strategy's own feedback."""
    direct, feedback = tw.exchange.Direct(), tw.pieces.feedback.Feedback()
    with pytest.raises(tw.ConfigurationError, match=r"a center in 0\.\.2 is needed"):
        tw.exchange.Fastest("1mbit", (direct, tw.exchange.Star(3))).check_size(3)
    with pytest.raises(tw.ConfigurationError, match="a hub takes the mean of packets in one codec"):
        policy = tw.pieces.policy.DenseUntil(4)
        tw.Strategy(policy=policy, exchange=tw.exchange.Fastest("1mbit", (direct, tw.exchange.Star("hub"))))
    with pytest.raises(tw.ConfigurationError, match="so nothing is held back"):
        tw.Strategy(feedback=feedback, exchange=tw.exchange.Fastest("1mbit", (direct, tw.exchange.Hierarchy((1, 1)))))


def test_predicted_seconds_are_bytes_over_rate_plus_delays():
    link, codec, numel = Link(8e6, 0.5), tw.codecs.Cast(), 500_000  # 1 MB in a packet, 1 s
    for size, exchange, seconds in [
        (4, tw.exchange.Direct(), 3 * 1.0 + 0.5),
        (4, tw.exchange.TwoShot(), 1.5 * 1.0 + 1.0),
        (4, tw.exchange.AllReduce(), 1.5 * 1.0 + 1.0),
        (4, tw.exchange.Star(), (1.0 + 3.0) + 1.0),
        (4, tw.exchange.Star("hub"), (1.0 + 4.0) + 1.0),
        (4, tw.exchange.Hierarchy((2, 2)), 0.5 * 1.0 + 0.5),
        (4, GOSSIP, 2 * 1.0 + 0.5),
        (2, tw.exchange.Direct(), 1.0 + 0.5),
        (2, tw.exchange.TwoShot(), 1.0 + 1.0),
        (2, tw.exchange.AllReduce(), 1.0 + 1.0),
        (2, tw.exchange.Star(), 2.0 + 1.0),
        (2, tw.exchange.Hierarchy((1, 1)), 1.0 + 0.5),
        (2, GOSSIP, 1.0 + 0.5),
        *(
            (1, one, 0.0)
            for one in (*BOTH, tw.exchange.AllReduce(), tw.exchange.Hierarchy((1,)), tw.exchange.Star(), GOSSIP)
        ),
        (3, tw.exchange.Hierarchy((3,)), 0.0),
    ]:
        assert exchange.seconds(codec, numel, size, link) == pytest.approx(seconds, rel=1e-3), (size, exchange)
    low, reduced = tw.codecs.LowRank(1, shapes=((1000, 500),)), tw.exchange.AllReduce()  # two sums, four delays
    assert reduced.seconds(low, numel, 2, link) == reduced.nbytes_sent(low, numel, 2) * 8 / 8e6 + 4 * 0.5


class Remembering(Least):
    """An exchange with a state. It departs with what it was given, and keeps no next state."""

    def init(self, codec, numel, rank, size):
        return {"last": torch.zeros(numel)}

    def depart(self, round_, state):
        return state

    def arrive(self, departure, settle):
        return Arrival((), {})


def test_a_choice_gives_its_exchange_no_state_of_another():
    """A state that the exchange of this round does not know stays, for the rounds with another codec."""
    fastest = tw.exchange.Fastest("1mbit", (Remembering(),))
    round_ = SimpleNamespace(codec=tw.codecs.Identity(), numel=2, rank=0, size=2)
    for state, given in (({"last": torch.ones(2)}, True), ({"other": torch.ones(2)}, False)):
        departure = fastest.depart(round_, state)
        assert departure.departure == (state if given else {})
        assert fastest.arrive(departure, None).state is state


@pytest.mark.parametrize("among", [(), (tw.exchange.Direct,), (tw.exchange.Direct(), "TwoShot()")], ids=str)
def test_a_choice_without_exchanges_is_refused(among):
    with pytest.raises(tw.ConfigurationError, match=r"exchanges are needed, such as \(Direct\(\), TwoShot\(\)\)"):
        tw.exchange.Fastest("20mbit,40ms", among)
