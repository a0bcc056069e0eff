"""Settings that cannot work are refused, and the message says what is needed: one row for each message of recipes, methods and pieces."""

from __future__ import annotations

import re
import shlex

import pytest
import recipes

from thinwire.app.cli import options, train
from thinwire.catalogue.parsing import PIECES, parse
from thinwire.errors import ConfigurationError
from thinwire.lab import methods

KNOWN = PIECES | recipes.NAMED | {name: getattr(methods, name) for name in methods.__all__}
REFUSED = (
    ("ad_psgd(every=0)", "at least 1 inner step between two meetings"),
    ("a2cid2(topology=RandomPairs())", "a graph with the same edges in every round is needed"),
    ("a2cid2(slow=(1.0, 0.0))", "factors above 0 are needed"),
    ("a2cid2(codec=RandomK(0.1))", "a contractive codec of fixed size"),
    ("async_local_sgd(updates=0)", "a whole number of updates above 0"),
    ("async_local_sgd(outer_momentum=1.0)", "0 <= momentum < 1"),
    ("thinwire train --strategy async_local_sgd --fragments 4", "async_local_sgd takes no fragments"),
    ("bristle(every=0)", "at least 1 inner step between two rounds"),
    ("bristle(every=3, delay=3)", "0 <= delay < every"),
    ("Strategy(codec=E3M0(), exchange=Gossip(Ring(), Bristle()))", "or choose choco"),
    ('thinwire train --strategy bristle --replicas 5 --topology "Listed(((0, 1), (2, 3), (3, 4)))"', "is in 2 parts"),
    ("choco(step=0.0)", "a step above 0 and at most 1"),
    ("choco(topology=RandomPairs())", "these must be the same in every round"),
    ("choco(codec=RandomK(0.1))", "a contractive codec is needed"),
    ("Strategy(feedback=Feedback(), exchange=Gossip(Ring(), Choco()))", "gossip sends no deltas"),
    ("co2(clip=0.0)", "clip > 0 (or None) are needed"),
    ("co2(gap=-1.0)", "gap >= 0"),
    ("Strategy(schedule=Every(4), outer=HeavyBall(gap=1.0))", "choose gap=0, or merge=Reset()"),
    ("Strategy(schedule=Every(4, 3), merge=Reset())", "choose delay=4"),
    ("thinwire train --strategy co2 --carrier elastic", "needs rounds that take a whole period"),
    ("codistill(every=0)", "every, probe and top must be above 0"),
    ("codistill(delay=10)", "0 <= delay < every is needed"),
    ("codistill(temperature=0.0)", "a temperature above 0 is needed"),
    (
        "thinwire train --strategy codistill --models tiny mini --replicas 3",
        "one for each is needed; give --replicas 2",
    ),
    (
        "thinwire train --strategy diloco --models tiny mini",
        "whose replicas hold one model; choose --strategy codistill",
    ),
    ("thinwire train --strategy codistill --carrier elastic", "a method with its own loop trains in a fixed group"),
    (
        "scallion(codec=TopK())",
        "an unbiased codec is needed, such as RandomK, or rounding='stochastic'; for this codec use scafcom",
    ),
    ("scafcom(codec=RandomK())", "a contractive codec is needed, such as TopK; for RandomK use scallion"),
    ("scallion(alpha=0.0)", "alpha in (0, 1] is needed"),
    ("scafcom(beta=1.5)", "beta in (0, 1] is needed"),
    ("fedavg(every=0)", "whole numbers above 0"),
    ('thinwire train --strategy scaffold --codec "TopK()"', "scaffold takes no codec"),
    ("thinwire train --strategy scaffold --optimizer AdamW", "that method is an optimizer itself"),
    ("Strategy(outer=Nesterov(), exchange=Gossip(Ring(), AdaptThenCombine()))", "leave outer at Average()"),
    ("Dadao(smooth=1.0, convex=2.0)", "0 < convex <= smooth is needed"),
    ("thinwire train --strategy data_parallel --every 30", "data_parallel takes no every"),
    ("thinwire train --strategy data_parallel --carrier elastic", "the replicas keep no anchors to resume from"),
    ("Strategy(signal=Gradients(), schedule=Every(2))", "gradients are exchanged at every step"),
    ("data_parallel(codec=Average())", "a Codec is needed"),
    ("decoupled_diloco(every=0)", "whole numbers above 0 are needed"),
    ("decoupled_diloco(delay=3)", "0 <= delay < every is needed, and 0 in real time"),
    ("decoupled_diloco(grace=-1.0)", "grace >= 0"),
    ("HeLoCo(2.0)", "a strength from 0 to 1 is needed"),
    ("ByTokens(-1.0)", "power >= 0 is needed"),
    (
        "thinwire train --strategy decoupled_diloco --slow 1 2 --replicas 3",
        "one factor of at least 1 is needed for each replica",
    ),
    (
        "thinwire train --strategy decoupled_diloco --batch 8 4 --replicas 3",
        "one number for each is needed, or one for all",
    ),
    ("demo(decay=1.5)", "eta and beta in [0, 1]"),
    ("demo(codec=DCT(ChunkedTopK(4096, 32), side=1))", "a side of 2 to 1024"),
    ("demo(clip=-1.0)", "0 (no clipping) or more is needed"),
    ("thinwire train --strategy demo --optimizer AdamW", "that method needs its own inner optimizer"),
    ("dfedsam(radius=-1.0)", "0 or more is needed"),
    ("dfedsam_mgs(gossip_steps=9)", "1 to 8 gossip steps a round"),
    ("dfedsam_mgs(topology=MoshpitGrid())", "a second step in the same group would change nothing"),
    ("MGS(NoLoCo())", "a rule that sends whole weights is needed"),
    ("SAM(SAM())", "AdamW(), SGD() or Muon() is needed"),
    ("thinwire train --strategy dfedsam --optimizer AdamW", "that method needs its own inner optimizer, SAM"),
    ("dgc(density=0.0)", "more than 0 and at most 1 is needed"),
    ("dgc(momentum=1.0)", "0 < decay < 1"),
    ("dgc(codec=E3M0())", "a codec that sends few of the values is needed"),
    (
        "Strategy(filters=(Momentum(),), outer=Nesterov())",
        "momentum before the exchange and after it, one owner is needed",
    ),
    ("diloco(outer_momentum=1.0)", "0 <= momentum < 1 are needed"),
    ("diloco(outer_lr=0.0)", "lr > 0"),
    ("diloco(anchors='gpu')", "'host', 'device' or 'disk' is needed"),
    ("thinwire train --strategy diloco --delay 5", "diloco takes no delay"),
    ("Strategy(schedule=Every(6, 2), merge=Eager())", "such a round takes a whole period; choose delay=6"),
    ("Strategy(schedule=Every(6, 6), merge=Eager(), outer=HeavyBall(clip=1.0))", "a linear outer step is needed"),
    ("thinwire train --strategy eager_diloco --delay 5", "eager_diloco takes no delay"),
    ("ef14(codec=RandomK(0.1))", "a contractive codec is needed, otherwise the residual grows"),
    ("thinwire train --strategy econtrol --every 30", "econtrol takes no every"),
    (
        'thinwire train --carrier elastic --strategy "Strategy(schedule=Every(30), codec=TopK(), feedback=Feedback(1, 0.1))"',
        "keeps the mean of all references",
    ),
    ("finetune(every=2)", "0 <= delay < every is needed, so at most 1"),
    ("flasc(up=0.0)", "above 0 and at most 1 is needed; 1 sends all"),
    ("flasc(codec=LowRank())", "it needs the shapes of a model's tensors"),
    (
        'thinwire train --strategy flasc --lora 8 --privacy "Privacy()"',
        "with flasc: deltas of a Strategy can be clipped and made noisy; choose a recipe",
    ),
    ("thinwire train --strategy flasc --lora 8 --delay 3", "flasc takes no delay"),
    ("gasloc(outer_momentum=0.9, pull=0.7)", "grows by 1.098 in every round"),
    ("gasloc(outer_momentum=1.0)", "momentum in [0, 1), lr and pull above 0 are needed"),
    ("thinwire train --strategy gasloc --replicas 3", "an even number is needed"),
    ("Repetition(5, 1)", "groups of 2 replicas were asked for"),
    ("Cyclic(4, 4)", "0 <= stragglers < replicas, so at most 3"),
    ("SelectiveRepeat(12, 2, 4, 3)", "burst=2 must divide window - 1 = 3"),
    ("Multiplexed(12, 3, 3, 4)", "1 <= burst < window are needed"),
    ("Multiplexed(12, 2, 3, 13)", "0 <= stragglers <= 12, the number of replicas, is needed"),
    ("gradient_tracking(momentum=1.5)", "momentum"),
    ("Strategy(schedule=Every(2), exchange=Gossip(Ring(), Tracking()))", "needs a round after every step"),
    ("thinwire train --strategy gradient_tracking --every 5", "takes no every"),
    ("halos(sites=0)", "the number of sites, or the number of replicas of each"),
    ("halos(apart=0)", "at least 1 round, and 0 <= merge < 1"),
    ("thinwire train --strategy halos --merge 0.5 --fragments 4", "halos takes no fragments"),
    ("just_one_byte(samples=0)", "1 to 4096 samples and a radius in (0, 1) are needed"),
    ("thinwire train --strategy just_one_byte --every 30", "just_one_byte takes no every"),
    (
        'thinwire train --strategy just_one_byte --privacy "Privacy(clip=0.5, noise=4.0)"',
        "deltas of a Strategy can be clipped",
    ),
    ("l_greco(codec=TopK())", "a codec for each matrix is needed, such as Each(TopK(0.01))"),
    ("l_greco(codec=Each(Sign()))", "name some, as in LGreCo((Int(2), Int(4), Int(8)))"),
    ("l_greco(alpha=0.0)", "alpha > 0"),
    ("l_greco(window=0)", "a window of at least 1 round"),
    (
        "Strategy(codec=Each(TopK()), policy=LGreCo(), exchange=Hierarchy((1, 1)))",
        "the policy measures replica 0's own values, and this exchange sends sums",
    ),
    ("l_greco(exchange=TwoShot())", "this one needs the shapes of whole tensors"),
    ("local_sgd(every=2.5)", "a whole number of inner steps is needed"),
    ("thinwire train --strategy local_sgd --delay 5", "local_sgd takes no delay"),
    ("local_sgd(exchange=Identity())", "an Exchange is needed"),
    ("Masha1(step=0.1, codec=TopK(0.2))", "an unbiased codec is needed"),
    ("Masha2(step=0.1, codec=RandomK(0.2))", "a contractive codec is needed, such as TopK; for RandomK use Masha1"),
    ("Masha1(step=0.0)", "step above 0 and refresh in (0, 1] are needed"),
    ("MoshpitGrid(1)", "at least 2 cells along an axis"),
    ("RandomGroups(1)", "groups of at least 2 replicas"),
    (
        'thinwire train --strategy moshpit --replicas 6 --topology "RandomGroups(4)"',
        "a multiple of 4 is needed, 2 would be left over",
    ),
    ("Muon(1.0)", "0 <= momentum < 1 is needed"),
    ("thinwire train --strategy muloco --optimizer AdamW", "that method needs its own inner optimizer, Muon"),
    ("noloco(outer_momentum=0.5, pull=1.6)", "choose a pull (or lr) below 1.50"),
    ("noloco(outer_lr=0.0)", "lr and pull above 0 are needed"),
    ("thinwire train --strategy noloco --replicas 4 --carrier elastic", "knows its neighbours by their ranks"),
    ("one_bit_adam(freeze=0)", "freeze as rounds (1 or more) or Settled() are needed"),
    ("one_bit_adam(codec=LowRank())", "a codec that can encode any part of a fragment is needed"),
    ("Strategy(filters=(Momentum(), Moments()))", "2 of them keep momentum, one owner is needed"),
    ("thinwire train --strategy one_bit_adam --carrier elastic", "keeps what each owner holds back of its shard"),
    ("plexus(every=0)", "at least 1 inner step, and times above 0, are needed"),
    ("plexus(sample=0)", "a whole number above 0 is needed"),
    ("power_sgd(rank=0)", "at least 1 is needed of both"),
    ("power_sgd(codec=TopK())", "choose TwoShot() or Direct()"),
    ('thinwire train --strategy power_sgd --exchange "Direct()"', "power_sgd takes no exchange"),
    ("qsr(scale=-1.0)", "scale >= 0"),
    ("qsr(power=9.0)", "a power from 0 to 8"),
    ("Strategy(schedule=Quadratic(4, 0.1, delay=4))", "choose delay <= 3"),
    ("Strategy(schedule=Quadratic(4, 0.1), merge=Reset())", "such a round takes a whole period"),
    (
        "thinwire train --strategy qsr --carrier elastic",
        "counts from the beginning of a round, which a new replica does not know",
    ),
    ("qsgd(codec=Int(3))", "8, 4 or 2 is needed"),
    ("cgx(codec=Each(Int(4), least=-1))", "0 or more elements are needed"),
    ("qsgd(codec=Int(4, 512, 'fp16'))", "'exponent', 'bf16' or 'fp32'"),
    ("thinwire train --strategy cgx --every 30", "cgx takes no every"),
    ("Strategy(codec=E3M0(), exchange=Gossip(Ring(), PushSum()))", "leave the codec at Identity()"),
    ("Strategy(exchange=Gossip(Ring(), Ring()))", "a rule such as NoLoCo()"),
    (
        'thinwire train --strategy sgp --replicas 3 --topology "Listed(((0, 1), (1, 2)), one_way=True)"',
        "no path leads from replica 1 to replica 0",
    ),
    ("sparse_loco(codec=ChunkedTopK(64, 65))", "0 < count <= chunk is needed"),
    (
        'thinwire train --strategy sparse_loco --privacy "Privacy(clip=0.5, noise=4.0)"',
        "adds older deltas to what was clipped",
    ),
    ("streaming_diloco(every=10, delay=10)", "0 <= delay < every is needed, so at most 9"),
    ("streaming_diloco(merge=1.5)", "between 0 (take the anchor) and 1 (keep the local values)"),
    ("streaming_diloco(codec=E3M0(block=3))", "a multiple of 2, at least 2, is needed"),
    ("streaming_diloco(offsets=(0, 15))", "every fragment first departs at inner step 1 or later"),
    ("thinwire train --strategy streaming_diloco --delay -1", "choose 0 <= delay <= every"),
    ("thinwire train --delay 4", "0 <= delay < every is needed, so at most 3"),
    ("streaming_sparse(delay=0)", "what was not sent is the residual of a round that lands during training"),
    ("streaming_sparse(unsent=0.0)", "a share above 0 and at most 1 is needed"),
    ("sybil_wall(width=100)", "a multiple of 64"),
)


@pytest.mark.parametrize(("given", "needed"), REFUSED)
def test_what_cannot_work_is_refused_with_what_is_needed(given, needed):
    with pytest.raises(ConfigurationError) as caught:
        if given.startswith("thinwire train"):
            options.read(train.Options, "train", shlex.split(given)[2:], "")
        else:
            parse(given, KNOWN)
    assert needed in re.sub(r"\s+", " ", str(caught.value))
