"""A choice among exchanges: it takes the fastest, and is refused where one of them is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire.codecs import TopK
from thinwire.comm import Link
from thinwire.exchange import Arrival, Arriving
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.policies import DenseUntil
from thinwire.testing.toy import journey, same_bits, toy, weights


def test_fastest_chooses_the_least_predicted_time():
    fastest, codec = tw.lab.fastest.Fastest("20mbit,40ms"), tw.codecs.E3M0()
    link = Link.parse("20mbit,40ms")
    for numel in (0, 100, 10_000, 10_000_000):
        for size in (1, 2, 3, 8):
            both = {one: one.seconds(codec, numel, size, link) for one in (tw.exchange.Direct(), tw.exchange.TwoShot())}
            assert fastest.seconds(codec, numel, size, link) == min(both.values())
            assert fastest.chosen(codec, numel, size) == min(both, key=both.get)
    assert fastest.chosen(tw.lab.codecs.LowRank(40, shapes=((1000, 1000),)), 10**6, 8) == tw.exchange.AllReduce()


def test_a_choice_is_reported():
    strategy = tw.streaming_diloco(fragments=2, exchange=tw.lab.fastest.Fastest("20mbit,40ms"))
    (line,) = [line for line in strategy.describe(toy(), 4).splitlines() if line.startswith("exchange: ")]
    assert line.startswith(
        "exchange: Direct() for 3 of 3 fragment(s), among 4 replicas on 20mbit,40ms: a round of the largest takes 0.04"
    )
    assert "TwoShot(feedback=None) 0.08" in line and line.endswith("(predicted)")


def test_a_choice_is_what_it_chooses():
    direct, shards, codec = tw.exchange.Direct(), tw.exchange.TwoShot(), tw.codecs.E3M0()
    fastest = tw.lab.fastest.Fastest("20mbit,40ms", (direct, shards))
    for numel, one in ((100, direct), (10_000_001, shards)):
        assert (
            fastest.chosen(codec, numel, 8)
            == tw.lab.fastest.Fastest("20mbit,40ms", (one,)).chosen(codec, numel, 8)
            == one
        )
        assert fastest.seconds(codec, numel, 8, Link(1e6, 0.1)) == one.seconds(codec, numel, 8, Link(1e6, 0.1))
        for rank in (0, 7, None):
            assert fastest.nbytes_sent(codec, numel, 8, rank) == one.nbytes_sent(codec, numel, 8, rank)
        assert [fastest.owns(codec, numel, rank, 8) for rank in (0, 7)] == [
            one.owns(codec, numel, rank, 8) for rank in (0, 7)
        ]
    assert fastest.nbytes_products(4) == shards.nbytes_products(4) == 3 * (48 + 8 * 4 * 4)
    assert (
        not fastest.traits.needs_hub
        and tw.lab.fastest.Fastest("1mbit", (direct, tw.lab.star.exchange.Star("hub"))).traits.needs_hub
    )
    with pytest.raises(tw.ConfigurationError, match=r"none of these accepts it; add Direct\(\)"):
        tw.lab.fastest.Fastest("1mbit", (tw.exchange.AllReduce(),)).check(codec, None)


def test_each_choice_is_reported_with_its_largest_fragment():
    link, codec = Link.parse("20mbit,40ms"), tw.codecs.E3M0()
    direct, shards = tw.exchange.Direct(), tw.exchange.TwoShot()
    fastest = tw.lab.fastest.Fastest("20mbit,40ms", (direct, shards))
    few, many = fastest.why([(codec, 200), (codec, 2 * 10**7), (codec, 300), (codec, 10**7), (codec, 100)], 8)
    after = " fragment(s), among 8 replicas on 20mbit,40ms: a round of the largest takes "
    times = [f"{one.seconds(codec, numel, 8, link):.3g} s" for numel in (300, 2 * 10**7) for one in (direct, shards)]
    assert few == f"Direct() for 3 of 5{after}{times[0]}; {shards} {times[1]} (predicted)"
    assert many == f"{shards} for 2 of 5{after}{times[3]}; Direct() {times[2]} (predicted)"
    (alone,) = tw.lab.fastest.Fastest("20mbit,40ms", (direct,)).why([(codec, 300)], 8)
    assert alone == f"Direct() for 1 of 1{after}{times[0]} (predicted)"


def test_a_choice_declares_the_feedback_of_its_owners():
    """So a policy that would cut its shards differently is refused, as with `TwoShot` alone."""
    feedback = tw.pieces.feedback.Feedback()
    fastest = tw.lab.fastest.Fastest("1mbit", (tw.exchange.Direct(), tw.exchange.TwoShot(feedback)))
    assert fastest.feedback == feedback and tw.lab.fastest.Fastest("1mbit").feedback is None
    policy = tw.pieces.policies.DenseUntil(4)
    with pytest.raises(tw.ConfigurationError, match="all codecs need the same grain"):
        tw.Strategy(codec=tw.codecs.E3M0(), policy=policy, exchange=fastest)


def test_a_choice_is_refused_where_one_of_its_exchanges_is():
    """By the number of replicas, by the other pieces, and by the strategy's own feedback."""
    direct, feedback = tw.exchange.Direct(), tw.pieces.feedback.Feedback()
    with pytest.raises(tw.ConfigurationError, match=r"a center in 0\.\.2 is needed"):
        tw.lab.fastest.Fastest("1mbit", (direct, tw.lab.star.exchange.Star(3))).check_size(3)
    with pytest.raises(tw.ConfigurationError, match="a hub takes the mean of packets in one codec"):
        policy = tw.pieces.policies.DenseUntil(4)
        tw.Strategy(policy=policy, exchange=tw.lab.fastest.Fastest("1mbit", (direct, tw.lab.star.exchange.Star("hub"))))
    with pytest.raises(tw.ConfigurationError, match="so nothing is held back"):
        tw.Strategy(
            feedback=feedback, exchange=tw.lab.fastest.Fastest("1mbit", (direct, tw.exchange.Hierarchy((1, 1))))
        )


