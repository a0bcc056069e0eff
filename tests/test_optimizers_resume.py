"""Optimizers as people use them: a run that was saved, dropped and resumed ends with the bits of one that was never stopped.

torch's own and constructed shapes of state run always. The table from the registries runs where `thinwire[optimizers]` is installed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import checkpoint

STEPS, SAVED = 12, 7


class Killed(Exception):
    """In place of a kill: no last round, nothing is left but the files."""


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))


def train(make: Callable[..., Any], folder, steps, group):
    """Train up to `steps`, from the checkpoint in `folder` if there is one."""
    torch.manual_seed(7)
    model = model_of()
    optimizer = make(model)
    getattr(optimizer, "train", bool)()  # schedule-free ones
    with tw.Replica(tw.diloco(every=4), model, optimizer, group, observer=lambda *_, **__: None) as replica:
        if saved := checkpoint.newest(folder)[0]:
            checkpoint.load(saved, replica)
        for step in range(replica.step + 1, steps + 1):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))

            def closure(x=x):
                optimizer.zero_grad()
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            if steps == SAVED and step == SAVED:
                checkpoint.save(folder, replica, {})
                raise Killed
    return model


def resumes(make, tmp_path) -> None:
    (through,) = tw.run_threads(1, functools.partial(train, make, tmp_path / "none", STEPS), timeout=600.0)
    with pytest.raises(Killed):
        tw.run_threads(1, functools.partial(train, make, tmp_path / "saved", SAVED), timeout=600.0)
    (resumed,) = tw.run_threads(1, functools.partial(train, make, tmp_path / "saved", STEPS), timeout=600.0)
    for one, other in zip(through.parameters(), resumed.parameters()):
        assert torch.equal(one, other), (one - other).abs().max()


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


class Hooked(torch.optim.SGD):
    def step(self, closure=None):
        self.state[self.param_groups[0]["params"][0]]["hook"] = lambda: 1
        return super().step(closure)


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
