"""Optimizers as people use them: a run that was saved, dropped and resumed ends with the bits of one that was never stopped.

torch's own and constructed shapes of state run always. The table from the registries runs where `thinwire[optimizers]` is installed.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from resumed_optimizers import SAVED, STEPS, Killed, model_of, resumes, train
from torch import nn

import thinwire as tw
from thinwire import checkpoint


class Counting(torch.optim.SGD):
    """A number beside `state` and `param_groups`, and entries of the state without a parameter."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        self.state["steps"] = self.state.get("steps", 0) + 1
        self.state["ema"] = {"loss": torch.tensor(float(self.count)), 3: [None, (1, 2)]}
        for group in self.param_groups:
            group["lr"] = torch.tensor(1e-2) * min(self.count, self.state["steps"], 10)
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "count"})


class Shape(NamedTuple):
    first: int
    second: int


class Preconditioner:
    def __init__(self):
        self.seen, self.factors = 0, [torch.eye(2), torch.zeros(0)]


class Nested(torch.optim.SGD):
    """Lists, dicts and objects of its own in the state, and tensors that overlap."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    flat = torch.ones(4)
                    state |= {"of": Preconditioner(), "flat": flat, "views": [flat[:2], flat[2:]], "self": parameter}
                state["of"].seen += 1
                state["flat"].mul_(0.9)
                group["lr"] = float(state["views"][1][0]) / state["of"].seen
                assert state["self"] is parameter
        return super().step(closure)


class Shared(torch.optim.SGD):
    """The same tensor, list and dict in several places of the state and the groups, and a buffer of the model."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)
        model.register_buffer("seen", torch.zeros(()))
        self.seen = model.seen

    def step(self, closure=None):
        group = self.param_groups[0]
        first, last = group["params"][0], group["params"][-1]
        if not self.state:
            counts, tensor = [0], torch.zeros(())
            self.state[first] |= {"counts": counts, "nested": {"again": counts}, "tensor": tensor, "seen": self.seen}
            self.state[last] |= {"counts": counts, "tensor": tensor}
            group |= {"counts": counts, "tensor": tensor}
        self.state[first]["counts"][0] += 1
        self.state[last]["tensor"] += 1
        self.state[first]["seen"] += 1
        held = (self.state[last]["counts"], self.state[first]["nested"]["again"], group["counts"])
        group["lr"] = 0.001 * (sum(counts[0] for counts in held) + float(group["tensor"] + self.seen))
        return super().step(closure)


class Typed(torch.optim.SGD):
    """Values in the state that torch's `load_state_dict` makes anew from their elements, and parameters as keys in a group."""

    def step(self, closure=None):
        for group in self.param_groups:
            seen = group.setdefault("seen", {})
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = collections.OrderedDict(
                        mode="fast",
                        last=collections.deque(maxlen=3),
                        counts=collections.defaultdict(int),
                        shape=Shape(*p.shape[:1], 2),
                        inside=[{"array": np.ones(2)}],
                    )
                state, seen[p] = self.state[p], seen.get(p, 0) + 1
                state["last"].append(seen[p])
                state["counts"][seen[p]] += 1
                state["inside"][0]["array"] += 1
                state.move_to_end("mode")
                assert state["mode"] == "fast" and state["shape"].second == 2
                group["lr"] = 0.001 * (sum(state["last"]) + len(state["counts"]) + state["inside"][0]["array"][0])
        return super().step(closure)


