"""The table of methods that have their own loop, and a short way to train a toy model with any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.lab.methods import METHODS, Attached, Masha1, Method, Saddle, ZerothOrder, saddle
from thinwire.testing.toy import batch, toy, weights

LOOPS: dict[str, Method] = {
    # every method under its own name, with settings short enough for a test
    "just_one_byte": METHODS["just_one_byte"](samples=2, radius=1e-2),
    "fedavg": METHODS["fedavg"](every=3),
    "scaffold": METHODS["scaffold"](every=3, outer_lr=0.7),
    "scallion": METHODS["scallion"](every=3, codec=tw.codecs.RandomK(0.5, tw.codecs.Int(8, 32, "fp32", "stochastic"))),
    "scafcom": METHODS["scafcom"](every=3, codec=tw.codecs.TopK(0.3)),
    "flasc": METHODS["flasc"](every=3, up=0.4, down=0.7, outer_lr=0.05),
    # one sampled replica at a time
    "fedavg, one": METHODS["fedavg"](every=2, sampled=1, codec=tw.codecs.Cast("bf16")),
    "scafcom, one": METHODS["scafcom"](every=2, sampled=1, codec=tw.codecs.Sign()),
}
LR = 0.02


@dataclass
class TrainedReplica:
    """The history of one replica: weights after every step, and events."""

    attached: Attached
    weights: list[Tensor] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


@dataclass
class ToyRun:
    """How to train: `loss_scale(rank, step)` multiplies a loss, `data(rank)` says which replica's data a replica reads."""

    method: Method
    steps: int = 8
    model: Callable[[], nn.Module] = toy
    wrap: Callable[[tw.Group], tw.Group] = lambda group: group
    data: Callable[[int], int] = lambda rank: rank
    loss_scale: Callable[[int, int], float] = lambda rank, step: 1.0
    names: tuple[str, ...] | None = None


def attach(run: ToyRun, group: tw.Group, model: nn.Module | None = None) -> TrainedReplica:
    model, events = model or run.model(), []

    def observer(event: str, step: int, **fields: Any) -> None:
        events.append({"event": event, "step": step, **fields})

    optimizer = run.method.optimizer(model, LR)
    return TrainedReplica(
        run.method.attach(model, optimizer, run.wrap(group), names=run.names, observer=observer), events=events
    )


def one_step(run: ToyRun, at: Attached, rank: int) -> None:
    """Takes one step of any method, on the batches of `rank` and step."""

    def loss(sample: int) -> Tensor:
        x, y = batch(0, run.data(rank), 10 * at.step + sample)
        return ((at.model(x) - y) ** 2).mean() * run.loss_scale(rank, at.step)

    if isinstance(at, ZerothOrder):
        at.iterate(loss)
        return
    if at.idle:
        at.skip()
        return
    at.optimizer.zero_grad()
    loss(0).backward()
    at.exchange_gradients()
    at.optimizer.step()


def train_until(run: ToyRun, trained: TrainedReplica, group: tw.Group, upto: int) -> TrainedReplica:
    while trained.attached.step < upto and not trained.attached.stopping:
        one_step(run, trained.attached, group.rank)
        trained.weights.append(weights(trained.attached.model))
    return trained


def all_of_them(rank: int) -> dict[str, tuple[Tensor, ...]]:
    """Runs in a world of processes, and returns the weights that every method leaves on all replicas."""
    group, left = tw.TorchGroup.from_world(replicas=4, timeout=600.0), {}
    for name, method in LOOPS.items():
        run = ToyRun(method)
        trained = train_until(run, attach(run, group), group, run.steps)
        agreed = [trained.attached.state()[0][key] for key in ("x", "c") if key in trained.attached.state()[0]]
        trained.attached.finish()
        left[name] = (*agreed, weights(trained.attached.model))
    at = Saddle(Masha1(step=0.3), saddle(lambda x, y: (x * y * (1 + rank)).sum(), 20), torch.linspace(-1, 1, 40), group)
    for _ in range(30):
        at.iterate()
    return left | {"masha1": (at.z, at.w, at.mean_at_w)}


def train_toys(method: Method, replicas: int, **how: Any) -> list[TrainedReplica]:
    run = ToyRun(method, **how)

    def replica(group: tw.Group) -> TrainedReplica:
        trained = train_until(run, attach(run, group), group, run.steps)
        trained.attached.finish()
        trained.final = weights(trained.attached.model)
        return trained

    return tw.run_threads(replicas, replica, timeout=600.0)
