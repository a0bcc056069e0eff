"""A configuration that cannot work fails when it is made; the message says what was given, what is needed, and what to do."""

from __future__ import annotations

import pytest
from pieces import over

import thinwire as tw
from thinwire.catalogue.parsing import PIECES
from thinwire.choices import listed

HOST = "choose anchors='host', or deltas of fragments in turn."
CONFIGURATIONS = {
    "every=0": (
        lambda: tw.pieces.schedule.Every(0),
        "every=0: at least 1 inner step between two rounds is needed, and at most 1,000,000.",
    ),
    "every=-3": (
        lambda: tw.pieces.schedule.Staggered(-3),
        "every=-3: at least 1 inner step between two rounds is needed, and at most 1,000,000.",
    ),
    "every='a'": (
        lambda: tw.diloco(every="a"),
        "every='a': a whole number of inner steps is needed.",
    ),
    "delay<0": (
        lambda: tw.pieces.schedule.Staggered(6, -1),
        "delay=-1 with every=6: a round must land before its fragment departs again; choose 0 <= delay <= every, so at most 6.",
    ),
    "delay>every": (
        lambda: tw.pieces.schedule.Every(6, 7),
        "delay=7 with every=6: a round must land before its fragment departs again; choose 0 <= delay <= every, so at most 6.",
    ),
    "delay=every": (
        lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(6, 6)),
        "delay=6 with every=6: 0 <= delay < every is needed, so at most 5; for a whole period of delay choose eager "
        "updates, or Reset().",
    ),
    "offsets": (
        lambda: tw.pieces.schedule.Staggered(6, 0, (0, 3)),
        "offsets=(0, 3): every fragment first departs at inner step 1 or later.",
    ),
    "alpha>1": (
        lambda: tw.pieces.merge.Mix(1.5),
        "merge=1.5: between 0 (take the anchor) and 1 (keep the local values) is needed.",
    ),
    "alpha<0": (
        lambda: tw.streaming_diloco(merge=-0.1),
        "merge=-0.1: between 0 (take the anchor) and 1 (keep the local values) is needed.",
    ),
    "alpha=nan": (
        lambda: tw.pieces.merge.Mix(float("nan")),
        "merge=nan: between 0 (take the anchor) and 1 (keep the local values) is needed.",
    ),
    "outer lr": (
        lambda: tw.diloco(outer_lr=0.0),
        "Nesterov(lr=0.0, momentum=0.9): lr > 0 and 0 <= momentum < 1 are needed; the paper uses 0.4 and 0.9.",
    ),
    "outer momentum": (
        lambda: tw.pieces.outer.Nesterov(0.4, 1.0),
        "Nesterov(lr=0.4, momentum=1.0): lr > 0 and 0 <= momentum < 1 are needed; the paper uses 0.4 and 0.9.",
    ),
    "block": (
        lambda: tw.codecs.E3M0(33),
        "E3M0(block=33): a multiple of 2, at least 2, is needed; 128 is usual.",
    ),
    "no block": (
        lambda: tw.codecs.Int(2, 0),
        "Int(block=0): a multiple of 4, at least 4, is needed; 128 is usual.",
    ),
    "scale": (
        lambda: tw.codecs.E2M1(scale="fp16"),
        "E2M1(scale='fp16', rounding='nearest'): 'exponent', 'bf16' or 'fp32', and 'nearest' or 'stochastic', are needed.",
    ),
    "bits": (
        lambda: tw.codecs.Int(5),
        "Int(bits=5): 8, 4 or 2 is needed; for 1 bit use Sign().",
    ),
    "sign": (
        lambda: tw.codecs.Sign("max"),
        "Sign(scale='max'): 'mean' or 'l2' is needed.",
    ),
    "no block of signs": (
        lambda: tw.codecs.Sign(block=0),
        "Sign(block=0): at least 1 is needed, or None for the whole tensor.",
    ),
    "density=0": (
        lambda: tw.codecs.TopK(0.0),
        "TopK(density=0.0): more than 0 and at most 1 is needed; 0.01 is usual.",
    ),
    "density>1": (
        lambda: tw.codecs.RandomK(1.01),
        "RandomK(density=1.01): more than 0 and at most 1 is needed; 0.01 is usual.",
    ),
    "density=nan": (
        lambda: tw.codecs.TopK(float("nan")),
        "TopK(density=nan): more than 0 and at most 1 is needed; 0.01 is usual.",
    ),
    "count>chunk": (
        lambda: tw.codecs.ChunkedTopK(64, 65),
        "ChunkedTopK(chunk=64, count=65): 0 < count <= chunk is needed; 64 of 4096 are SparseLoCo's.",
    ),
    "values": (
        lambda: tw.codecs.TopK(0.1, "bf16"),
        "TopK(values='bf16'): a Codec is needed, such as Cast('bf16') or Sign().",
    ),
    "cast": (
        lambda: tw.codecs.Cast("fp8"),
        "Cast(dtype='fp8'): bf16 or fp16 is needed; for 8 bits use E4M3() or E5M2(), for 4 bits E3M0().",
    ),
    "feedback of nothing": (
        lambda: tw.pieces.feedback.Feedback(0, 0.0),
        "Feedback(kappa=0, eta=0.0, beta=1.0, alpha=1.0): kappa 0 or 1, eta and beta in [0, 1] and alpha in (0, 1] are needed, and kappa "
        "or eta above 0 (otherwise leave feedback=None).",
    ),
    "feedback that grows": (
        lambda: tw.Strategy(codec=tw.codecs.RandomK(), feedback=tw.pieces.feedback.Feedback()),
        "Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0) over RandomK(density=0.1, values=Cast(dtype='bf16')): a contractive codec is needed, "
        "otherwise the residual grows; choose TopK, or leave feedback=None.",
    ),
    "feedback over random values, inside": (
        lambda: tw.Strategy(feedback=tw.pieces.feedback.Feedback(), codec=tw.codecs.Hadamard(tw.codecs.RandomK(0.5))),
        "Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0) over Hadamard(codec=RandomK(density=0.5, values=Cast(dtype='bf16')), block=128): "
        "a contractive codec is needed, otherwise the residual grows; choose TopK, or leave feedback=None.",
    ),
    "shapes inside": (
        lambda: tw.codecs.TopK(0.1, tw.lab.codecs.LowRank()),
        "TopK(values=LowRank(rank=4, iterations=2, values=Identity(), shapes=())): it needs the shapes of a model's tensors, "
        "which are not known here; make it the outermost codec.",
    ),
    "a codec that no shard fits": (
        lambda: tw.Strategy(codec=tw.lab.codecs.LowRank(), exchange=tw.exchange.TwoShot()),
        "TwoShot(feedback=None) with LowRank(rank=4, iterations=2, values=Identity(), shapes=()): a codec that can encode any part of a "
        "fragment is needed, this one needs the shapes of whole tensors; choose AllReduce() for LowRank, otherwise Direct(), or "
        "a codec without shapes, such as Sign(block=512).",
    ),
    "a codec that cannot code twice": (
        lambda: tw.Strategy(codec=tw.codecs.RandomK(), exchange=tw.exchange.TwoShot()),
        "TwoShot(feedback=None) with RandomK(density=0.1, values=Cast(dtype='bf16')): a codec that can encode a mean again is needed, this "
        "one would sample twice; choose AllReduce() or Direct().",
    ),
    "a codec that is not linear": (
        lambda: tw.Strategy(codec=tw.codecs.E3M0(), exchange=tw.exchange.AllReduce()),
        "AllReduce() with E3M0(block=128, scale='exponent', rounding='nearest'): a codec whose codes can be added is needed, such as "
        "Identity(), Cast(), RandomK() or LowRank(); or choose TwoShot() or Direct().",
    ),
    "an owner with a reference": (
        lambda: tw.exchange.TwoShot(tw.pieces.feedback.Feedback(1, 0.0)),
        "TwoShot(feedback=Feedback(kappa=1, eta=0.0, beta=1.0, alpha=1.0)): kappa=0 is needed, because an owner keeps no reference; choose "
        "Feedback().",
    ),
    "an owner with something else": (
        lambda: tw.exchange.TwoShot(0.95),
        "TwoShot(feedback=0.95): Feedback(...) or None is needed.",
    ),
    "sites without replicas": (
        lambda: tw.exchange.Hierarchy((2, 0)),
        "Hierarchy(sites=(2, 0)): the size of each site, such as (2, 2), or the ranks of each, each rank once, such as "
        "((0, 1), (2, 3)), are needed; at most 30 sites.",
    ),
    "a rank in two sites": (
        lambda: tw.exchange.Hierarchy(((0, 1), (1, 2))),
        "Hierarchy(sites=((0, 1), (1, 2))): the size of each site, such as (2, 2), or the ranks of each, each rank once, such as "
        "((0, 1), (2, 3)), are needed; at most 30 sites.",
    ),
    "feedback where nothing is lost": (
        lambda: tw.Strategy(codec=tw.codecs.Sign(), feedback=tw.pieces.feedback.Feedback(), exchange=tw.exchange.Hierarchy((2, 2))),
        "Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0) over Hierarchy(sites=(2, 2), feedback=None): within its site a replica's values travel "
        "exactly, so nothing is held back; write Hierarchy(sites=(2, 2), feedback=Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0)), "
        "and leave the strategy's at None.",
    ),
    "sites that hold back what is drawn": (
        lambda: tw.Strategy(codec=tw.codecs.RandomK(), exchange=tw.exchange.Hierarchy((2, 2), tw.pieces.feedback.Feedback())),
        "Feedback(kappa=0, eta=1.0, beta=1.0, alpha=1.0) over RandomK(density=0.1, values=Cast(dtype='bf16')): a contractive codec is needed, "
        "otherwise the residual grows; choose TopK, or leave feedback=None.",
    ),
    "a link that is none": (
        lambda: tw.lab.fastest.Fastest("20 furlongs"),
        "the link '20 furlongs' was given; a rate, or a rate and a delay are needed, with units bit, kbit, mbit, gbit and us, ms, s. Write "
        "it like 50mbit or 2.5mbit,30ms.",
    ),
    "nothing to choose from": (
        lambda: tw.lab.fastest.Fastest("20mbit", ()),
        "Fastest(among=()): exchanges are needed, such as (Direct(), TwoShot()).",
    ),
    "nothing that fits": (
        lambda: tw.Strategy(codec=tw.codecs.TopK(), exchange=tw.lab.fastest.Fastest("20mbit", (tw.exchange.AllReduce(),))),
        "Fastest(link='20mbit', among=(AllReduce(),)) with TopK(density=0.01, values=Cast(dtype='bf16')): none of these accepts it; add "
        "Direct(), which accepts any codec.",
    ),
    "no exchange": (
        lambda: tw.Strategy(exchange=tw.exchange.Direct),
        "exchange=<class 'thinwire.exchange.direct.Direct'>: an Exchange is needed; see `thinwire docs pieces`.",
    ),
    "no codec inside": (
        lambda: tw.codecs.DCT(tw.codecs.E3M0),
        "DCT(codec=<class 'thinwire.codecs.block.E3M0'>): a Codec is needed, such as Cast('bf16') or Sign().",
    ),
    "bits of levels": (
        lambda: tw.lab.codecs.Levels(9),
        "Levels(bits=9): 1 to 8 are needed; 4 is usual.",
    ),
    "block of levels": (
        lambda: tw.lab.codecs.Levels(4, 100),
        "Levels(block=100): a multiple of 8 is needed; 512 is usual.",
    ),
    "over senders, inside": (
        lambda: tw.lab.codecs.Each(tw.codecs.DCT(tw.lab.codecs.OverSenders(tw.codecs.TopK()))),
        "Each(codec=DCT(codec=OverSenders(codec=TopK(density=0.01, values=Cast(dtype='bf16'))), side=64, axes=1)): `joint` would never be called "
        "inside this codec; make it the outermost one, or put it inside Squares, DCT or Hadamard only.",
    ),
    "over senders, as values": (
        lambda: tw.codecs.TopK(0.1, tw.lab.codecs.OverSenders(tw.codecs.Cast())),
        "TopK(values=OverSenders(codec=Cast(dtype='bf16'))): `joint` would never be called inside this codec; make it the outermost one, or put it "
        "inside Squares, DCT or Hadamard only.",
    ),
    "over senders, of references": (
        lambda: tw.Strategy(codec=tw.lab.codecs.OverSenders(tw.codecs.TopK()), feedback=tw.pieces.feedback.Feedback(1, 0.0)),
        "Feedback(kappa=1, eta=0.0, beta=1.0, alpha=1.0) over OverSenders(codec=TopK(density=0.01, values=Cast(dtype='bf16'))): with kappa=1 "
        "the mean over all is needed, otherwise references drift from the agreed mean; choose the codec inside OverSenders, or kappa=0.",
    ),
    "over senders, in private": (
        lambda: tw.Strategy(codec=tw.lab.codecs.OverSenders(tw.codecs.TopK()), privacy=tw.lab.privacy.Privacy()),
        f"{tw.lab.privacy.Privacy()} cannot be kept here: with "
        "OverSenders(codec=TopK(density=0.01, values=Cast(dtype='bf16'))) one replica may count "
        "for all; choose the codec inside it.",
    ),
    "rank": (
        lambda: tw.lab.codecs.LowRank(0),
        "LowRank(rank=0, iterations=2): at least 1 is needed of both; 4 and 2 are usual.",
    ),
    "side": (
        lambda: tw.codecs.DCT(tw.codecs.E3M0(), 1),
        "DCT(side=1, axes=1): a side of 2 to 1024 and 1 or 2 axes are needed; 64 and 1 are usual.",
    ),
    "squares": (
        lambda: tw.codecs.Squares(tw.codecs.E3M0(), 0),
        "Squares(side=0): at least 2 is needed; 64 is usual.",
    ),
    "hadamard": (
        lambda: tw.codecs.Hadamard(tw.codecs.E3M0(), 100),
        "Hadamard(block=100): a power of two is needed; 128 is usual.",
    ),
    "no codec": (
        lambda: tw.Strategy(codec="e3m0"),
        "codec='e3m0': a Codec is needed; see `thinwire docs pieces`.",
    ),
    "a class": (
        lambda: tw.Strategy(codec=tw.codecs.E3M0),
        "codec=<class 'thinwire.codecs.block.E3M0'>: a Codec is needed; see `thinwire docs pieces`.",
    ),
    "a merge": (
        lambda: tw.Strategy(merge=0.5),
        "merge=0.5: a Merge is needed; see `thinwire docs pieces`.",
    ),
    "a signal": (
        lambda: tw.Strategy(signal=tw.strategy.Gradients),
        "signal=<class 'thinwire.strategy.Gradients'>: Deltas() or Gradients() is needed.",
    ),
    "type of state": (
        lambda: tw.Strategy(state_dtype="fp16"),
        "state_dtype='fp16': 'fp32' or 'bf16' is needed.",
    ),
    "type of state with gradients": (
        lambda: tw.Strategy(state_dtype="bf16", signal=tw.strategy.Gradients()),
        "state_dtype='bf16': state that every inner step changes would be rounded as often, and gossip has no outer state; choose 'fp32', "
        "or deltas.",
    ),
    "anchors": (
        lambda: tw.Strategy(anchors="gpu"),
        "anchors='gpu': 'host', 'device' or 'disk' is needed.",
    ),
    "gradients on disk": (
        lambda: tw.Strategy(anchors="disk", signal=tw.strategy.Gradients()),
        f"anchors='disk': gradients need no anchors, and gossip has none; {HOST}",
    ),
    "all at once from disk": (
        lambda: tw.Strategy(anchors="disk", schedule=tw.pieces.schedule.Quadratic(4, 0.1)),
        "anchors='disk': Quadratic(every=4, scale=0.1, power=2.0, delay=0) exchanges all fragments at once, so all would be in memory; "
        f"{HOST}",
    ),
    "always in flight, from disk": (
        lambda: tw.Strategy(anchors="disk", schedule=tw.pieces.schedule.Every(3, 3), merge=tw.pieces.merge.Reset()),
        f"anchors='disk': with Reset() every fragment is always in flight; {HOST}",
    ),
    "eager without delay": (
        lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(6, 2), merge=tw.pieces.merge.Eager()),
        "Eager() with delay=2, every=6: such a round takes a whole period; choose delay=6, and Every or Staggered.",
    ),
    "gradients now and then": (
        lambda: tw.Strategy(signal=tw.strategy.Gradients(), schedule=tw.pieces.schedule.Every(2)),
        "Gradients() with Every(every=2, delay=0), Average(), Mix(alpha=0.0): gradients are exchanged at every step, and the inner "
        "optimizer is the outer one; leave schedule, outer and merge at Every(1), Average() and Mix().",
    ),
    "no aggregate": (
        lambda: tw.Strategy(aggregate=0.5),
        "aggregate=0.5: an Aggregate is needed; see `thinwire docs pieces`.",
    ),
    "no mean, of sums": (
        lambda: tw.Strategy(codec=tw.codecs.Cast(), exchange=tw.exchange.AllReduce(), aggregate=tw.pieces.aggregate.MeanOverSenders()),
        "aggregate=MeanOverSenders() is no mean over all replicas: AllReduce() adds up parts on the way; choose Direct() or TwoShot().",
    ),
    "two aggregates": (
        lambda: tw.Strategy(codec=tw.lab.codecs.OverSenders(tw.codecs.Sign()), aggregate=tw.pieces.aggregate.MeanOverSenders()),
        f"aggregate=MeanOverSenders() is no mean over all replicas: {tw.lab.codecs.OverSenders(tw.codecs.Sign())} combines the packets "
        "of all replicas itself; choose the codec inside it.",
    ),
    "no mean, under references": (
        lambda: tw.Strategy(codec=tw.codecs.TopK(), feedback=tw.pieces.feedback.Feedback(1, 0.0), aggregate=tw.pieces.aggregate.MeanOverSenders()),
        f"aggregate=MeanOverSenders() is no mean over all replicas: {tw.pieces.feedback.Feedback(1, 0.0)} keeps the mean of all "
        "references, and would drift from what is agreed; choose kappa=0.",
    ),
    "no mean, eager": (
        lambda: tw.Strategy(schedule=tw.pieces.schedule.Every(3, 3), merge=tw.pieces.merge.Eager(), aggregate=tw.pieces.aggregate.MeanOverSenders()),
        "aggregate=MeanOverSenders() is no mean over all replicas: Eager() counts the own delta as a share of the mean; choose Mix().",
    ),
    "no mean, in private": (
        lambda: tw.Strategy(privacy=tw.lab.privacy.Privacy(), aggregate=tw.pieces.aggregate.MeanOverSenders()),
        f"aggregate=MeanOverSenders() is no mean over all replicas: with {tw.lab.privacy.Privacy()} one replica may count for all; choose Mean().",
    ),
    "unknown name": (
        lambda: tw.catalogue.parsing.parse("E9M9"),
        f"'E9M9' is not known; choose from {listed(sorted(PIECES), 'thinwire docs pieces')}.",
    ),
}  # fmt: skip


@over("case", CONFIGURATIONS)
def test_invalid_configurations_are_refused(case):
    make, message = CONFIGURATIONS[case]
    with pytest.raises(tw.ConfigurationError) as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, tw.ThinwireError)


def test_a_nonlinear_outer_step_is_refused():
    class Sign(tw.pieces.outer.Outer):
        def step(self, anchor, delta, state):
            return anchor - delta.sign(), state

        def __repr__(self) -> str:
            return "Sign()"

    message = r"Eager\(\) with Sign\(\): a linear outer step is needed; choose Nesterov or Average\."
    with pytest.raises(tw.ConfigurationError, match=message):
        tw.Strategy(schedule=tw.pieces.schedule.Every(6, 6), merge=tw.pieces.merge.Eager(), outer=Sign())
