"""Gradients that share memory after backward: whatever changes one of them changes no other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.app.jobs.base import Summed
from thinwire.app.trainer.tokens_mean import descend
from thinwire.drivers.module_state import clip, separate_gradients
from thinwire.lab.methods import METHODS
from thinwire.testing.toy import same_bits, weights


class Positions(nn.Module):
    """Autograd gives both tables views of one gradient, unless `apart`: then a hook copies one. In odd steps the second is not used."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3, 4))
        if apart:
            self.columns.register_hook(lambda gradient: gradient.clone())

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        if step % 2:
            return x + self.rows.unsqueeze(0)
        return x + (self.rows.unsqueeze(0) + self.columns.unsqueeze(0))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x, step) - 1).square().sum()


def address(parameter: nn.Parameter) -> int:
    assert parameter.grad is not None
    return parameter.grad.data_ptr()


def test_only_gradients_that_share_memory_are_copied() -> None:
    model, flat = Positions(apart=False), torch.arange(24.0)
    loss(model, 0, 0).backward()
    assert address(model.rows) == address(model.columns)
    separate_gradients(model.parameters())
    assert address(model.rows) != address(model.columns) and torch.equal(*(p.grad for p in model.parameters()))
    model.rows.grad, model.columns.grad = flat[12:].view(3, 4), flat[:12].view(3, 4)
    separate_gradients([*model.parameters(), nn.Parameter(torch.zeros(1))])
    assert (address(model.rows), address(model.columns)) == (flat[12:].data_ptr(), flat.data_ptr())


def test_a_shared_gradient_is_clipped_once() -> None:
    for alike in (True, False):
        model = Positions(apart=False)
        loss(model, 0, 0).backward()
        clip(list(model.parameters()), 1.0, alike)
        assert float(torch.cat([p.grad for p in model.parameters()]).norm()) == pytest.approx(1.0, rel=1e-5)


def trained(name: str, group: tw.Group, apart: bool) -> Tensor:
    """The weights after some steps of a strategy, of a method with its own loop, or of a loss that is a sum over tokens."""
    model = Positions(apart)
    of_step = partial(Summed, tokens=4.0) if name == "tokens" else torch.Tensor.clone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if name in METHODS:
        one = METHODS[name](every=2).attach(model, optimizer, group)
    else:
        strategy = {
            "ef14": tw.lab.recipes.ef14(codec=tw.codecs.TopK(0.1), momentum=0.0),
            "gradient_tracking": tw.lab.recipes.gradient_tracking(momentum=0.0),
            "tokens": tw.local_sgd(every=2),
        }[name]
        one = tw.Replica(strategy, model, strategy.inner.make(model, 0.01, 0.0) if strategy.inner else optimizer, group)
    for step in range(6):
        one.optimizer.zero_grad()
        descend(model, one, lambda _, step=step: of_step(loss(model, group.rank, step)), 1)
        one.optimizer.step()
    one.finish()
    one.close()
    return weights(model)


@pytest.mark.parametrize("name", ["ef14", "gradient_tracking", "scaffold", "tokens"])
def test_shared_gradients_train_as_separate_ones(name: str) -> None:
    shared, separate = (tw.run_threads(2, lambda group, a=a: trained(name, group, a)) for a in (False, True))
    assert all(same_bits(one, other) for one, other in zip(shared, separate))
    assert same_bits(*shared) and bool(shared[0].any())
