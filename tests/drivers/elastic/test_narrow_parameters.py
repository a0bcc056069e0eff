"""Parameters of bf16 hold the anchors of fp32 rounded: that is no training, so an outcome that lands adds nothing of it to them."""

from __future__ import annotations

import pytest
import torch
from elastic_toy import training
from torch import nn

import thinwire as tw
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.elastic.messages import Outcome
from thinwire.drivers.fragment import first_state
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.pieces.merge import Keep, Mix

LAST_BIT = 2.0**-7  # of bf16, from 1 to 2; below it is half of that
DEPARTS, DELAY = 10, 2


def begun(merge: tw.pieces.merge.Merge) -> tuple[nn.Parameter, ElasticDriver]:
    """A replica whose only parameter is 1, as bf16 rounds the anchor."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(20, DELAY), merge=merge, outer=tw.pieces.outer.Average(), feedback=None
    )
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    piece = first_state(strategy, tw.pieces.partition.Fragment("all", [("all", parameter)]), 0, 0, 1)
    piece.anchor += 0.375 * LAST_BIT
    made = training(strategy, [parameter], [piece], lambda *_, **__: None)
    return parameter, ElasticDriver(made, SimulatedCluster().membership("a", least=1))


def anchor(bits: float) -> torch.Tensor:
    return torch.full((4,), 1.0 + bits * LAST_BIT)


@pytest.mark.parametrize(
    ("merge", "flight", "kept"), [(Keep(), 2, 1.0), (Mix(0.0), 16, 1 - DELAY / 16), (Mix(0.0), DELAY, 0.0)]
)
def test_a_landing_keeps_the_steps_of_the_flight_and_nothing_else(merge: Mix | Keep, flight: int, kept: float) -> None:
    parameter, elastic = begun(merge)
    parameter.data.fill_(0.75)
    counted = elastic._bring(0, DEPARTS)
    assert torch.equal(counted.delta, torch.full((4,), 0.25))
    parameter.data.fill_(0.75 - 0.125)
    elastic._take_over(Outcome(0, 0, anchor(0.375), counted=counted), anchor(0.375), step=DEPARTS + flight)
    assert torch.equal(parameter.data.float(), torch.full((4,), 1 - 0.125 * kept))


def test_a_round_without_its_delta_moves_the_parameters_as_far_as_they_hold_the_anchors() -> None:
    parameter, elastic = begun(Mix(0.0))
    parameter.data.fill_(0.75)
    elastic._take_over(Outcome(0, 0, anchor(0.6875)), anchor(0.6875), step=DEPARTS)
    assert torch.equal(parameter.data.float(), torch.full((4,), 0.75 + LAST_BIT))
    assert torch.equal(elastic._bring(0, DEPARTS).delta, torch.full((4,), 0.25))


def test_parameters_that_begin_again_hold_the_delta_that_waits() -> None:
    """As after weights of NaN, which came after its departure."""
    parameter, elastic = begun(Mix(0.0))
    parameter.data.fill_(0.75)
    elastic._bring(0, DEPARTS)
    parameter.data.fill_(torch.nan)
    elastic._forget_own()
    assert torch.equal(parameter.data.float(), torch.full((4,), 0.75))
