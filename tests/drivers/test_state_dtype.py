"""Outer state and feedback in bf16: a round computes in fp32 and rounds once when it stores, and anchors stay in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.app.trainer.run import Run
from thinwire.codecs import E3M0, Codec, Sign, TopK
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState, first_state
from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import HeavyBall, Nesterov, Outer
from thinwire.pieces.partition import Whole
from thinwire.rng import Key
from thinwire.testing.values import roundtrip

NUMEL, ROUNDS, PIECE = 512, 30, 128


def held_by(strategy: tw.Strategy) -> FragmentState:
    torch.manual_seed(0)
    return first_state(strategy, Whole().fragments(nn.Linear(NUMEL, 1, bias=False))[0], 0, 0, 1)


def deltas() -> list[Tensor]:
    return list(torch.randn(ROUNDS, NUMEL, generator=torch.Generator().manual_seed(1)))


def step(strategy: tw.Strategy, held: FragmentState, delta: Tensor, buffers: Buffers, piece: int) -> Tensor:
    """Takes a round of one replica, `piece` values at a time. Returns what was sent."""
    update = Flight(held.begin_round(strategy, delta, 0, outer=strategy.outer), buffers)
    sent = torch.empty(NUMEL)
    for begin in range(0, NUMEL, piece):
        end = begin + piece
        sent[begin:end] = roundtrip(strategy.codec, update.signal(begin, end), Key())
        update.settle(begin, sent[begin:end].clone(), sent[begin:end])
    assert update.finish()
    update.close()
    update.commit()
    return sent


@pytest.mark.parametrize("outer", [Nesterov(0.4, 0.9), HeavyBall(0.5, 0.9, clip=2.0)])
@pytest.mark.parametrize(("codec", "piece"), [(Sign(block=PIECE), PIECE), (TopK(0.1), NUMEL)])
def test_a_round_equals_its_equations_in_fp32_rounded_once(outer: Outer, codec: Codec, piece: int) -> None:
    """Anchor and sent values have the bits of fp32 equations on the stored state; what is stored are these equations' results in bf16."""
    strategy = tw.Strategy(codec=codec, feedback=Feedback(), outer=outer, state_dtype="bf16")
    held, buffers = held_by(strategy), Buffers()
    assert held.anchor.dtype == torch.float32
    anchor, state, residual = held.anchor.clone(), outer.init(held.anchor), torch.zeros(NUMEL)
    for delta in deltas():
        sent = step(strategy, held, delta, buffers, piece)
        anchor, state = outer.step(anchor, sent, state)
        state = {name: value.bfloat16().float() for name, value in state.items()}
        residual = (residual + delta - sent).bfloat16().float()
        assert torch.equal(held.anchor, anchor)
        assert held.feedback["residual"].dtype == torch.bfloat16 == held.state["momentum"].dtype
        assert torch.equal(held.feedback["residual"].float(), residual)
        assert torch.equal(held.state["momentum"].float(), state["momentum"])


@pytest.mark.parametrize(("codec", "piece"), [(Sign(block=PIECE), PIECE), (E3M0(), PIECE), (TopK(0.1), NUMEL)])
def test_what_is_lost_is_the_rounding_of_the_residual(codec: Codec, piece: int) -> None:
    """|Σ sent + e − Σ Δ| ≤ 2⁻⁹·Σ |e|, beside the rounding of fp32; and it is not zero."""
    strategy = tw.Strategy(codec=codec, feedback=Feedback(), state_dtype="bf16")
    held, buffers = held_by(strategy), Buffers()
    sent, given, bound = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(3))
    for delta in deltas():
        sent += step(strategy, held, delta, buffers, piece)
        given += delta
        bound += held.feedback["residual"].double().abs() * (1 + 2**-8)
    lost = (sent + held.feedback["residual"].double() - given).abs()
    assert bool((lost <= 2**-9 * bound + 1e-4).all()) and float(lost.max()) > 1e-4


def test_a_refused_round_leaves_state_in_bf16_unchanged() -> None:
    strategy = tw.Strategy(codec=E3M0(), feedback=Feedback(), outer=Nesterov(), state_dtype="bf16")
    held, buffers = held_by(strategy), Buffers()
    first, second, *_ = deltas()
    step(strategy, held, first, buffers, PIECE)
    before = {name: value.clone() for name, value in (*held.state.items(), *held.feedback.items())}
    update = Flight(held.begin_round(strategy, second, 0, outer=strategy.outer), buffers)
    update.settle(0, second.clone(), second)
    update.discard()
    assert all(torch.equal(value, before[name]) for name, value in (*held.state.items(), *held.feedback.items()))


@pytest.mark.parametrize("recipe", ["streaming_sign", "streaming_diloco", "sparse_loco"])
def test_the_option_is_the_field_of_any_recipe(recipe: str) -> None:
    made = Run.of(strategy=recipe, state_dtype="bf16").make_strategy()
    assert made == replace(
        Run.of(strategy=recipe).make_strategy(), state_dtype="bf16"
    ) and "state_dtype='bf16'" in repr(made)
    assert "state_dtype" not in repr(replace(made, state_dtype="fp32"))
    with pytest.raises(tw.ConfigurationError, match="state_dtype='bf16'"):
        Run.of(strategy="just_one_byte", state_dtype="bf16")
