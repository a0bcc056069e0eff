"""Sharpness-aware minimisation: two gradients per step, and weights and buffers that the perturbation leaves unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigurationError, ModelError
from thinwire.pieces.inner_optimizers import SAM, SGD, AdamW, SharpnessAware, at_the_worst_point

RADIUS, LR = 0.3, 0.1


class Quadratic(nn.Module):
    """The loss ½·x'Ax with x in two parameters, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        half = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.a = half @ half.T
        start = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.first, self.rest = nn.Parameter(start[:2].clone()), nn.Parameter(start[2:].clone())
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    @property
    def x(self) -> Tensor:
        return torch.cat([self.first, self.rest])

    def forward(self) -> Tensor:
        self.calls += 1
        return self.x @ self.a @ self.x / 2


def by_closure(model: Quadratic, optimizer: SharpnessAware) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return float(loss.detach())

    return optimizer.step(closure) or 0.0


def by_two_calls(model: Quadratic, optimizer: SharpnessAware) -> float:
    def backward() -> float:
        loss = model()
        loss.backward()
        return float(loss.detach())

    loss = at_the_worst_point(optimizer, backward)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("train", [by_closure, by_two_calls])
def test_a_step_follows_the_equation_and_moves_buffers_once(train) -> None:
    """x − η·A·(x + ρ·Ax/‖Ax‖) with the norm over both parameters. The loss is the one at x."""
    model = Quadratic()
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), lr=LR), model, RADIUS)
    for step in range(1, 4):
        x = model.x.detach()
        g = model.a @ x
        due = x - LR * model.a @ (x + RADIUS * g / g.norm())
        assert train(model, optimizer) == pytest.approx(float(x @ g / 2))
        torch.testing.assert_close(model.x.detach(), due, rtol=1e-12, atol=1e-12)
        assert float(model.calls) == step


def test_radius_zero_and_gradients_that_are_not_finite_perturb_no_weights() -> None:
    plain, sharp = Quadratic(), Quadratic()
    optimizers = SGD(0.9).make(plain, LR, 0.01), SAM(SGD(0.9), 0.0).make(sharp, LR, 0.01)
    assert isinstance(optimizers[1], SharpnessAware)
    for _ in range(5):
        optimizers[0].zero_grad()
        plain().backward()
        optimizers[0].step()
        by_closure(sharp, optimizers[1])
    assert torch.equal(plain.x, sharp.x)
    sharp().backward()
    sharp.rest.grad.fill_(torch.nan)
    before = sharp.x.detach().clone()
    with optimizers[1].perturbed():
        assert torch.equal(sharp.x, before)


def test_a_failed_backward_restores_the_weights_and_forbids_the_step() -> None:
    model = Quadratic()
    optimizer = SAM(SGD()).make(model, LR, 0.0)
    assert isinstance(optimizer, SharpnessAware)
    before = model.x.detach().clone()
    model().backward()
    with pytest.raises(ZeroDivisionError), optimizer.perturbed():
        assert not torch.equal(model.x, before)
        raise ZeroDivisionError
    assert torch.equal(model.x, before)
    with pytest.raises(ModelError, match="no backward inside perturbed"):
        optimizer.step()


def test_invalid_settings_and_optimizers_are_refused() -> None:
    model = nn.Linear(2, 1)
    for wrong in (lambda: SAM(radius=-0.1), lambda: SAM(radius=float("inf")), lambda: SAM(SAM())):
        with pytest.raises(ConfigurationError, match=r"is needed|are usual"):
            wrong()
    with pytest.raises(ConfigurationError, match="SharpnessAware"):
        SAM().check(AdamW().make(model, LR, 0.0))
    with pytest.raises(ConfigurationError, match=r"radius=0\.02"):
        SAM(radius=0.02).check(SAM(radius=0.01).make(model, LR, 0.0))
    with pytest.raises(ConfigurationError, match="momentum"):
        SAM(SGD(0.9)).check(SAM(SGD()).make(model, LR, 0.0))
