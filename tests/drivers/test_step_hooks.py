"""Hooks on an optimizer's steps: once for each step, also if a class calls `super().step()`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from resumed_optimizers import SAM

import thinwire as tw
from thinwire.lab.methods import Flasc
from thinwire.strategy import Gradients
from thinwire.testing.toy import batch, inner_step, same_bits, sgd, toy, weights


class Clamped(torch.optim.SGD):
    """Its `step` calls that of its base class, which torch wraps with the same hooks."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.clamp_(-0.01, 0.01)


def made() -> tuple[torch.nn.Module, Clamped, tw.ThreadGroup]:
    model, (group,) = toy(), tw.ThreadGroup.create(1)
    sgd(model)  # torch wraps the `step` of a class when the first of it is made
    return model, Clamped([p for p in model.parameters() if p.requires_grad], lr=0.1), group


@pytest.mark.parametrize("strategy", [tw.local_sgd(every=1), tw.data_parallel(), tw.lab.recipes.d_psgd()])
def test_a_step_inside_a_step_is_one_inner_step(strategy: tw.Strategy) -> None:
    """The round departs after the outer one, also if an earlier step has failed."""

    def fails() -> None:
        raise ZeroDivisionError

    model, optimizer, group = made()
    replica = tw.Replica(strategy, model, optimizer, group)
    if not isinstance(strategy.signal, Gradients):
        with pytest.raises(ZeroDivisionError):
            optimizer.step(fails)
    for step in range(1, 4):
        inner_step(model, optimizer, *batch(0, 0, step))
        assert replica.step == step
    assert torch.cat(replica.anchors()).abs().max() == torch.tensor(0.01)
    replica.close()


@pytest.mark.parametrize("wraps", [False, True])
def test_the_wrapper_of_fabric_counts_each_step_once(wraps: bool) -> None:
    """It has the hooks of the optimizer inside it, which may have another one inside."""
    fabric_of = pytest.importorskip("lightning.fabric").Fabric
    model, (group,) = torch.nn.Linear(2, 1), tw.ThreadGroup.create(1)
    inner = SAM(model.parameters(), torch.optim.AdamW, lr=0.1) if wraps else torch.optim.AdamW(model.parameters())
    called, optimizer = fabric_of(accelerator="cpu", devices=1).setup(model, inner)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = called(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with tw.Replica(tw.local_sgd(every=2), model, optimizer, group) as replica:
        for step in range(1, 4):
            optimizer.step(closure)
            assert replica.step == step


class Going(torch.optim.SGD):
    """A method of its own takes the step."""

    def go(self) -> None:
        self.step()


class Around(torch.optim.SGD):
    """Its step is one of another optimizer."""

    def __init__(self, other: Going) -> None:
        super().__init__(other.param_groups, lr=0.1)
        self.other = other

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.other.go()


def test_a_step_inside_that_of_another_optimizer_is_an_inner_step() -> None:
    model, (group,) = toy(), tw.ThreadGroup.create(1)
    optimizer = Going([p for p in model.parameters() if p.requires_grad], lr=0.1)
    around = Around(optimizer)
    with tw.Replica(tw.local_sgd(every=1), model, optimizer, group) as replica:
        for step in range(1, 4):
            inner_step(model, around, *batch(0, 0, step))
            assert replica.step == step


def test_a_step_that_a_scaler_skips_is_not_tracked() -> None:
    """The gradient of the step after it is."""
    model, (group,) = toy(), tw.ThreadGroup.create(1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
    scaler, strategy = torch.amp.GradScaler("cpu"), replace(tw.lab.recipes.gradient_tracking(), inner=None)
    replica = tw.Replica(strategy, model, optimizer, group)
    for factor, counted in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        optimizer.zero_grad()
        x, y = batch(0, 0, counted)
        scaler.scale(factor * (model(x) - y).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert replica.step == counted
    due = torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in model.parameters()
            if p.requires_grad
        ]
    )
    torch.testing.assert_close(replica.state()[0]["0.exchange.gradient"], due)
    scaler.scale((model(x) - y).square().mean()).backward()
    with pytest.raises(tw.ModelError, match=r"unlike scales; call scaler.unscale_\(optimizer\) before"):
        scaler.step(optimizer)
    replica.close()


def test_a_method_counts_a_step_inside_a_step_once() -> None:
    model, optimizer, group = made()
    trained = Flasc(every=2).attach(model, optimizer, group)
    for step in range(1, 4):
        inner_step(model, optimizer, *batch(0, 0, step))
    assert (trained.step, trained.rounds) == (3, 1)
    trained.close()


@pytest.mark.parametrize("strategy", [tw.streaming_sign(every=2, delay=1), tw.data_parallel()])
def test_a_compiled_step_is_one_inner_step(strategy: tw.Strategy) -> None:
    """The compiler leaves the exchange as it is: the weights have the bits of the plain loop."""
    ends = []
    for compiled in (False, True):
        model, (group,) = toy(), tw.ThreadGroup.create(1)
        optimizer = sgd(model)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        with tw.Replica(strategy, model, optimizer, group) as replica:
            for number in range(1, 6):
                x, y = batch(0, 0, number)
                (model(x) - y).square().mean().backward()
                step()
                optimizer.zero_grad()
                assert replica.step == number
        ends.append(weights(model))
    assert same_bits(*ends)
