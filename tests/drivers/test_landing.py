"""A landing moves the parameters as its equation says, bit for bit, and makes no buffer of a fragment's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thinwire as tw
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import FragmentState, first_state
from thinwire.exchange import Buffers
from thinwire.pieces import merge
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.merge import Keep
from thinwire.pieces.partition import Whole
from thinwire.testing.toy import same_bits

ROWS = 97  # more than three pieces, the last one shorter


def fragment_of(dtype: torch.dtype, turned: bool) -> tuple[nn.Module, FragmentState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, ROWS, bias=False), nn.Linear(7, 3)).to(dtype)
    if turned:  # a parameter whose values do not lie in the order of its rows
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    (fragment,) = Whole().fragments(model)
    return model, first_state(tw.streaming_sign(partition=Whole()), fragment, 0, 0, 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_landing_moves_parameters_as_the_equation_says(dtype: torch.dtype, turned: bool, monkeypatch: Any) -> None:
    """θ ← anchor' + (θ − (anchor − Δ)), where steps were taken in flight."""
    monkeypatch.setattr(merge, "_PIECE", ROWS * 1024 // 3 - 1)
    after: list[list[Tensor]] = []
    for way in ("equation", "landing"):
        model, held = fragment_of(dtype, turned)
        delta, ahead = torch.randn_like(held.anchor), torch.randn_like(held.anchor)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape).to(dtype))
            if way == "equation":
                departed = held.base - delta
                held.anchor = ahead
                held.carry_over(departed)
            else:
                Keep().on_land(held.landing(ahead, delta))
        after.append([parameter.detach().double() for parameter in model.parameters()])  # exact, from every type
    assert all(same_bits(one, other) for one, other in zip(*after, strict=True))


class Largest(TorchDispatchMode):
    """The largest new tensor of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):  # neither a view nor in place
            self.numel = max([self.numel, *(one.numel() for one in tree_leaves(result) if isinstance(one, Tensor))])
        return result


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0), (torch.bfloat16, 1000)])
def test_a_landing_makes_no_buffer_of_a_fragments_size(dtype: torch.dtype, most: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(merge, "_PIECE", 1000)
    _, held = fragment_of(dtype, turned=False)
    delta, ahead = torch.randn_like(held.anchor), torch.randn_like(held.anchor)
    with Largest() as largest, torch.no_grad():
        Keep().on_land(held.landing(ahead, delta))
    assert largest.numel == most


def test_feedback_has_the_same_bits_with_factors_of_one() -> None:
    """A factor of 1 is left out; z and the residual have the bits that the equations give."""
    delta, residual, own = torch.randn(3, 1001)
    feedback, state = Feedback(), {"residual": residual}
    assert (feedback.alpha, feedback.beta, feedback.eta) == (1, 1, 1)
    z = feedback.signal(delta, state, torch.empty(1001))
    assert same_bits(z, (delta * 1.0).add_(residual, alpha=1.0))
    after = {"residual": torch.empty(1001)}
    feedback.settle(delta, own, torch.zeros(1001), state, after)
    assert same_bits(after["residual"], (residual * 1.0).add_(delta).sub_(own))


def test_a_round_takes_its_outer_step_range_by_range_and_returns_what_it_no_longer_needs() -> None:
    """Beside the results it needs room for one range. The ranges differ in length, and the second is the shorter one."""
    torch.manual_seed(0)
    strategy = tw.Strategy(outer=tw.pieces.outer.Nesterov(0.5, 0.5), codec=tw.codecs.Sign(), feedback=Feedback())
    held = first_state(strategy, Whole().fragments(nn.Linear(100, 10))[0], 0, 0, 1)
    buffers, anchor, whole = Buffers(), held.anchor.clone(), held.anchor.numel()
    held.feedback["residual"] += 1
    (delta, mean), own = torch.randn(2, whole), torch.zeros(whole)
    after = strategy.outer.step(anchor, mean, held.state)
    state = held.begin_round(strategy, buffers.like(delta).copy_(delta), 1, outer=strategy.outer)
    round_ = Flight(state, buffers)
    for begin, end in ((0, 700), (700, whole)):
        assert same_bits(round_.signal(begin, end), (delta + 1)[begin:end])
        round_.settle(begin, mean[begin:end], own[begin:end])
    assert len(buffers._lent) == 5, "the delta, three results, and the signal of a range"
    assert round_.finish()
    round_.close()
    assert len(buffers._lent) == 4
    round_.commit()
    assert len(buffers._lent) == 3 and held.flight is None
    assert same_bits(held.anchor, after[0]) and same_bits(held.state["momentum"], after[1]["momentum"])
    assert same_bits(held.feedback["residual"], delta + 1)
