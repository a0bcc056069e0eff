"""Liars in an exchange: what they know, what they send, and what the exchange still promises."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.codecs import E3M0, Identity, Sign
from thinwire.comm import CountedGroup, Ledger, Link
from thinwire.errors import ConfigurationError
from thinwire.exchange import Round, SendContext
from thinwire.lab.gossip.rules import AdaptThenCombine
from thinwire.lab.robust.attacked import Attacked, AttackedGossip, with_liars
from thinwire.lab.robust.attacks import Attack, Scene, SignFlip
from thinwire.lab.topology import Complete, Ring
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.testing.exchanges import deltas, rounds

SCENES: list[Scene] = []


@dataclass(frozen=True)
class Noted(Attack):
    """Says ten times its own signal, and notes what it knows."""

    spies: bool = True
    sybils: bool = False
    remembers: bool = False

    def says(self, scene: Scene) -> Tensor:
        SCENES.append(scene)
        return 10 * scene.own


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot()], ids=str)
@pytest.mark.parametrize("spies", [False, True])
@pytest.mark.parametrize("sybils", [False, True])
def test_the_last_ranks_send_what_the_attack_says(exchange, spies, sybils, small):
    """Of five replicas the last two lie, in two rounds. A message has fewer values than the delta."""
    SCENES.clear()
    x, ledgers = deltas(5, 70, 2), [Ledger() for _ in range(5)]
    made = with_liars(exchange, Noted(spies, sybils), 2)
    seen = rounds(made, Identity(), x, lambda group: CountedGroup(group, ledgers[group.rank]))
    scenes = {(scene.key.round, scene.key.sender): scene for scene in SCENES}
    assert sorted(scenes) == [(0, 3), (0, 4), (1, 3), (1, 4)]
    for (number, rank), scene in scenes.items():
        assert scene.own.equal(x[number, rank]) and scene.first.equal(x[0, rank])
        assert scene.honest.equal(x[number, :3] if spies else torch.empty(0)) and (scene.size, scene.liars) == (5, 2)
    x[:, 3:] = 10 * x[:, [3, 3] if sybils else [3, 4]]
    for rank, went in enumerate(seen):
        for number, one in enumerate(went):
            torch.testing.assert_close(one.estimate, x[number].mean(0))
            assert one.flags == (0,) * 5 and one.state.keys() == made.init(Identity(), 70, rank, 5).keys()
            assert ("first" in one.state) == (rank >= 3)
            assert exchange == tw.exchange.TwoShot() or one.sent.equal(x[number, rank])
    told = [2 * spies] * 3 + [sybils, 0]  # the peers that each tells in a round
    size = tw.exchange.Direct().nbytes_sent(Identity(), 70, 2)
    assert [ledger.sent("spying") for ledger in ledgers] == [2 * peers * size for peers in told]


@pytest.mark.parametrize("sybils", [False, True])
def test_a_liar_in_gossip_sends_weights_that_a_false_delta_would_lead_to(sybils, small):
    """Replica m has the weights θ = x − delta, with its own x. A liar keeps its own."""
    SCENES.clear()
    delta, anchors = deltas(4, 70, 2)
    made = with_liars(tw.lab.gossip.exchange.Gossip(Complete(), AdaptThenCombine()), Noted(not sybils, sybils), 2)

    def replica(group: tw.Group) -> list[Tensor]:
        context, rank = SendContext(group), group.rank
        theta, means, sent = anchors[rank] - delta[rank], torch.zeros(70), torch.zeros(70)
        round_ = Round(
            context, Identity(), 70, Key(0, 0, 3, rank), lambda begin, end: theta[begin:end], anchor=anchors[rank]
        )
        for begin, mean, own in made.arrive(made.depart(round_, made.init(Identity(), 70, rank, 4))):
            means[begin : begin + len(mean)], sent[begin : begin + len(mean)] = mean, own
        round_.close()
        context.close()
        return [means, sent]

    seen = tw.run_threads(4, replica)
    for scene in SCENES:
        torch.testing.assert_close(scene.own, delta[scene.key.sender])
        torch.testing.assert_close(scene.honest, torch.empty(0) if sybils else delta[:2])
        assert (scene.size, scene.liars) == (4, 2)
    delta[2:] *= 10
    theta = anchors - delta
    if sybils:
        theta[3] = theta[2]
    for rank, (means, sent) in enumerate(seen):
        torch.testing.assert_close(means, theta.mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sent, theta[rank], rtol=1e-5, atol=1e-5)


INSIDE = (
    tw.exchange.Direct(),
    tw.exchange.TwoShot(Feedback()),
    tw.lab.star.exchange.Star("hub"),
    tw.lab.star.exchange.Star(2),
    tw.exchange.AllReduce(),
    tw.lab.fastest.Fastest("20mbit,40ms"),
)


@pytest.mark.parametrize("exchange", INSIDE, ids=str)
def test_an_exchange_with_liars_declares_what_it_does_without_them(exchange):
    made, link = Attacked(exchange, SignFlip(), 2), Link(8e6, 0.5)
    for name in ("traits", "feedback"):
        assert getattr(made, name) == getattr(exchange, name), name
    for codec in (Identity(), tw.codecs.Cast()):
        for name, given in (
            ("owns", (codec, 1001, 1, 4)),
            ("nbytes_products", (4,)),
            ("why", ([(codec, 1001)], 4)),
            ("nbytes_sent", (codec, 1001, 4)),
            ("nbytes_sent", (codec, 1001, 4, 1)),
            ("seconds", (codec, 1001, 4, link)),
        ):
            assert getattr(made, name)(*given) == getattr(exchange, name)(*given), name


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *(
            (
                lambda liars=liars: with_liars(tw.exchange.Direct(), SignFlip(), liars),
                f"liars={liars!r}: a whole number",
            )
            for liars in (0, True, 1.0)
        ),
        (lambda: AttackedGossip(Ring(), AdaptThenCombine(), SignFlip(), 0), "liars=0: a whole number"),
        (lambda: with_liars(tw.exchange.Direct(), SignFlip(), 4).check_size(4), "liars=4 of 4 replicas: at least one"),
        (lambda: with_liars(tw.exchange.Direct(), SignFlip(), 4).init(Sign(), 8, 0, 4), "choose 3 or fewer"),
        (
            lambda: with_liars(tw.lab.star.exchange.Star(3), SignFlip(), 1).check_size(3),
            r"a center in 0\.\.2 is needed",
        ),
        (lambda: with_liars(tw.exchange.AllReduce(), SignFlip(), 1).check(E3M0(), None), "AllReduce"),
        (
            lambda: tw.Strategy(
                exchange=with_liars(tw.lab.star.exchange.Star("hub"), SignFlip(), 1),
                policy=tw.pieces.policies.DenseUntil(1),
            ),
            "a hub takes the mean of packets in one codec",
        ),
    ],
)
def test_liars_that_do_not_fit_are_refused(make, said):
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_by_default_one_replica_lies():
    assert Attacked(tw.exchange.Direct(), SignFlip()) == with_liars(tw.exchange.Direct(), SignFlip(), 1)
    made = AttackedGossip(Ring(), AdaptThenCombine())
    assert (
        made == with_liars(tw.lab.gossip.exchange.Gossip(Ring(), AdaptThenCombine()), SignFlip(), 1) and made.liars == 1
    )
    made.check_size(2)
