"""What optimizers hold in their attributes, beside their state dicts: a resumed run has the bits of one that was never stopped, or what cannot
be saved is named by its path after the first step."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from resumed_optimizers import SAM, ByHand, Files, Killed, resumes, train
from torch import nn

import thinwire as tw
from thinwire import checkpoint


class Slow(torch.optim.Optimizer):
    """Slow weights in a state that its state dict leaves out, and a counter."""

    def __init__(self, base):
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.steps, self.param_groups = base, 0, base.param_groups

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.steps % 3 == 0:
                    p.data.copy_(slow.lerp_(p.detach(), 0.5))
        return loss


class Parts(torch.optim.Optimizer):
    """Optimizers of parts of the model, in a list in a dict."""

    def __init__(self, params):
        first, *others = params
        super().__init__([first, *others], {"lr": 0.1})
        self.inside = {
            "all": [torch.optim.Adam([first], lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)],
        }

    def step(self, closure=None):
        loss = closure()
        for part in self.inside["all"]:
            part.step()
        return loss


class Clock:
    def __init__(self):
        self.ticks, self.spoken = 0, print


class Keeping(torch.optim.SGD):
    """Averages, copies, counters, flags and objects of its own, some of which the first step makes."""

    def __init__(self, model, folder="here"):
        super().__init__(model.parameters(), lr=0.1)
        self.held = list(model.parameters())
        self.first, self.averages, self.best, self.folder = True, None, float("inf"), folder
        self.by_id = {id(p): torch.zeros_like(p) for p in self.held}
        self.copy, self.model, self.clock = copy.deepcopy(model), model, Clock()
        self.rates = torch.optim.lr_scheduler.StepLR(self, 2, 0.9)

    def step(self, closure=None):
        loss = super().step(closure)
        self.rates.step()
        self.clock.ticks += 1
        self.best = min(self.best, float(loss))
        self.averages = self.averages or [p.detach().clone() for p in self.held]
        scale = 0.05 if self.first else 0.01
        self.first = False
        with torch.no_grad():
            for p, average, other in zip(self.held, self.averages, self.copy.parameters()):
                average.lerp_(p, 0.1)
                other.mul_(0.9)
                self.by_id[id(p)].add_(p - average)
                p.add_(other + average + self.by_id[id(p)] + self.best + self.clock.ticks, alpha=0.01 * scale)
        return loss


class Noisy(torch.optim.SGD):
    """Generators in attributes, and those of numpy and Python that all share."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.of_torch, self.of_python = torch.Generator().manual_seed(1), random.Random(1)
        self.of_numpy = [np.random.default_rng(1), np.random.RandomState(1)]

    def step(self, closure=None):
        loss = super().step(closure)
        drawn = random.random() + float(np.random.randn()) + self.of_python.random()
        drawn += sum(float(one.normal()) for one in self.of_numpy)
        for p in self.param_groups[0]["params"]:
            p.data += 0.01 * (torch.randn(p.shape, generator=self.of_torch) + drawn)
        return loss


def seeded(make):
    def made(model):
        random.seed(3)
        np.random.seed(3)
        return make(model)

    return made


HOLDING = {
    "SAM around Adam": lambda m: SAM(m.parameters(), torch.optim.Adam, lr=0.01),
    "slow weights around SAM": lambda m: Slow(SAM(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)),
    "in a list": lambda m: Parts(m.parameters()),
    "averages, counters, objects": Keeping,
    "generators": seeded(lambda m: Noisy(m.parameters())),
}


@pytest.mark.parametrize("door", [Files(), ByHand()], ids=["checkpoint", "state()"])
@pytest.mark.parametrize("name", HOLDING)
def test_what_an_optimizer_holds_beside_its_state_dict_resumes_bit_for_bit(name, door, tmp_path):
    resumes(HOLDING[name], tmp_path, door)


def test_settings_are_those_of_the_script_that_resumes(tmp_path):
    """An attribute that training does not change, such as a folder's name, is not taken from the checkpoint."""
    with pytest.raises(Killed):
        tw.run_threads(1, functools.partial(train, Keeping, tmp_path, 7))
    made = []

    def make(model):
        made.append(Keeping(model, "elsewhere"))
        return made[0]

    tw.run_threads(1, functools.partial(train, make, tmp_path, 12))
    assert made[0].folder == "elsewhere" and made[0].clock.ticks == 12


class Lazy(torch.optim.SGD):
    inside = None

    def step(self, closure=None):
        loss = super().step(closure)
        self.inside = self.inside or torch.optim.Adam(self.param_groups[0]["params"], lr=1e-3)
        self.inside.step()
        return loss


class Cycling(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rates = itertools.cycle([0.1, 0.2])


@pytest.mark.parametrize(("kind", "place"), [(Lazy, "optimizer.inside: a Adam"), (Cycling, "optimizer.rates: a cycle")])
def test_what_no_resume_could_restore_is_named_after_the_first_step(kind, place, tmp_path):
    told = []

    def replica(group):
        model = nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1)

        def observe(event, step, **fields):
            told.append(fields["message"]) if event == "warning" else None

        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group, observer=observe) as at:
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            with pytest.raises(tw.CheckpointError, match=place):
                checkpoint.save(tmp_path, at, {})

    tw.run_threads(1, replica)
    assert len(told) == 1 and f"checkpoint.save would refuse this replica: {place}" in told[0]


class Bare(SAM):
    def __init__(self, model):
        super().__init__(model.parameters(), torch.optim.SGD, lr=0.1)
        self.base_optimizer = None


def test_a_script_that_lacks_the_optimizer_inside_is_refused_by_its_path(tmp_path):
    with pytest.raises(Killed):
        tw.run_threads(1, functools.partial(train, HOLDING["SAM around Adam"], tmp_path, 7))
    with pytest.raises(
        tw.CheckpointError,
        match=r"the state of an optimizer at optimizer.base_optimizer, and this optimizer has nothing there",
    ):
        tw.run_threads(1, functools.partial(train, Bare, tmp_path, 12))


def test_a_class_that_the_script_lacks_is_named_and_no_older_checkpoint_is_taken(tmp_path):
    """The file is not damaged, and training does not begin anew without a word."""
    place = Path(__file__).stem

    def replica(group, notes):
        model = nn.Linear(2, 1)
        with tw.Replica(tw.local_sgd(every=2), model, torch.optim.SGD(model.parameters(), 0.1), group) as at:
            checkpoint.save(tmp_path, at, notes)
            at.close()

    kind = type("Note", (tuple,), {"_fields": (), "__module__": __name__, "__qualname__": "Note"})
    globals()["Note"] = kind
    try:
        tw.run_threads(1, lambda group: replica(group, {"note": kind()}))
    finally:
        del globals()["Note"]
    with pytest.raises(
        tw.CheckpointError, match=r"has a value of the class \S*Note, and this script has no such class"
    ) as raised:
        checkpoint.newest(tmp_path)
    assert place in str(raised.value) and "damaged" not in str(raised.value)