class InFp32(torch.optim.Optimizer):
    """fp32 moments of bf16 weights, which torch's `load_state_dict` would round."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            average = state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
            average.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_((0.1 * average).to(parameter.dtype))
        return loss


SHAPES: dict[str, Callable[..., Any]] = {
    "numbers beside the state": lambda m: Counting(m.parameters(), lr=0.1, momentum=0.9),
    "shared": Shared,
    "objects, views": lambda m: Nested(m.parameters(), lr=0.1, momentum=0.9),
    "values of other types": lambda m: Typed(m.parameters(), lr=0.1),
    "tensors in groups": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), betas=(0.9, 0.99)),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1),
}
TORCH = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
SHAPES |= {name: lambda m, name=name: getattr(torch.optim, name)(m.parameters()) for name in TORCH}
SHAPES["amsgrad, capturable"] = lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, fused=True)


@pytest.mark.parametrize("name", SHAPES)
def test_optimizers_of_torch_and_of_users_resume_bit_for_bit(name, tmp_path):
    resumes(SHAPES[name], tmp_path)


IN_A_NEW_PROCESS = ("shared", "objects, views", "tensors in groups", "LBFGS")
_RESUME = "import importlib, json, sys; print(json.dumps(importlib.import_module(sys.argv[1]).resumed_in(sys.argv[2])))"


def resumed_in(folder: str) -> dict[str, list[float]]:
    """The weights at the end of runs that are resumed from `folder`/NAME."""
    ends = {}
    for name in IN_A_NEW_PROCESS:
        (model,) = tw.run_threads(1, functools.partial(train, SHAPES[name], Path(folder, name), STEPS), timeout=600.0)
        ends[name] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return ends


def test_a_new_process_resumes_bit_for_bit(tmp_path):
    for name in IN_A_NEW_PROCESS:
        with pytest.raises(Killed):
            tw.run_threads(1, functools.partial(train, SHAPES[name], tmp_path / name, SAVED), timeout=600.0)
    done = subprocess.run(
        [sys.executable, "-c", _RESUME, __name__, tmp_path],  # by the same name: that of a class is its module's
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == resumed_in(str(tmp_path / "never saved"))


def test_states_of_data_loaders_and_metrics_are_notes_with_their_types(tmp_path):
    """A loader goes on within its epoch, and metrics, a scheduler and a list within them as if nothing had been saved."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    metrics = pytest.importorskip("torchmetrics", reason="pip install torchmetrics")

    def replica(group, folder, steps):
        model, data = nn.Linear(4, 2, bias=False), torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        nn.init.eye_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = loaders.StatefulDataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        of = metrics.MetricCollection({"all": metrics.CatMetric(), "mean": metrics.MeanMetric()})
        of.persistent()
        parts = {"loader": loader, "of": of, "rate": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS)}
        with tw.Replica(tw.local_sgd(every=4), model, optimizer, group) as at:
            if saved := checkpoint.newest(folder)[0]:
                checkpoint.load(saved, at)
                for name, part in parts.items():
                    part.load_state_dict(saved.manifest["notes"][name])
            for x in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                parts["rate"].step()
                of.update(x.sum())
                if at.step == steps:
                    break
            if steps < STEPS:
                checkpoint.save(folder, at, {name: part.state_dict() for name, part in parts.items()})
        return model.weight.tolist(), {name: value.tolist() for name, value in of.compute().items()}

    (through,) = tw.run_threads(1, lambda group: replica(group, tmp_path / "none", STEPS))
    tw.run_threads(1, lambda group: replica(group, tmp_path, SAVED))
    (resumed,) = tw.run_threads(1, lambda group: replica(group, tmp_path, STEPS))
    assert resumed == through and len(through[1]["all"]) == STEPS


def test_fp32_moments_of_bf16_weights_are_not_rounded_by_the_resume(tmp_path):
    def make(model):
        return InFp32(model.parameters())

    def replica(group, steps):
        model = nn.Linear(8, 8, dtype=torch.bfloat16)
        nn.init.eye_(model.weight)
        with tw.Replica(tw.local_sgd(every=4), model, optimizer := make(model), group) as at:
            if saved := checkpoint.newest(tmp_path)[0]:
                checkpoint.load(saved, at)
                return optimizer.state_dict()["state"][0]["average"]
            for _ in range(steps):
                optimizer.step(lambda: model(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward())
            checkpoint.save(tmp_path, at, {})
            return optimizer.state_dict()["state"][0]["average"]

    (due,) = tw.run_threads(1, lambda group: replica(group, 3))
    (got,) = tw.run_threads(1, lambda group: replica(group, 0))
    assert got.dtype == torch.float32 and torch.equal(due, got)


class Colliding(torch.optim.SGD):
    def step(self, closure=None):
        self.state[0] = {"steps": 1}
        return super().step(closure)


class Hooked(torch.optim.SGD):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["hook"] = lambda: 1
        return super().step(closure)


def test_an_entry_that_the_state_dict_would_lose_is_refused(tmp_path):
    def replica(group):
        model = nn.Linear(2, 1)
        optimizer = Colliding(model.parameters(), lr=0.1, momentum=0.9)
        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group, observer=lambda *_, **__: None) as at:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with pytest.raises(tw.CheckpointError, match=r"optimizer.state\[0\] belongs to no parameter"):
                checkpoint.save(tmp_path, at, {})

    tw.run_threads(1, replica)