class Remembering(tw.exchange.Direct):
    """An exchange with a state. It departs with what it was given, and keeps no next state."""

    def init(self, codec, numel, rank, size):
        return {"last": torch.zeros(numel)}

    def depart(self, round_, state):
        return state

    def arrive(self, departure):
        yield from ()
        return Arrival((), {})


def test_a_choice_gives_its_exchange_no_state_of_another():
    """A state that the exchange of this round does not know stays, for the rounds with another codec."""
    fastest = tw.lab.fastest.Fastest("1mbit", (Remembering(),))
    round_ = SimpleNamespace(codec=tw.codecs.Identity(), numel=2, rank=0, size=2)
    for state, given in (
        ({"last": torch.ones(2)}, True),
        ({"last": torch.ones(3)}, False),
        ({"other": torch.ones(2)}, False),
        ({}, False),
    ):
        departure = fastest.depart(round_, state)
        assert departure.departure["last"].tolist() == ([1.0, 1.0] if given else [0.0, 0.0])
        arriving = Arriving(fastest.arrive(departure))
        assert not list(arriving) and arriving.arrival.state is state


def test_owners_keep_feedback_of_the_rounds_in_which_they_are_chosen():
    """The dense rounds at the beginning have owners, the sparse ones after them have none."""
    direct, owners, feedback = tw.exchange.Direct(), tw.exchange.TwoShot(Feedback()), Feedback()
    fastest, sparse, policy = tw.lab.fastest.Fastest("1mbit,1ms", (direct, owners)), TopK(0.01), DenseUntil(2)
    assert [fastest.chosen(codec, weights(toy()).numel(), 4) for codec in (policy.dense, sparse)] == [owners, direct]
    strategy = tw.Strategy(codec=sparse, policy=policy, feedback=feedback, exchange=fastest)
    first, *others = journey(strategy, 4, steps=4)
    assert all(same_bits(one.final, first.final) for one in others) and not first.heard("refused")


@pytest.mark.parametrize("among", [(), (tw.exchange.Direct,), (tw.exchange.Direct(), "TwoShot()")], ids=str)
def test_a_choice_without_exchanges_is_refused(among):
    with pytest.raises(tw.ConfigurationError, match=r"exchanges are needed, such as \(Direct\(\), TwoShot\(\)\)"):
        tw.lab.fastest.Fastest("20mbit,40ms", among)
