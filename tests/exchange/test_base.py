"""The declarations of exchanges, by hand. Strategies use them to refuse combinations and to lay out tensors."""

from __future__ import annotations

import pytest

import thinwire as tw
from thinwire.exchange import Exchange


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
    assert (least.init(codec, 10, 0, 2), least.why([(codec, 10)], 2)) == ({}, [])


def test_a_choice_declares_the_feedback_of_its_owners():
    """So a policy that would cut its shards differently is refused, as with `TwoShot` alone."""
    feedback = tw.pieces.feedback.Feedback()
    fastest = tw.exchange.Fastest("1mbit", (tw.exchange.Direct(), tw.exchange.TwoShot(feedback)))
    assert fastest.feedback == feedback and tw.exchange.Fastest("1mbit").feedback is None
    policy = tw.pieces.policy.DenseUntil(4)
    with pytest.raises(tw.ConfigurationError, match="all codecs need the same grain"):
        tw.Strategy(codec=tw.codecs.E3M0(), policy=policy, exchange=fastest)


@pytest.mark.parametrize("among", [(), (tw.exchange.Direct,), (tw.exchange.Direct(), "TwoShot()")], ids=str)
def test_a_choice_without_exchanges_is_refused(among):
    with pytest.raises(tw.ConfigurationError, match=r"exchanges are needed, such as \(Direct\(\), TwoShot\(\)\)"):
        tw.exchange.Fastest("20mbit,40ms", among)
