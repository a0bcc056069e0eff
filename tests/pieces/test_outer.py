"""Settings of outer steps: valid ranges and consequences. Recursions: test_table_of_pieces.py; the penalty: runtime/test_late_rounds.py."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.errors import ConfigurationError
from thinwire.pieces.outer import DelayedNesterov, HeavyBall, Nesterov


def test_momentum_0_keeps_no_state_and_momentum_1_is_refused() -> None:
    anchor = torch.ones(2)
    assert Nesterov(0.5, 0.0).init(anchor) == {} and set(Nesterov(0.5, 0.9).init(anchor)) == {"momentum"}
    assert set(DelayedNesterov(0.5, 0.0, 1).init(anchor)) == {"momentum", "sum", "count"}
    assert set(HeavyBall(0.5, 0.0).init(anchor)) == {"momentum"}
    for kind in (Nesterov, DelayedNesterov, HeavyBall):
        for numbers in ((0.5, 1.0), (0.5, -0.1), (0.5, math.nan), (0.0, 0.5), (-1.0, 0.5), (math.nan, 0.5)):
            with pytest.raises(ConfigurationError, match="lr > 0"):
                kind(*numbers)
    with pytest.raises(ConfigurationError, match="a whole number of updates above 0"):
        DelayedNesterov(0.5, 0.9, 0)


def test_the_last_step_of_a_training_is_an_average_that_keeps_the_state() -> None:
    anchor, delta = torch.tensor([3.0, 1.0]), torch.tensor([1.0, -1.0])
    for outer in (Nesterov(), DelayedNesterov(), HeavyBall()):
        state = {name: torch.full_like(kept, 7.0) for name, kept in outer.init(anchor).items()}
        moved, after = outer.last.step(anchor, delta, state)
        assert moved.tolist() == [2.0, 2.0] and after.keys() == state.keys()
        assert all(after[name].eq(7.0).all() and after[name] is not state[name] for name in state)


def test_delayed_nesterov_moves_its_momentum_once_in_updates_steps() -> None:
    outer, x = DelayedNesterov(lr=1.0, momentum=0.5, updates=2), torch.zeros(1)
    state, seen = outer.init(x), []
    for delta in (1.0, 2.0, 3.0):
        x, state = outer.step(x, torch.tensor([delta]), state)
        seen.append((x.tolist(), *(state[name].tolist() for name in ("momentum", "sum", "count"))))
    assert seen == [([-1.0], [0.0], [1.0], [1.0]), ([-4.5], [3.0], [0.0], [0.0]), ([-7.5], [3.0], [3.0], [1.0])]


def test_a_heavy_ball_with_any_gap_needs_a_whole_period() -> None:
    assert [HeavyBall(gap=gap).needs_whole_period for gap in (0.0, 0.1, 1.0)] == [False, True, True]
    assert [HeavyBall(gap=gap, clip=clip).linear for gap, clip in ((0.0, None), (0.1, None), (0.0, 1.0))] == [
        True,
        False,
        False,
    ]
    delta, state = torch.tensor([3.0, 4.0]), {"momentum": torch.tensor([6.0, 8.0])}
    assert HeavyBall(lr=1.0, gap=1.0).penalty(delta, state) == 3.0
    assert HeavyBall(lr=1.0, gap=1.0).penalty(torch.zeros(2), state) == 1.0 == HeavyBall(lr=1.0).penalty(delta, state)
    still, state = torch.zeros(3), {"momentum": torch.tensor([0.0, 2.0, -2.0])}
    moved, after = HeavyBall(lr=0.5, momentum=0.5, clip=1.5).step(still, torch.tensor([-4.0, 0.25, 1.0]), state)
    assert moved.tolist() == [0.75, -0.625, 0.0] and after["momentum"].tolist() == [-1.5, 1.25, 0.0]
    for numbers in ({"gap": -0.1}, {"gap": math.inf}, {"clip": 0.0}, {"clip": math.inf}, {"lr": math.inf}):
        with pytest.raises(ConfigurationError, match="gap >= 0"):
            HeavyBall(**numbers)
