"""The strategies under which the laws of all strategies are tested: every recipe, and forms that no recipe has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

import thinwire as tw
from thinwire.catalogue.methods import RECIPES

_IRREGULAR = tw.lab.topology.Listed(((0, 1), (1, 2), (2, 3), (3, 0), (0, 2)), one_way=True)
GOSSIP: dict[str, tw.Strategy] = {
    # the recipes whose replicas do not agree, and variants of them; for four replicas
    "noloco": RECIPES["noloco"](every=4),
    "d_psgd": RECIPES["d_psgd"](),
    "choco": RECIPES["choco"](codec=tw.codecs.E3M0(4)),
    "sgp": RECIPES["sgp"](),
    "gradient_tracking": RECIPES["gradient_tracking"](),
    "gasloc": RECIPES["gasloc"](every=3, delay=1, outer_momentum=0.3),
    "dfedsam": RECIPES["dfedsam"](every=3),
    "dfedsam_mgs": RECIPES["dfedsam_mgs"](
        every=3, delay=1, gossip_steps=2, topology=tw.lab.topology.OnePeerExponential()
    ),
    "moshpit": RECIPES["moshpit"](topology=tw.lab.topology.MoshpitGrid(2)),
    "moshpit, one row, in the air": RECIPES["moshpit"](every=3, delay=1, partition=tw.pieces.partition.BySize(2)),
    "noloco in the air, 4 bits": RECIPES["noloco"](
        every=6, delay=2, partition=tw.pieces.partition.Strided(2), codec=tw.codecs.E3M0(8)
    ),
    "combined, then adapted, in the air": RECIPES["d_psgd"](
        every=3,
        delay=2,
        topology=tw.lab.topology.Torus(2),
        rule=tw.lab.gossip.rules.CombineThenAdapt(),
        partition=tw.pieces.partition.BySize(2),
    ),
    "choco, sparse, in the air": RECIPES["choco"](
        every=2, delay=1, step=0.2, topology=tw.lab.topology.Exponential(), codec=tw.codecs.TopK(0.2)
    ),
    "bristle": RECIPES["bristle"](every=3, delay=1, partition=tw.pieces.partition.BySize(2)),
    "sybil_wall": RECIPES["sybil_wall"](every=2, delay=1, width=64),
    "a graph of another seed": replace(RECIPES["d_psgd"](topology=tw.lab.topology.BarabasiAlbert(1)), seed=2),
    "push-sum, one way, unlike degrees": RECIPES["sgp"](every=2, delay=1, topology=_IRREGULAR),
}
_IN_THE_AIR = tw.Strategy(
    schedule=tw.pieces.schedule.Staggered(6, 3),
    partition=tw.pieces.partition.Strided(2),
    outer=tw.pieces.outer.Nesterov(),
    merge=tw.pieces.merge.Mix(0.5),
)
_THREE = replace(
    _IN_THE_AIR,
    schedule=tw.pieces.schedule.Staggered(6, 5),
    partition=tw.pieces.partition.Sequential(3),
    codec=tw.codecs.E3M0(4),
)
METHODS: dict[str, tw.Strategy] = {
    # every recipe under its own name, short enough for a test
    "data_parallel": RECIPES["data_parallel"](),
    "local_sgd": RECIPES["local_sgd"](every=3),
    "diloco": RECIPES["diloco"](every=4),
    "streaming_diloco": RECIPES["streaming_diloco"](every=6, fragments=2, delay=2),
    "streaming_sign": RECIPES["streaming_sign"](every=6, fragments=2, delay=2, codec=tw.codecs.Sign(block=16)),
    "streaming_sparse": RECIPES["streaming_sparse"](
        every=6, fragments=2, delay=2, codec=tw.codecs.TopK(0.2, tw.codecs.Sign(block=16))
    ),
    "finetune": RECIPES["finetune"](every=6, fragments=2, delay=1),
    "eager_diloco": RECIPES["eager_diloco"](every=4, fragments=2),
    "sparse_loco": RECIPES["sparse_loco"](every=4, codec=tw.codecs.ChunkedTopK(32, 4, tw.codecs.Sign(block=4))),
    "dgc": RECIPES["dgc"](density=0.2, codec=tw.lab.codecs.Each(tw.codecs.TopK(0.2), least=10)),
    "outer_dgc": RECIPES["outer_dgc"](every=3, codec=tw.lab.codecs.Each(tw.codecs.TopK(0.2), least=10)),
    "one_bit_adam": RECIPES["one_bit_adam"](freeze=4, codec=tw.codecs.Sign("l2", 16)),
    "ef14": RECIPES["ef14"](codec=tw.codecs.TopK(0.2)),
    "ef21": RECIPES["ef21"](codec=tw.codecs.TopK(0.2)),
    "econtrol": RECIPES["econtrol"](codec=tw.codecs.TopK(0.2)),
    "power_sgd": RECIPES["power_sgd"](rank=1),
    "qsgd": RECIPES["qsgd"](codec=tw.codecs.Int(4, 16, "fp32", "stochastic")),
    "cgx": RECIPES["cgx"](codec=tw.lab.codecs.Each(tw.lab.codecs.Levels(4, 16), least=10)),
    "demo": RECIPES["demo"](
        codec=tw.codecs.Squares(tw.codecs.DCT(tw.lab.codecs.OverSenders(tw.codecs.ChunkedTopK(4, 2)), 2, axes=2), 2)
    ),
    "muloco": RECIPES["muloco"](every=4),
    "qsr": RECIPES["qsr"](every=2, scale=0.02),
    "co2": RECIPES["co2"](every=3, outer_lr=0.9, outer_momentum=0.4, clip=0.1),
    "l_greco": RECIPES["l_greco"](
        every=3,
        codec=tw.lab.codecs.Each(tw.codecs.TopK(0.3)),
        candidates=(tw.codecs.TopK(0.1), tw.codecs.TopK(0.6)),
        window=2,
    ),
    "with histories, in shards": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 1),
        exchange=tw.exchange.TwoShot(),
        aggregate=tw.lab.robust.direction_weights.FoolsGold(),
    ),
    # forms that no recipe has
    "feedback in the air": replace(
        _IN_THE_AIR,
        codec=tw.codecs.TopK(0.1, tw.codecs.E3M0(8, rounding="stochastic")),
        feedback=tw.pieces.feedback.Feedback(1, 0.5, 1.0),
        seed=3,
    ),
    "state in bf16, in the air": replace(
        _IN_THE_AIR, codec=tw.codecs.E3M0(8), feedback=tw.pieces.feedback.Feedback(1, 0.5, 1.0), state_dtype="bf16"
    ),
    "low rank with feedback": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 1),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.lab.codecs.LowRank(1),
        feedback=tw.pieces.feedback.Feedback(),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "DeMo's codec": tw.Strategy(
        schedule=tw.pieces.schedule.Every(2),
        codec=tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(4, 2), 2, axes=2), 2),
        feedback=tw.pieces.feedback.Feedback(eta=0.99, beta=0.99),
        outer=tw.pieces.outer.Nesterov(),
    ),
    "over senders, in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(4, 2),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.codecs.ChunkedTopK(32, 4, tw.codecs.Sign(block=4)),
        feedback=tw.pieces.feedback.Feedback(0, 0.95, 0.95),
        exchange=tw.exchange.TwoShot(),
        aggregate=tw.pieces.aggregate.MeanOverSenders(),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "entropy, in the air": replace(
        _IN_THE_AIR,
        codec=tw.lab.codecs.Entropy(tw.codecs.TopK(0.5, tw.codecs.E3M0(8, rounding="stochastic"))),
        feedback=tw.pieces.feedback.Feedback(),
    ),
    "entropy, two shots": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 1),
        codec=tw.lab.codecs.Entropy(tw.codecs.ChunkedTopK(4096, 2048)),
        exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "gradients with feedback": tw.Strategy(
        signal=tw.strategy.Gradients(),
        partition=tw.pieces.partition.BySize(2),
        codec=tw.codecs.TopK(0.5),
        feedback=tw.pieces.feedback.Feedback(),
    ),
    "gradients in fragments, 4 bits": tw.Strategy(
        signal=tw.strategy.Gradients(), partition=tw.pieces.partition.BySize(3), codec=tw.codecs.E3M0(32)
    ),
    "local_sgd in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Every(4, 3), codec=tw.codecs.Cast("fp16"), merge=tw.pieces.merge.Mix(0.25)
    ),
    "three in the air": _THREE,
    "two shots in the air": replace(_THREE, exchange=tw.exchange.TwoShot()),
    "1-bit, both sides": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 1),
        codec=tw.codecs.Sign(),
        feedback=tw.pieces.feedback.Feedback(),
        exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "a whole period late, in fragments": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(4, 4),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.codecs.TopK(0.2),
        feedback=tw.pieces.feedback.Feedback(),
        outer=tw.pieces.outer.Nesterov(0.5, 0.5),
        merge=tw.pieces.merge.Reset(),
    ),
    "ever longer rounds, in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Quadratic(3, 0.06, 1.0, delay=2),
        partition=tw.pieces.partition.Strided(2),
        outer=tw.pieces.outer.Nesterov(0.5, 0.5),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "ever sparser, in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(4, 3),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.codecs.TopK(0.05, tw.codecs.E3M0(8, rounding="stochastic")),
        policy=tw.pieces.policies.DensityWarmup(1, (0.9, 0.3, 0.1)),
        feedback=tw.pieces.feedback.Feedback(),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "codecs by matrix, in the air": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(3, 2),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.lab.codecs.Each(tw.codecs.Sign(), tw.codecs.Cast()),
        policy=tw.lab.gradients.lgreco.LGreCo((tw.codecs.TopK(0.2), tw.codecs.E3M0(8)), alpha=0.7, window=2),
        feedback=tw.pieces.feedback.Feedback(),
        merge=tw.pieces.merge.Mix(0.5),
    ),
    "1-bit after a dense start": tw.Strategy(
        signal=tw.strategy.Gradients(),
        codec=tw.codecs.Sign("l2"),
        policy=tw.pieces.policies.DenseUntil(5),
        feedback=tw.pieces.feedback.Feedback(),
        exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
    ),
    "gradients, all-reduced": tw.Strategy(
        signal=tw.strategy.Gradients(),
        partition=tw.pieces.partition.BySize(2),
        codec=tw.codecs.Cast(),
        exchange=tw.exchange.AllReduce(),
    ),
    "PowerSGD": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 2),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.lab.codecs.LowRank(1),
        feedback=tw.pieces.feedback.Feedback(),
        exchange=tw.exchange.AllReduce(),
        outer=tw.pieces.outer.Nesterov(),
    ),
    "torchft's phase": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(5, 1, tw.pieces.schedule.short_first(5, 3, 1)),
        partition=tw.pieces.partition.BySize(3),
        codec=tw.codecs.Cast(),
        outer=tw.pieces.outer.Nesterov(0.7, 0.5),
    ),
    "keep local": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3), outer=tw.pieces.outer.Nesterov(), merge=tw.pieces.merge.Mix(1.0)
    ),
    "eager, whole": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 3), outer=tw.pieces.outer.Nesterov(0.7, 0.9), merge=tw.pieces.merge.Eager()
    ),
    "eager, no momentum": tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(5, 5),
        partition=tw.pieces.partition.Strided(3),
        codec=tw.codecs.E3M0(),
        outer=tw.pieces.outer.Average(),
        merge=tw.pieces.merge.Eager(),
    ),
    "anchors on the device": tw.Strategy(
        schedule=tw.pieces.schedule.Every(2, 1), outer=tw.pieces.outer.Nesterov(), anchors="device"
    ),
}
# A recipe without a row is tested as it is.
METHODS |= {name: make() for name, make in RECIPES.items() if name not in METHODS | GOSSIP}

# The fast tests already have one of each kind; these are slow only because there are many.
_OF_A_KIND = {"outer_dgc", "ef14", "ef21", "power_sgd", "qsgd", "cgx", "demo", "muloco"}


def each(names: Iterable[str]) -> list[Any]:
    """Returns names of methods for parametrize; only one of each kind is fast."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in _OF_A_KIND else name for name in names]


IN_SITES = {  # by the number of replicas in the sites
    sites: tw.Strategy(
        schedule=tw.pieces.schedule.Staggered(4, 2),
        partition=tw.pieces.partition.Strided(2),
        codec=tw.codecs.Sign(block=8),
        exchange=tw.exchange.Hierarchy(sites, tw.pieces.feedback.Feedback()),
        outer=tw.pieces.outer.Nesterov(),
        merge=tw.pieces.merge.Mix(0.5),
    )
    for sites in ((1, 1), (2, 2))
}
