"""What each piece of the catalogue claims, and in which forms it is tried. A new one has a row by itself.

What the laws are tried on stands in thinwire.testing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.parsing import PIECES
from thinwire.recipes import RECIPES

# ---- the table


@dataclass(frozen=True)
class Row:
    """An instance and its claims.

    Codecs: `exact` (decodes to what was encoded), `odd` (q(−x) = −q(x)), `idempotent` (q(q(x)) = q(x)), `contractive` (‖q(x) − x‖ ≤ ‖x‖
    on all input), `unbiased` (the mean of q(x) over keys is x), `local` (what a block of `block` holds changes nothing in the others),
    `drawn` (the bytes depend on the key, though not unbiased), `refuses` (bytes that no encoding makes are a
    `PacketError`), `shared` (all senders of a round draw alike), and `error`: the most of ‖q(x) − x‖² / ‖x‖² on normal numbers, if it is known.
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


def over(name: str, values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `parametrize`, but one test: thousands of them cost more than what they try. A failure says for which value."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        def all_of_them(**arguments: Any) -> None:
            for value in values:
                try:
                    test(**arguments, **{name: value})
                except BaseException as error:
                    error.add_note(f"where {name} is {value!r}")
                    raise

        rest = [p for p in inspect.signature(test).parameters.values() if p.name != name]
        all_of_them.__signature__ = inspect.Signature(rest)
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        return all_of_them

    return wrap


def grid_error(codec: Any) -> float:
    """The most of a block's energy that rounding to the nearest can cost: of each value, as a share of itself (widest where the
    grid doubles) or as half of its lowest step; the block's largest is above half of the grid's."""
    grid = codec.grid
    step = grid.normal / 2**grid.mantissa
    largest = grid.largest / (2 if codec.scale == "exponent" else 1.01)
    share = (1 / (2 * 2**grid.mantissa + 1)) ** 2 if grid.largest > grid.normal else 0.0
    return min(1.0, share + codec.block * (step / 2 / largest) ** 2)


NEAREST = ("odd", "contractive", "local")
MATRICES = ((7, 11), (5,), (4, 3, 2), (), (0, 3), (30, 20))
CODECS = [
    row(tw.Identity(), "exact", "idempotent", *NEAREST),
    row(tw.Cast("bf16"), "idempotent", *NEAREST, error=2.0**-16),
    row(tw.Cast("fp16"), "idempotent", *NEAREST, "saturates at 65504", error=2.0**-22),
    *(
        row(codec, "idempotent", *NEAREST, error=grid_error(codec))
        for codec in (
            *(tw.E3M0(block) for block in (2, 32, 128, 4096)),
            *(tw.E3M0(64, "bf16"), tw.E2M1(), tw.E2M1(32, "bf16"), tw.E4M3(), tw.E5M2(4096), tw.E5M2(1, "bf16")),
            *(tw.Int(8), tw.Int(4, 64, "bf16"), tw.Int(2, 4)),
        )
    ),
    *(
        row(codec, *NEAREST, error=grid_error(codec))
        for codec in (tw.E3M0(64, "fp32"), tw.E4M3(1000, "fp32"), tw.Int(8, 1, "bf16"), tw.Int(8, 7, "fp32"))
    ),
    *(
        row(codec, "odd", "local", "unbiased", error=4 * codec.block)
        for codec in (
            *(tw.E3M0(32, rounding="stochastic"), tw.E2M1(128, "bf16", "stochastic"), tw.E4M3(rounding="stochastic")),
            *(
                tw.E5M2(64, "fp32", "stochastic"),
                tw.Int(4, 32, "bf16", "stochastic"),
                tw.Int(2, 16, "fp32", "stochastic"),
            ),
        )
    ),
    *(
        row(codec, "idempotent", "local", *claims, error=codec.block / 2 / (2**codec.bits - 1) ** 2)
        for codec, claims in (
            (tw.Levels(4, 64), ("contractive",)),
            (tw.Levels(3, 8), ("contractive",)),
            (tw.Levels(1, 8), ()),
        )
    ),
    row(tw.Sign(), "contractive", error=1.0),
    row(tw.Sign(block=33), "contractive", "local", error=1.0),
    row(tw.Sign("l2", 128), "local", error=2.0),
    row(tw.TopK(1.0, tw.Identity()), "exact", "odd", "contractive", "idempotent", "refuses"),
    row(tw.TopK(0.3), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.TopK(0.05, tw.E3M0(32)), "odd", "contractive", "refuses", error=1.0),
    row(tw.ChunkedTopK(), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.ChunkedTopK(60, 7, tw.Sign()), "contractive", "refuses", error=1.0),
    row(tw.RandomK(0.25, tw.Identity()), "odd", "unbiased", "shared", error=9.0),
    row(tw.RandomK(1.0, tw.Identity()), "exact", "odd", "contractive", "idempotent"),
    row(tw.RandomK(0.5, tw.Int(8, 32, "fp32", "stochastic")), "odd", "unbiased", error=4.0),
    row(tw.OverSenders(tw.TopK(0.3)), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.Codebook(), "contractive", error=1.0),
    row(tw.ChunkedTopK(60, 7, tw.Codebook()), "contractive", "refuses", error=1.0),
    row(tw.DCT(tw.Identity()), "odd", "contractive", error=1e-12),
    row(tw.DCT(tw.E3M0(32), 16, axes=2), "odd", "contractive", error=grid_error(tw.E3M0(32))),
    row(tw.DCT(tw.ChunkedTopK(60, 7), 20), "odd", "contractive", "refuses", error=1.0),
    row(tw.Hadamard(tw.Identity(), 64), "odd", "contractive", "drawn", "shared", error=1e-14),
    row(tw.Hadamard(tw.Int(4, 32)), "odd", "contractive", "drawn", "shared", error=grid_error(tw.Int(4, 32))),
    row(tw.Hadamard(tw.Int(2, 8, "fp32", "stochastic"), 8), "odd", "unbiased", error=40.0),
    row(tw.Squares(tw.Identity(), 3, MATRICES), "exact", "odd", "contractive", "idempotent"),
    row(tw.Squares(tw.DCT(tw.ChunkedTopK(16, 3), 4, axes=2), 4, MATRICES), "odd", "contractive", "refuses", error=1.0),
    row(tw.LowRank(), "exact", "odd", "contractive", "idempotent"),  # nothing is known to be a matrix
    row(tw.LowRank(1, shapes=MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(tw.LowRank(3, 2, tw.E2M1(8), MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(tw.LowRank(2, 1, tw.Cast(), MATRICES), "odd", "contractive", "drawn", "shared", error=1.0),
    row(
        tw.Each(tw.RandomK(0.5, tw.Identity()), tw.Identity(), 20, MATRICES),
        "odd",
        "unbiased",
        "shared",
        error=4.0,
    ),
    row(tw.Each(tw.Sign()), "exact", "odd", "contractive", "idempotent"),  # nothing is known to be a matrix
    row(tw.Each(tw.TopK(0.3), shapes=MATRICES), "odd", "contractive", "idempotent", "refuses", error=1.0),
    row(tw.Each(tw.Sign(), tw.Cast(), 30, MATRICES), "contractive", error=1.0),
    row(tw.Each(tw.Int(4, 8, "fp32", "stochastic"), shapes=MATRICES), "odd", "unbiased", error=4.0),
    row(tw.Each(tw.Sign(), shapes=MATRICES, chosen=(tw.E3M0(8), tw.Sign(), tw.Int(8))), "contractive", error=1.0),
]
SCHEDULES = [
    row(tw.Every(1), "steady"),
    row(tw.Every(7, 3), "steady"),
    row(tw.Staggered(12), "steady"),
    row(tw.Staggered(10, 9), "steady"),
    row(tw.Staggered(7, 2, tw.short_first(7, 3, 2)), "steady"),
    row(tw.Staggered(2), "steady"),
    row(tw.Quadratic(4, 0.0175)),
    row(tw.Quadratic(2, 0.5, 1.0, delay=1)),
]
PARTITIONS = [
    row(tw.Whole()),
    row(tw.Strided()),
    row(tw.Strided(2)),
    row(tw.Sequential(2)),
    row(tw.Sequential(3, layers="layers")),
    row(tw.BySize(3)),
]
OUTERS = [
    row(tw.Average(), "linear", "stateless"),
    row(tw.Nesterov(), "linear"),
    row(tw.Nesterov(2.0, 0.0), "linear", "stateless"),
    row(tw.HeavyBall(0.7, 0.6), "linear"),
    row(tw.HeavyBall(0.7, 0.6, gap=1.0)),
    row(tw.HeavyBall(clip=0.05)),
]
MERGES = [row(tw.Mix()), row(tw.Mix(0.5)), row(tw.Mix(1.0)), row(tw.Eager()), row(tw.Reset())]
EXCHANGES = [
    row(tw.Direct(), "rank order"),
    row(tw.TwoShot(), "rank order"),
    row(tw.TwoShot(tw.Feedback()), "rank order"),
    row(tw.AllReduce(), "rank order"),
    row(tw.Hierarchy((2, 1))),
    row(tw.Hierarchy(((3, 0), (2, 1)))),
    row(tw.Hierarchy((1, 1, 3), tw.Feedback())),
    row(tw.Hierarchy((4,))),
    row(tw.Fastest("20mbit,40ms"), "rank order"),
    row(tw.Fastest("1mbit", (tw.TwoShot(), tw.Direct())), "rank order"),
]
AGGREGATES = [row(tw.Mean(), "linear"), row(tw.MeanOverSenders())]
SIGNALS = [row(tw.Deltas()), row(tw.Gradients())]
PRIVACIES = [row(tw.Privacy()), row(tw.Privacy(0.25, 10.0, 1e-6))]  # its own laws: tests/pieces/test_privacy.py
FEEDBACKS = [
    row(tw.Feedback(), "conserves"),
    row(tw.Feedback(0, 0.95, 0.95)),
    row(tw.Feedback(1, 0.0)),
    row(tw.Feedback(1, 0.3, 1.0), "conserves"),
    row(tw.Feedback(1, 0.0, alpha=0.5)),
]
POLICIES = [
    row(tw.Constant()),
    row(tw.DenseUntil(3)),
    row(tw.DenseUntil(1, tw.Cast())),
    row(tw.DensityWarmup(2)),
    row(tw.DensityWarmup(1, (0.9, 0.5), tw.Cast("fp16"))),
    row(tw.LGreCo(), "decides"),
    row(tw.LGreCo((tw.Int(2, 4), tw.Int(8)), 2.0, 3), "decides"),
]
# `passes` (with a codec that drops nothing the estimate is the mean of the signals), `agreed` (its state is the same on all replicas)
FILTERS = [
    row(tw.Clip(0.0), "passes", "agreed"),
    row(tw.Clip(1.0), "agreed"),
    row(tw.Momentum(0.9), "passes"),  # what was all sent is all cleared
    row(tw.Momentum(0.5, "nothing")),
    row(tw.Moments(freeze=3), "agreed"),
    row(tw.Moments(beta2=0.5, freeze=tw.Settled(0.5, 2)), "agreed"),
    row(tw.Signs(), "agreed"),
]
INNERS = [row(tw.AdamW()), row(tw.SGD(0.9, 10.0)), row(tw.Muon())]


def missing(table: list[Row], protocol: type) -> list[Row]:
    """A row for each piece of the catalogue that has none in `table`: as it is made without arguments, with what it claims."""
    there = {type(row.piece) for row in table}
    made = [piece() for piece in PIECES.values() if protocol in piece.__mro__ and piece not in there]
    return [row(piece, *getattr(piece, "claims", ()), error=None) for piece in made]


for table, protocol in (
    *((CODECS, tw.Codec), (OUTERS, tw.Outer), (MERGES, tw.Merge), (EXCHANGES, tw.Exchange), (FILTERS, tw.Filter)),
    *((POLICIES, tw.Policy), (AGGREGATES, tw.Aggregate)),
):
    table += missing(table, protocol)
TABLE = [
    *(*POLICIES, *FEEDBACKS, *CODECS, *SCHEDULES, *PARTITIONS, *OUTERS, *MERGES, *EXCHANGES, *AGGREGATES, *SIGNALS),
    *(*PRIVACIES, *FILTERS, row(tw.Settled()), *INNERS),
]

METHODS: dict[str, tw.Strategy] = {
    # every recipe under its own name, short enough for a test
    "data_parallel": RECIPES["data_parallel"](),
    "local_sgd": RECIPES["local_sgd"](every=3),
    "diloco": RECIPES["diloco"](every=4),
    "streaming_diloco": RECIPES["streaming_diloco"](every=6, fragments=2, delay=2),
    "finetune": RECIPES["finetune"](every=6, fragments=2, delay=1),
    "eager_diloco": RECIPES["eager_diloco"](every=4, fragments=2),
    "sparse_loco": RECIPES["sparse_loco"](every=4, codec=tw.ChunkedTopK(32, 4, tw.Sign(block=4))),
    "dgc": RECIPES["dgc"](density=0.2, codec=tw.Each(tw.TopK(0.2), least=10)),
    "outer_dgc": RECIPES["outer_dgc"](every=3, codec=tw.Each(tw.TopK(0.2), least=10)),
    "one_bit_adam": RECIPES["one_bit_adam"](freeze=4, codec=tw.Sign("l2", 16)),
    "ef14": RECIPES["ef14"](codec=tw.TopK(0.2)),
    "ef21": RECIPES["ef21"](codec=tw.TopK(0.2)),
    "econtrol": RECIPES["econtrol"](codec=tw.TopK(0.2)),
    "power_sgd": RECIPES["power_sgd"](rank=1),
    "qsgd": RECIPES["qsgd"](codec=tw.Int(4, 16, "fp32", "stochastic")),
    "cgx": RECIPES["cgx"](codec=tw.Each(tw.Levels(4, 16), least=10)),
    "demo": RECIPES["demo"](codec=tw.Squares(tw.DCT(tw.OverSenders(tw.ChunkedTopK(4, 2)), 2, axes=2), 2)),
    "muloco": RECIPES["muloco"](every=4),
    "qsr": RECIPES["qsr"](every=2, scale=0.02),
    "co2": RECIPES["co2"](every=3, outer_lr=0.9, outer_momentum=0.4, clip=0.1),
    "l_greco": RECIPES["l_greco"](
        every=3, codec=tw.Each(tw.TopK(0.3)), candidates=(tw.TopK(0.1), tw.TopK(0.6)), window=2
    ),
    # what the recipes leave out
    "feedback in the air": tw.Strategy(
        schedule=tw.Staggered(6, 3),
        partition=tw.Strided(2),
        codec=tw.TopK(0.1, tw.E3M0(8, rounding="stochastic")),
        feedback=tw.Feedback(1, 0.5, 1.0),
        outer=tw.Nesterov(),
        merge=tw.Mix(0.5),
        seed=3,
    ),
    "low rank with feedback": tw.Strategy(
        schedule=tw.Every(3, 1), partition=tw.Strided(2), codec=tw.LowRank(1), feedback=tw.Feedback(), merge=tw.Mix(0.5)
    ),
    "DeMo's codec": tw.Strategy(
        schedule=tw.Every(2),
        codec=tw.Squares(tw.DCT(tw.ChunkedTopK(4, 2), 2, axes=2), 2),
        feedback=tw.Feedback(eta=0.99, beta=0.99),
        outer=tw.Nesterov(),
    ),
    "over senders, in the air": tw.Strategy(
        schedule=tw.Staggered(4, 2),
        partition=tw.Strided(2),
        codec=tw.ChunkedTopK(32, 4, tw.Sign(block=4)),
        feedback=tw.Feedback(0, 0.95, 0.95),
        exchange=tw.TwoShot(),
        aggregate=tw.MeanOverSenders(),
        merge=tw.Mix(0.5),
    ),
    "gradients with feedback": tw.Strategy(
        signal=tw.Gradients(), partition=tw.BySize(2), codec=tw.TopK(0.5), feedback=tw.Feedback()
    ),
    "gradients in fragments, 4 bits": tw.Strategy(signal=tw.Gradients(), partition=tw.BySize(3), codec=tw.E3M0(32)),
    "local_sgd in the air": tw.Strategy(schedule=tw.Every(4, 3), codec=tw.Cast("fp16"), merge=tw.Mix(0.25)),
    "three in the air": tw.Strategy(
        schedule=tw.Staggered(6, 5),
        partition=tw.Sequential(3),
        codec=tw.E3M0(4),
        outer=tw.Nesterov(),
        merge=tw.Mix(0.5),
    ),
    "two shots in the air": tw.Strategy(
        schedule=tw.Staggered(6, 5),
        partition=tw.Sequential(3),
        codec=tw.E3M0(4),
        exchange=tw.TwoShot(),
        outer=tw.Nesterov(),
        merge=tw.Mix(0.5),
    ),
    "1-bit, both sides": tw.Strategy(
        schedule=tw.Every(3, 1),
        codec=tw.Sign(),
        feedback=tw.Feedback(),
        exchange=tw.TwoShot(tw.Feedback()),
        merge=tw.Mix(0.5),
    ),
    "a whole period late, in fragments": tw.Strategy(
        schedule=tw.Staggered(4, 4),
        partition=tw.Strided(2),
        codec=tw.TopK(0.2),
        feedback=tw.Feedback(),
        outer=tw.Nesterov(0.5, 0.5),
        merge=tw.Reset(),
    ),
    "ever longer rounds, in the air": tw.Strategy(
        schedule=tw.Quadratic(3, 0.06, 1.0, delay=2),
        partition=tw.Strided(2),
        outer=tw.Nesterov(0.5, 0.5),
        merge=tw.Mix(0.5),
    ),
    "ever sparser, in the air": tw.Strategy(
        schedule=tw.Staggered(4, 3),
        partition=tw.Strided(2),
        codec=tw.TopK(0.05, tw.E3M0(8, rounding="stochastic")),
        policy=tw.DensityWarmup(1, (0.9, 0.3, 0.1)),
        feedback=tw.Feedback(),
        merge=tw.Mix(0.5),
    ),
    "codecs by matrix, in the air": tw.Strategy(
        schedule=tw.Staggered(3, 2),
        partition=tw.Strided(2),
        codec=tw.Each(tw.Sign(), tw.Cast()),
        policy=tw.LGreCo((tw.TopK(0.2), tw.E3M0(8)), alpha=0.7, window=2),
        feedback=tw.Feedback(),
        merge=tw.Mix(0.5),
    ),
    "1-bit after a dense start": tw.Strategy(
        signal=tw.Gradients(),
        codec=tw.Sign("l2"),
        policy=tw.DenseUntil(5),
        feedback=tw.Feedback(),
        exchange=tw.TwoShot(tw.Feedback()),
    ),
    "gradients, all-reduced": tw.Strategy(
        signal=tw.Gradients(), partition=tw.BySize(2), codec=tw.Cast(), exchange=tw.AllReduce()
    ),
    "PowerSGD": tw.Strategy(
        schedule=tw.Every(3, 2),
        partition=tw.Strided(2),
        codec=tw.LowRank(1),
        feedback=tw.Feedback(),
        exchange=tw.AllReduce(),
        outer=tw.Nesterov(),
    ),
    "torchft's phase": tw.Strategy(
        schedule=tw.Staggered(5, 1, tw.short_first(5, 3, 1)),
        partition=tw.BySize(3),
        codec=tw.Cast(),
        outer=tw.Nesterov(0.7, 0.5),
    ),
    "keep local": tw.Strategy(schedule=tw.Every(3), outer=tw.Nesterov(), merge=tw.Mix(1.0)),
    "eager, whole": tw.Strategy(schedule=tw.Every(3, 3), outer=tw.Nesterov(0.7, 0.9), merge=tw.Eager()),
    "eager, no momentum": tw.Strategy(
        schedule=tw.Staggered(5, 5), partition=tw.Strided(3), codec=tw.E3M0(), outer=tw.Average(), merge=tw.Eager()
    ),
    "anchors on the device": tw.Strategy(schedule=tw.Every(2, 1), outer=tw.Nesterov(), anchors="device"),
}

# Of these the kind is in the fast tests already; they are slow by their number only.
_OF_A_KIND = {"outer_dgc", "ef14", "ef21", "power_sgd", "qsgd", "cgx", "demo", "muloco"}


def each(names: Iterable[str]) -> list[Any]:
    """Names of methods to parametrize with; of a kind only one is fast."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in _OF_A_KIND else name for name in names]


IN_SITES = {  # for so many replicas as there are in the sites
    sites: tw.Strategy(
        schedule=tw.Staggered(4, 2),
        partition=tw.Strided(2),
        codec=tw.Sign(block=8),
        exchange=tw.Hierarchy(sites, tw.Feedback()),
        outer=tw.Nesterov(),
        merge=tw.Mix(0.5),
    )
    for sites in ((1, 1), (2, 2))
}


# ---- pieces that misbehave


@dataclass(frozen=True)
class Picky(tw.Outer):
    """An outer step that overflows on a first, small delta: a round that nobody can land, and nobody's fault."""

    at_least: float
    linear = True

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(())}

    def step(self, anchor: Tensor, delta: Tensor, state: Any) -> tuple[Tensor, Any]:
        moved = anchor - delta if delta.abs().max() >= self.at_least else anchor * torch.inf
        return moved, {"rounds": state["rounds"] + 1}