def test_what_no_checkpoint_can_hold_is_named_after_the_first_step(tmp_path):
    """A warning at once, not a failed save hours later; training goes on."""
    told = []

    def replica(group):
        model = nn.Linear(2, 1)
        optimizer = Hooked(model.parameters(), lr=0.1)

        def observe(event, step, **fields):
            told.append(fields["message"]) if event == "warning" else None

        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group, observer=observe) as at:
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            with pytest.raises(tw.CheckpointError, match=r'optimizer.state\[0\]\["hook"\]: a function'):
                checkpoint.save(tmp_path, at, {})
            assert not list(tmp_path.iterdir())

    tw.run_threads(1, replica)
    assert len(told) == 1 and 'checkpoint.save would refuse this replica: optimizer.state[0]["hook"]' in told[0]


REGISTRY = """
bitsandbytes.optim: AdamW8bit AdamW Adam8bit Lion8bit SGD8bit RMSprop8bit Adagrad8bit LAMB8bit AdEMAMix8bit PagedAdamW8bit
torchao.optim: AdamW8bit AdamW4bit AdamWFp8 Adam8bit
prodigyopt: Prodigy
schedulefree: AdamWScheduleFree SGDScheduleFree
lion_pytorch: Lion
torch_optimizer: A2GradExp AccSGD AdaBound AdaMod Adafactor Apollo DiffGrad Lamb LARS MADGRAD NovoGrad PID QHAdam Ranger Shampoo SWATS Yogi
pytorch_optimizer: SOAP ScalableShampoo Shampoo Prodigy Adan CAME StableSPAM SPAM EmoNavi Kron Lion MARS AdEMAMix GaLore SM3 Tiger
pytorch_optimizer: Ranger21 Adalite Fromage AdaFactor APOLLO Lookahead
"""
TABLE = [
    (package, name)
    for line in REGISTRY.strip().splitlines()
    for package, names in [line.split(": ")]
    for name in names.split()
]
SETTINGS: dict[str, dict[str, Any]] = {
    "torchao.optim": {"block_size": 16},
    "SGD8bit": {"lr": 0.01, "momentum": 0.9},
    "Ranger21": {"num_iterations": STEPS},
}


@pytest.mark.parametrize(("package", "name"), TABLE, ids=[f"{package}.{name}" for package, name in TABLE])
def test_optimizers_of_the_registries_resume_bit_for_bit_or_are_refused_by_name(package, name, tmp_path):
    warnings.simplefilter("ignore")
    found = getattr(pytest.importorskip(package, reason="pip install 'thinwire[optimizers]'"), name)

    def make(model):
        given = torch.optim.AdamW(model.parameters()) if name == "Lookahead" else model.parameters()
        return found(given, **SETTINGS.get(package, {}), **SETTINGS.get(name, {}))

    try:
        resumes(make, tmp_path)
    except (tw.CheckpointError, tw.ModelError, tw.ConfigurationError) as error:
        print(f"{package}.{name}: {error}")
        assert name in REFUSED and REFUSED[name] in str(error)


REFUSED: dict[str, str] = {}


def test_transformers_trains_saves_and_resumes_with_an_optimizer_of_8_bits(tmp_path):
    pytest.importorskip("bitsandbytes", reason="pip install 'thinwire[optimizers]'")
    transformers = pytest.importorskip("transformers")
    from thinwire.integrations.huggingface import ThinwireCallback

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model_of()

        def forward(self, x, labels):
            return {"loss": (self.layers(x) - labels).square().mean()}

    draws = [torch.randn(2, 16, generator=torch.Generator().manual_seed(n)) for n in range(64)]
    data = [{"x": x, "labels": y} for x, y in draws]

    class PowerCut(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 6:
                raise Killed

    def trained(folder, resume, *more):
        args = transformers.TrainingArguments(
            str(folder),
            max_steps=8,
            save_steps=4,
            optim="adamw_bnb_8bit",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = ThinwireCallback(tw.streaming_diloco(every=4, fragments=2, delay=2))
        net = Net()
        trainer = transformers.Trainer(net, args, train_dataset=data, callbacks=[callback, *more])
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            callback.close()
        return net

    through = trained(tmp_path / "whole", None)
    with pytest.raises(Killed):
        trained(tmp_path / "cut", None, PowerCut())
    resumed = trained(tmp_path / "cut", True)
    assert all(torch.equal(one, other) for one, other in zip(through.parameters(), resumed.parameters()))
