"""What pieces declare, what they accept at their limits, and what a piece of the user's is that declares nothing."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.errors import ConfigurationError
from thinwire.pieces.aggregate import Aggregate, Mean, MeanOverSenders
from thinwire.pieces.filters import Filter
from thinwire.pieces.inner_optimizers import SAM, SGD, AdamW, Muon
from thinwire.pieces.merge import Merge
from thinwire.pieces.outer import Average, DelayedNesterov, HeavyBall, Nesterov, Outer
from thinwire.pieces.policy import Constant, Policy
from thinwire.pieces.transforms import Clip, Moments, Momentum, Settled, Signs

# what each piece accepts at its limits, and what it refuses beyond them
LIMITS: list[tuple[type, str, tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]] = [
    (
        Clip,
        "0 (no clipping) or more is needed",
        ({"norm": 0.0},),
        ({"norm": -0.1}, {"norm": math.inf}, {"replicas": 0}),
    ),
    (
        Momentum,
        "0 < decay < 1, and 'sent' or 'nothing'",
        ({"decay": 0.01},),
        ({"decay": 0.0}, {"decay": 1.0}, {"clears": ""}),
    ),
    (
        Moments,
        "0 <= beta1 < 1, 0 < beta2 < 1, eps > 0",
        ({"beta1": 0.0}, {"freeze": 1}, {"freeze": Settled()}, {"eps": 1.0}),
        (
            *({"beta1": -0.1}, {"beta1": 1.0}, {"beta2": 0.0}, {"beta2": 1.0}),
            *({"eps": 0.0}, {"eps": math.inf}, {"freeze": 0}, {"freeze": 1.5}),
        ),
    ),
    (
        Settled,
        "0 < ratio <= 1 and least >= 1",
        ({"ratio": 1.0}, {"least": 1}),
        ({"ratio": 0.0}, {"ratio": 1.1}, {"least": 0}),
    ),
    (
        AdamW,
        "0 <= beta1, beta2 < 1 is needed",
        ({"beta1": 0.0, "beta2": 0.0},),
        ({"beta1": -0.1}, {"beta1": 1.0}, {"beta2": -0.1}, {"beta2": 1.0}),
    ),
    (
        SGD,
        "0 <= momentum < 1 and lr_factor > 0",
        ({"lr_factor": 0.1}, {"lr_factor": 2.0}),
        ({"momentum": -0.1}, {"momentum": 1.0}, {"lr_factor": 0.0}),
    ),
    (Muon, "0 <= momentum < 1 is needed", ({"momentum": 0.0},), ({"momentum": -0.1}, {"momentum": 1.0})),
    (SAM, "0 or more is needed", ({"radius": 0.0}, {"radius": 2.0}), ({"radius": -0.1}, {"radius": math.inf})),
    (SAM, "AdamW(), SGD() or Muon() is needed", ({"inner": SGD()},), ({"inner": SAM()}, {"inner": SGD}, {"inner": 1})),
]


def test_settings_at_their_limits() -> None:
    for kind, message, accepted, refused in LIMITS:
        for settings in accepted:
            assert kind(**settings) == kind(**settings)
        for settings in refused:
            with pytest.raises(ConfigurationError, match=re.escape(message)):
                kind(**settings)


def bare(protocol: type, **given: Any) -> Any:
    return type("Bare", (protocol,), given)()


MEAN_ONLY = "is no mean over all, where a delta may count more than another; Mean() is"
COUNTS = "counts rounds that all have seen"
FITTED = "is fitted to a number of replicas, or keeps what all of them must agree on"
LATE = "does not declare that rounds may land late (needs_fixed_group = '')"
WHOLE = "needs rounds that take a whole period, no more and no less"
DECLARED: list[tuple[Any, dict[str, Any]]] = [
    (
        bare(Outer),
        {"linear": False, "elementwise": False, "needs_whole_period": False, "needs_fixed_group": ""},
    ),
    (Average(), {"linear": True, "elementwise": True, "needs_whole_period": False}),
    (Nesterov(), {"linear": True, "elementwise": True, "last": Average()}),
    (DelayedNesterov(), {"linear": True, "elementwise": False, "last": Average()}),
    (HeavyBall(), {"linear": True, "elementwise": False, "last": Average()}),
    (bare(Aggregate, into=None), {"linear": False, "needs_products": False, "needs_fixed_group": MEAN_ONLY}),
    (Mean(), {"linear": True, "needs_products": False, "needs_fixed_group": ""}),
    (MeanOverSenders(), {"linear": False, "needs_products": False, "needs_fixed_group": MEAN_ONLY}),
    (bare(Policy, codecs=None, at=None), {"constant": False, "needs_fixed_group": COUNTS, "changes": ()}),
    (Constant(), {"constant": True, "needs_fixed_group": "", "changes": ()}),
    (bare(Filter), {"momentum": False, "needs_whole": False, "needs_fixed_group": FITTED, "full": 0}),
    (Signs(), {"momentum": False, "needs_whole": False, "needs_fixed_group": FITTED, "full": 0}),
    (Clip(0.0), {"needs_whole": False}),
    (Clip(0.5), {"momentum": False, "needs_whole": True, "full": 0}),
    (Momentum(), {"momentum": True, "needs_whole": False, "full": 0}),
    (Moments(), {"momentum": True, "needs_whole": False, "full": 100}),
    (bare(Merge), {"needs_fixed_group": LATE, "alpha": 0.0}),
    (bare(Merge, whole_period=True), {"needs_fixed_group": WHOLE, "forgets": False, "keeps_flight": False}),
    (AdamW(), {"lr_factor": 1.0}),
    (Muon(), {"lr_factor": 1.0}),
    (SAM(SGD(0.9, 10.0)), {"lr_factor": 10.0}),
]


@pytest.mark.parametrize(("piece", "declared"), DECLARED, ids=lambda one: type(one).__name__)
def test_declarations(piece: Any, declared: dict[str, Any]) -> None:
    assert {name: getattr(piece, name) for name in declared} == declared


def test_a_piece_without_methods_changes_nothing_or_says_what_it_lacks() -> None:
    x, codec = torch.ones(2), tw.codecs.Identity()
    outer, filter_, aggregate = bare(Outer), bare(Filter), bare(Aggregate, into=None)
    assert (
        outer.init(x) == filter_.init(2) == aggregate.init(2, 3) == bare(Policy, codecs=None, at=None).init(codec) == {}
    )
    assert (
        outer.last is outer and filter_.fitted(codec, 2, 3) is filter_ and aggregate.given(x, tw.rng.Key()) is aggregate
    )
    assert filter_.signal(x, {}) is x is aggregate.measured(x, {}, {}) and not filter_.dense({})
    assert filter_.settle(x, x, -x, {}, {})[0].tolist() == [-1.0, -1.0]
    assert aggregate.tolerates(100) == 0
    with pytest.raises(ConfigurationError, match=r"no step of its own.*step_into"):
        outer.step(x, x, {})
