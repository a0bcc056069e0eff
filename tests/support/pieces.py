"""The claims of each piece of the catalogue, and the forms in which it is tested. A new piece has a row by default.

The inputs of the laws are in thinwire.testing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire.catalogue.parsing import PIECES

# ---- the table


@dataclass(frozen=True)
class Row:
    """An instance and its claims.

    Codecs: `exact` (decodes to what was encoded), `odd` (q(−x) = −q(x)), `idempotent` (q(q(x)) = q(x)), `contractive` (‖q(x) − x‖ ≤ ‖x‖
    on all input), `unbiased` (the mean of q(x) over keys is x), `local` (the values in a block of `block` change nothing in the others),
    `drawn` (the bytes depend on the key, though not unbiased), `refuses` (bytes that no encoding makes raise
    `PacketError`), `shared` (all senders of a round draw the same), and `error`: the maximum of ‖q(x) − x‖² / ‖x‖² on normal numbers, if known.
    Outer steps: `linear` in the deltas, `stateless`.
    Exchanges: `rank order` (of exact values, the sum in rank order to the last bit).
    Aggregates: `linear`.
    Schedules: `steady` (each fragment exactly once in any `every` steps after its first departure).
    """

    piece: Any
    claims: frozenset[str] = frozenset()
    error: float | None = 0.0

    def __str__(self) -> str:
        return repr(self.piece)


def row(piece: Any, *claims: str, error: float | None = 0.0) -> Row:
    return Row(piece, frozenset(claims), error)


def over(names: str, values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `parametrize`, but one test: collecting thousands of cases costs more than running them. A failure names the value."""
    several = [name.strip() for name in names.split(",")]

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        def all_of_them(**arguments: Any) -> None:
            for value in values:
                try:
                    test(**arguments, **dict(zip(several, value if len(several) > 1 else [value])))
                except BaseException as error:
                    error.add_note(f"where {names} is {value!r}")
                    raise

        rest = [p for p in inspect.signature(test).parameters.values() if p.name not in several]
        all_of_them.__signature__ = inspect.Signature(rest)
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        return all_of_them

    return wrap


def grid_error(codec: Any) -> float:
    """Returns the largest share of a block's energy that rounding to nearest can cost. A value errs by a share of itself (most where
    the grid doubles) or by half of the lowest step, and the block's largest value is above half of the grid's largest."""
    grid = codec.grid
    step = grid.normal / 2**grid.mantissa
    largest = grid.largest / (2 if codec.scale == "exponent" else 1.01)
    share = (1 / (2 * 2**grid.mantissa + 1)) ** 2 if grid.largest > grid.normal else 0.0
    return min(1.0, share + codec.block * (step / 2 / largest) ** 2)


