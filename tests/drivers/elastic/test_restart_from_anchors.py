"""A replica whose weights are NaN restarts from the anchors while a sound delta of another fragment still waits for its round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from elastic_toy import training

import thinwire as tw
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.elastic.messages import Outcome
from thinwire.drivers.fragment import first_state
from thinwire.membership.testing.cluster import SimulatedCluster


@pytest.mark.parametrize("counted", [True, False])
def test_a_delta_that_waits_at_a_restart_is_sent_once(counted: bool) -> None:
    """It holds 4 steps; of the 2 since then nothing is left. In the mean of two replicas it moves the anchor by 2. If its round is refused,
    it is in the next delta with its steps.
    """
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(9), outer=tw.pieces.outer.Average())
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    pieces = [
        first_state(strategy, tw.pieces.partition.Fragment(f"part {n}", [(f"part {n}", one)]), n, 0, 1)
        for n, one in enumerate(parameters)
    ]
    made = training(strategy, parameters, pieces, lambda *_, **__: None)
    elastic = ElasticDriver(made, SimulatedCluster().membership("a", least=1))
    elastic._trained = 4.0
    parameters[0].data.fill_(4.0)
    delta = elastic._bring(0, 4)
    elastic._trained = 6.0
    parameters[0].data.fill_(6.0)
    parameters[1].data.fill_(torch.nan)
    outcomes = elastic.rounds._mail.outcomes
    outcomes.append([Outcome(1, 0, broken=True)])
    elastic._pick_up(6)
    assert parameters[0].tolist() == [4.0] * 3 and parameters[1].tolist() == [0.0] * 3
    assert elastic.facts()["travelled"] == [2.0, 6.0]
    landed = Outcome(0, 1, torch.full((3,), 2.0), ready=delta)
    outcomes.append([replace(landed, counted=delta) if counted else landed])
    elastic._pick_up(7)
    left = elastic._bring(0, 7)
    assert (left.delta.tolist(), left.behind) == (([0.0] * 3, 0.0) if counted else ([-4.0] * 3, 4.0))


def test_no_delta_that_is_not_counted_any_more_is_kept_at_a_restart() -> None:
    """One with NaN, and one that departed before its progress was dropped."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(9), outer=tw.pieces.outer.Average())
    parameter = torch.nn.Parameter(torch.zeros(3))
    piece = first_state(strategy, tw.pieces.partition.Fragment("all", [("all", parameter)]), 0, 0, 1)
    made = training(strategy, [parameter], [piece], lambda *_, **__: None)
    elastic = ElasticDriver(made, SimulatedCluster().membership("a", least=1))
    outcomes = elastic.rounds._mail.outcomes
    for spoilt in (torch.nan, 4.0):
        elastic._trained += 4.0
        parameter.data.fill_(spoilt)
        ready = elastic._bring(0, 4)
        if spoilt == 4.0:
            outcomes.append([Outcome(0, 1, torch.ones(3), anew=True)])
            elastic._pick_up(5)
        parameter.data.fill_(torch.nan)
        outcomes.append([Outcome(0, 1, broken=True)])
        outcomes.append([Outcome(0, 1, ready=ready)])
        elastic._pick_up(6)
        assert torch.equal(parameter.data, piece.anchor) and elastic.facts()["travelled"] == [elastic._trained]
