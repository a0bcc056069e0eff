"""Trains with an optimizer, saves, drops all, and resumes: the bits must be those of a run that was never stopped."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import checkpoint

STEPS, SAVED = 12, 7


class Killed(Exception):
    """In place of a kill: no last round, nothing is left but the files."""


class SAM(torch.optim.Optimizer):
    """As people copy it: its state dict has not the moments of the optimizer inside."""

    def __init__(self, params, base, **settings):
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in held]
        for p in held:
            p.add_(p.grad, alpha=0.05)
        torch.enable_grad()(closure)()
        for p, values in zip(held, before):
            p.copy_(values)
        self.base_optimizer.step()
        self.param_groups[0]["lr"] *= 0.9  # as a schedule does; the optimizer inside has the same groups


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))


class Files:
    """Thinwire's checkpoints."""

    def save(self, folder, replica):
        checkpoint.save(folder, replica, {})

    def load(self, folder, replica):
        if saved := checkpoint.newest(folder)[0]:
            checkpoint.load(saved, replica)


class ByHand:
    """What an own loop writes that saves as it always did, and `replica.state()` beside it."""

    def save(self, folder, replica):
        folder.mkdir()
        drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
        states = replica.model.state_dict(), replica.optimizer.state_dict(), replica.state(), drawn
        torch.save(states, folder / "all.pt")

    def load(self, folder, replica):
        if (folder / "all.pt").exists():
            model, optimizer, state, (python, numpy, cpu) = torch.load(folder / "all.pt", weights_only=False)
            replica.model.load_state_dict(model)
            replica.optimizer.load_state_dict(optimizer)
            replica.load_state(*state)
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)


def train(make: Callable[..., Any], folder, steps, group, door=Files()):
    """Train up to `steps`, from the checkpoint in `folder` if there is one."""
    torch.manual_seed(7)
    model = model_of()
    optimizer = make(model)
    getattr(optimizer, "train", bool)()  # schedule-free ones
    with tw.Replica(tw.diloco(every=4), model, optimizer, group, observer=lambda *_, **__: None) as replica:
        door.load(folder, replica)
        for step in range(replica.step + 1, steps + 1):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))

            def closure(x=x):
                optimizer.zero_grad()
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            if steps == SAVED and step == SAVED:
                door.save(folder, replica)
                raise Killed
    return model


def resumes(make, tmp_path, door=Files()) -> None:
    (through,) = tw.run_threads(1, functools.partial(train, make, tmp_path / "none", STEPS, door=door), timeout=600.0)
    with pytest.raises(Killed):
        tw.run_threads(1, functools.partial(train, make, tmp_path / "saved", SAVED, door=door), timeout=600.0)
    (resumed,) = tw.run_threads(1, functools.partial(train, make, tmp_path / "saved", STEPS, door=door), timeout=600.0)
    for one, other in zip(through.parameters(), resumed.parameters()):
        assert torch.equal(one, other), (one - other).abs().max()