NEAREST = ("odd", "contractive", "local")
MATRICES = ((7, 11), (5,), (4, 3, 2), (), (0, 3), (30, 20))
CODECS = [
    row(tw.codecs.Identity(), "exact", "idempotent", *NEAREST),
    row(tw.codecs.Cast("bf16"), "idempotent", *NEAREST, error=2.0**-16),
    row(tw.codecs.Cast("fp16"), "idempotent", *NEAREST, "saturates at 65504", error=2.0**-22),
    *(
        row(codec, "idempotent", *NEAREST, error=grid_error(codec))
        for codec in (
            *(tw.codecs.E3M0(block) for block in (2, 32, 128, 4096)),
            *(
                tw.codecs.E3M0(64, "bf16"),
                tw.codecs.E2M1(),
                tw.codecs.E2M1(32, "bf16"),
                tw.codecs.E4M3(),
                tw.codecs.E5M2(4096),
                tw.codecs.E5M2(1, "bf16"),
            ),
            *(tw.codecs.Int(8), tw.codecs.Int(4, 64, "bf16"), tw.codecs.Int(2, 4)),
        )
    ),
    *(
        row(codec, *NEAREST, error=grid_error(codec))
        for codec in (
            tw.codecs.E3M0(64, "fp32"),
            tw.codecs.E4M3(1000, "fp32"),
            tw.codecs.Int(8, 1, "bf16"),
            tw.codecs.Int(8, 7, "fp32"),
        )
    ),
    *(
        row(codec, "odd", "local", "unbiased", error=4 * codec.block)
        for codec in (
            *(
                tw.codecs.E3M0(32, rounding="stochastic"),
                tw.codecs.E2M1(128, "bf16", "stochastic"),
                tw.codecs.E4M3(rounding="stochastic"),
            ),
            *(
                tw.codecs.E5M2(64, "fp32", "stochastic"),
                tw.codecs.Int(4, 32, "bf16", "stochastic"),
                tw.codecs.Int(2, 16, "fp32", "stochastic"),
            ),
        )
    ),
    *(
        row(codec, "idempotent", "local", *claims, error=codec.block / 2 / (2**codec.bits - 1) ** 2)
        for codec, claims in (
            (tw.lab.codecs.Levels(4, 64), ("contractive",)),
            (tw.lab.codecs.Levels(3, 8), ("contractive",)),
            (tw.lab.codecs.Levels(1, 8), ()),
        )
    ),
    row(tw.codecs.Sign(), "contractive", error=1.0),
    row(tw.codecs.Sign(block=33), "contractive", "local", error=1.0),
    row(tw.codecs.Sign("l2", 128), "local", error=2.0),
    row(tw.codecs.TopK(1.0, tw.codecs.Identity()), "exact", "odd", "contractive", "idempotent", "refuses"),
    row(tw.codecs.TopK(0.3), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.codecs.TopK(0.05, tw.codecs.E3M0(32)), "odd", "contractive", "refuses", error=1.0),
    row(tw.codecs.ChunkedTopK(), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.codecs.ChunkedTopK(60, 7, tw.codecs.Sign()), "contractive", "refuses", error=1.0),
    row(tw.codecs.RandomK(0.25, tw.codecs.Identity()), "odd", "unbiased", "shared", error=9.0),
    row(tw.codecs.RandomK(1.0, tw.codecs.Identity()), "exact", "odd", "contractive", "idempotent"),
    row(tw.codecs.RandomK(0.5, tw.codecs.Int(8, 32, "fp32", "stochastic")), "odd", "unbiased", error=4.0),
    row(tw.lab.codecs.OverSenders(tw.codecs.TopK(0.3)), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.codecs.Codebook(), "contractive", error=1.0),
    row(tw.codecs.ChunkedTopK(60, 7, tw.codecs.Codebook()), "contractive", "refuses", error=1.0),
    row(tw.codecs.DCT(tw.codecs.Identity()), "odd", "contractive", error=1e-12),
    row(tw.codecs.DCT(tw.codecs.E3M0(32), 16, axes=2), "odd", "contractive", error=grid_error(tw.codecs.E3M0(32))),
    row(tw.codecs.DCT(tw.codecs.ChunkedTopK(60, 7), 20), "odd", "contractive", "refuses", error=1.0),
    row(tw.codecs.Hadamard(tw.codecs.Identity(), 64), "odd", "contractive", "drawn", "shared", error=1e-14),
    row(
        tw.codecs.Hadamard(tw.codecs.Int(4, 32)),
        "odd",
        "contractive",
        "drawn",
        "shared",
        error=grid_error(tw.codecs.Int(4, 32)),
    ),
    row(tw.codecs.Hadamard(tw.codecs.Int(2, 8, "fp32", "stochastic"), 8), "odd", "unbiased", error=40.0),
    row(tw.codecs.Squares(tw.codecs.Identity(), 3, MATRICES), "exact", "odd", "contractive", "idempotent"),
    row(
        tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(16, 3), 4, axes=2), 4, MATRICES),
        "odd",
        "contractive",
        "refuses",
        error=1.0,
    ),
    row(
        tw.lab.codecs.LowRank(), "exact", "odd", "contractive", "idempotent"
    ),  # no shape is known, so nothing is a matrix
    row(tw.lab.codecs.LowRank(1, shapes=MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(tw.lab.codecs.LowRank(3, 2, tw.codecs.E2M1(8), MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(tw.lab.codecs.LowRank(2, 1, tw.codecs.Cast(), MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(
        tw.lab.codecs.Each(tw.codecs.RandomK(0.5, tw.codecs.Identity()), tw.codecs.Identity(), 20, MATRICES),
        "odd",
        "unbiased",
        "shared",
        error=4.0,
    ),
    # No shape is known, so nothing is a matrix.
    row(tw.lab.codecs.Each(tw.codecs.Sign()), "exact", "odd", "contractive", "idempotent"),
    row(
        tw.lab.codecs.Each(tw.codecs.TopK(0.3), shapes=MATRICES),
        "odd",
        "contractive",
        "idempotent",
        "refuses",
        error=1.0,
    ),
    row(tw.lab.codecs.Each(tw.codecs.Sign(), tw.codecs.Cast(), 30, MATRICES), "contractive", error=1.0),
    row(tw.lab.codecs.Each(tw.codecs.Int(4, 8, "fp32", "stochastic"), shapes=MATRICES), "odd", "unbiased", error=4.0),
    row(
        tw.lab.codecs.Each(
            tw.codecs.Sign(), shapes=MATRICES, chosen=(tw.codecs.E3M0(8), tw.codecs.Sign(), tw.codecs.Int(8))
        ),
        "contractive",
        error=1.0,
    ),
    *(
        row(tw.lab.codecs.Levelled(codecs, level), "refuses", *claims, error=error)
        for codecs, level, claims, error in (
            (
                (tw.codecs.Int(8), tw.codecs.E3M0(32)),
                0,
                ("odd", "contractive", "idempotent"),
                grid_error(tw.codecs.Int(8)),
            ),
            ((tw.codecs.Cast(), tw.codecs.E3M0(), tw.codecs.Sign(block=64)), 2, ("contractive",), 1.0),
        )
    ),
    *(
        row(tw.lab.codecs.Entropy(inner), "refuses", *claims, error=error)
        for inner, claims, error in (
            (tw.codecs.Identity(), ("exact", "odd", "contractive", "idempotent"), 0.0),
            (tw.codecs.Cast(), ("odd", "contractive", "idempotent"), 2.0**-16),
            (tw.codecs.E3M0(), ("odd", "contractive", "idempotent"), grid_error(tw.codecs.E3M0())),
            (tw.codecs.E3M0(32, rounding="stochastic"), ("odd", "unbiased"), 128),
            (tw.codecs.Sign(), ("contractive",), 1.0),
            (tw.codecs.TopK(0.05, tw.codecs.E3M0(32)), ("odd", "contractive"), 1.0),
            (tw.codecs.ChunkedTopK(60, 7), ("odd", "contractive", "idempotent"), 1.0),
            (tw.lab.codecs.OverSenders(tw.codecs.ChunkedTopK(60, 7, tw.codecs.Codebook())), ("contractive",), 1.0),
            (tw.codecs.RandomK(0.25, tw.codecs.Identity()), ("odd", "unbiased", "shared"), 9.0),
            (tw.lab.codecs.Each(tw.codecs.TopK(0.3), shapes=MATRICES), ("odd", "contractive", "idempotent"), 1.0),
            (
                tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(16, 3), 4, axes=2), 4, MATRICES),
                ("odd", "contractive"),
                1.0,
            ),
        )
    ),
]
SCHEDULES = [
    row(tw.pieces.schedule.Every(1), "steady"),
    row(tw.pieces.schedule.Every(7, 3), "steady"),
    row(tw.pieces.schedule.Staggered(12), "steady"),
    row(tw.pieces.schedule.Staggered(10, 9), "steady"),
    row(tw.pieces.schedule.Staggered(7, 2, tw.pieces.schedule.short_first(7, 3, 2)), "steady"),
    row(tw.pieces.schedule.Staggered(2), "steady"),
    row(tw.pieces.schedule.Quadratic(4, 0.0175)),
    row(tw.pieces.schedule.Quadratic(2, 0.5, 1.0, delay=1)),
]
PARTITIONS = [
    row(tw.pieces.partition.Whole()),
    row(tw.pieces.partition.Strided()),
    row(tw.pieces.partition.Strided(2)),
    row(tw.pieces.partition.Sequential(2)),
    row(tw.pieces.partition.Sequential(3, layers="layers")),
    row(tw.pieces.partition.BySize(3)),
]
OUTERS = [
    row(tw.pieces.outer.Average(), "linear", "stateless"),
    row(tw.pieces.outer.Nesterov(), "linear"),
    row(tw.pieces.outer.Nesterov(2.0, 0.0), "linear", "stateless"),
    row(tw.pieces.outer.DelayedNesterov(0.7, 0.6, updates=3), "linear"),
    row(tw.pieces.outer.HeavyBall(0.7, 0.6), "linear"),
    row(tw.pieces.outer.HeavyBall(0.7, 0.6, gap=1.0)),
    row(tw.pieces.outer.HeavyBall(clip=0.05)),
]
WEIGHS = [row(tw.pieces.staleness.ByTokens()), row(tw.pieces.staleness.ByTokens(0.0)), row(tw.pieces.staleness.Alike())]
CORRECTS = [row(tw.pieces.staleness.HeLoCo()), row(tw.pieces.staleness.HeLoCo(0.5))]
MERGES = [
    row(tw.pieces.merge.Mix()),
    row(tw.pieces.merge.Mix(0.5)),
    row(tw.pieces.merge.Mix(1.0)),
    row(tw.pieces.merge.Keep()),
    row(tw.pieces.merge.KeepUnsent()),
    row(tw.pieces.merge.Eager()),
    row(tw.pieces.merge.Reset()),
]
EXCHANGES = [
    row(tw.exchange.Direct(), "rank order"),
    row(tw.exchange.TwoShot(), "rank order"),
    row(tw.exchange.TwoShot(tw.pieces.feedback.Feedback()), "rank order"),
    row(tw.exchange.AllReduce(), "rank order"),
    row(tw.lab.star.exchange.Star(), "rank order"),
    row(tw.lab.star.exchange.Star(1, tw.pieces.feedback.Feedback()), "rank order"),
    row(tw.exchange.Hierarchy((2, 1))),
    row(tw.exchange.Hierarchy(((3, 0), (2, 1)))),
    row(tw.exchange.Hierarchy((1, 1, 3), tw.pieces.feedback.Feedback())),
    row(tw.exchange.Hierarchy((4,))),
    row(tw.lab.fastest.Fastest("20mbit,40ms"), "rank order"),
    row(tw.lab.fastest.Fastest("1mbit", (tw.exchange.TwoShot(), tw.exchange.Direct())), "rank order"),
]
AGGREGATES = [row(tw.pieces.aggregate.Mean(), "linear"), row(tw.pieces.aggregate.MeanOverSenders())]
SIGNALS = [row(tw.strategy.Deltas()), row(tw.strategy.Gradients())]
# tests/lab/test_privacy.py holds its own laws
PRIVACIES = [
    row(tw.lab.privacy.Privacy()),
    row(tw.lab.privacy.Privacy(0.25, 10.0, 1e-6)),
]
FEEDBACKS = [
    row(tw.pieces.feedback.Feedback(), "conserves"),
    row(tw.pieces.feedback.Feedback(0, 0.95, 0.95)),
    row(tw.pieces.feedback.Feedback(1, 0.0)),
    row(tw.pieces.feedback.Feedback(1, 0.3, 1.0), "conserves"),
    row(tw.pieces.feedback.Feedback(1, 0.0, alpha=0.5)),
]
POLICIES = [
    row(tw.pieces.policy.Constant()),
    row(tw.pieces.policies.DenseLast()),
    row(tw.pieces.policies.DenseUntil(3)),
    row(tw.pieces.policies.DenseUntil(1, tw.codecs.Cast())),
    row(tw.pieces.policies.DensityWarmup(2)),
    row(tw.pieces.policies.DensityWarmup(1, (0.9, 0.5), tw.codecs.Cast("fp16"))),
    row(tw.lab.gradients.lgreco.LGreCo(), "decides"),
    row(tw.lab.gradients.lgreco.LGreCo((tw.codecs.Int(2, 4), tw.codecs.Int(8)), 2.0, 3), "decides"),
]
# `passes` (with a codec that drops nothing, the estimate is the mean of the signals), `agreed` (its state is the same on all replicas)
FILTERS = [
    row(tw.pieces.transforms.Clip(0.0), "passes", "agreed"),
    row(tw.pieces.transforms.Clip(1.0), "agreed"),
    row(tw.pieces.transforms.Momentum(0.9), "passes"),  # everything is sent, so everything is cleared
    row(tw.pieces.transforms.Momentum(0.5, "nothing")),
    row(tw.pieces.transforms.Moments(freeze=3), "agreed"),
    row(tw.pieces.transforms.Moments(beta2=0.5, freeze=tw.pieces.transforms.Settled(0.5, 2)), "agreed"),
    row(tw.pieces.transforms.Signs(), "agreed"),
]
TOPOLOGIES = [
    *(
        row(tw.lab.topology.Complete()),
        row(tw.lab.topology.Ring()),
        row(tw.lab.topology.Mesh()),
        row(tw.lab.topology.Torus(2)),
    ),
    *(
        row(tw.lab.topology.Exponential()),
        row(tw.lab.topology.OnePeerExponential()),
        row(tw.lab.topology.RandomPairs()),
    ),
    *(row(tw.lab.topology.RandomGroups(4)), row(tw.lab.topology.MoshpitGrid(2)), row(tw.lab.topology.MoshpitGrid())),
    *(
        row(tw.lab.topology.RandomRegular(3)),
        row(tw.lab.topology.ErdosRenyi(0.9)),
        row(tw.lab.topology.BarabasiAlbert(2)),
    ),
    row(tw.lab.topology.Listed(((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)))),
    row(tw.lab.topology.Cut(tw.lab.topology.Ring(), 2, 4)),
]
RULES = [
    *(row(tw.lab.gossip.rules.AdaptThenCombine()), row(tw.lab.gossip.rules.CombineThenAdapt())),
    *(
        row(tw.lab.gossip.rules.NoLoCo()),
        row(tw.lab.gossip.rules.NoLoCo(0.3, 0.7, 0.5)),
        row(tw.lab.gossip.rules.Choco()),
    ),
    *(row(tw.lab.gossip.rules.PushSum()), row(tw.lab.gossip.rules.Tracking()), row(tw.lab.gossip.mgs.MGS(steps=2))),
    *(
        row(tw.lab.gossip.trust.Bristle()),
        row(tw.lab.gossip.trust.SybilWall()),
        row(tw.lab.gossip.trust.SybilWall(64, 1, 2.0)),
    ),
    row(tw.lab.gossip.gasloc.GASLoC(0.5)),
]
INNERS = [
    row(tw.pieces.inner_optimizers.AdamW()),
    row(tw.pieces.inner_optimizers.SGD(0.9, 10.0)),
    row(tw.pieces.inner_optimizers.Muon()),
    row(tw.pieces.inner_optimizers.SAM(tw.pieces.inner_optimizers.SGD(0.9), 0.05)),
]


def missing(table: list[Row], protocol: type) -> list[Row]:
    """Returns a row for each piece of the catalogue without one in `table`: its default instance, with the claims that it declares."""
    there = {type(one.piece) for one in table}
    made = [
        piece()
        for piece in PIECES.values()
        if protocol in piece.__mro__ and piece not in there | {tw.lab.gossip.exchange.Gossip}
    ]
    return [row(piece, *getattr(piece, "claims", ()), error=None) for piece in made]


for table, protocol in (
    *(
        (CODECS, tw.codecs.Codec),
        (OUTERS, tw.pieces.outer.Outer),
        (MERGES, tw.pieces.merge.Merge),
        (EXCHANGES, tw.exchange.Exchange),
        (FILTERS, tw.pieces.filters.Filter),
    ),
    *((POLICIES, tw.pieces.policy.Policy), (AGGREGATES, tw.pieces.aggregate.Aggregate)),
):
    table += missing(table, protocol)
TABLE = [
    *(*POLICIES, *FEEDBACKS, *CODECS, *SCHEDULES, *PARTITIONS, *OUTERS, *MERGES, *EXCHANGES, *AGGREGATES, *SIGNALS),
    *(
        row(tw.pieces.guard.Guard()),
        *PRIVACIES,
        *FILTERS,
        *WEIGHS,
        *CORRECTS,
        row(tw.pieces.transforms.Settled()),
        *INNERS,
        *TOPOLOGIES,
        *RULES,
    ),
    row(tw.lab.gossip.exchange.Gossip(tw.lab.topology.Ring(), tw.lab.gossip.rules.AdaptThenCombine())),
]


# ---- pieces that misbehave


@dataclass(frozen=True)
class Picky(tw.pieces.outer.Outer):
    """An outer step that overflows on the first small delta: no replica can land such a round, though every packet is sound."""

    at_least: float
    linear = True

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(())}

    def step(self, anchor: Tensor, delta: Tensor, state: Any) -> tuple[Tensor, Any]:
        moved = anchor - delta if delta.abs().max() >= self.at_least else anchor * torch.inf
        return moved, {"rounds": state["rounds"] + 1}
