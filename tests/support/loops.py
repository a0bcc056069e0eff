"""The table of methods that have their own loop, and a short way to train a toy model with any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.methods import METHODS, Attached, Masha1, Method, Saddle, ZerothOrder, saddle
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
class Trip:
    """The history of one replica: weights after every step, and events."""

    at_work: Attached
    weights: list[Tensor] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


@dataclass
class Tour:
    """How to train: `loss_scale(rank, step)` multiplies a loss, `data(rank)` says which replica's data a replica reads."""

    method: Method
    steps: int = 8
    model: Callable[[], nn.Module] = toy
    wrap: Callable[[tw.Group], tw.Group] = lambda group: group
    data: Callable[[int], int] = lambda rank: rank
    loss_scale: Callable[[int, int], float] = lambda rank, step: 1.0
    names: tuple[str, ...] | None = None


def attach(tour: Tour, group: tw.Group, model: nn.Module | None = None) -> Trip:
    model, events = model or tour.model(), []

    def observer(event: str, step: int, **fields: Any) -> None:
        events.append({"event": event, "step": step, **fields})

    optimizer = tour.method.optimizer(model, LR)
    return Trip(
        tour.method.attach(model, optimizer, tour.wrap(group), names=tour.names, observer=observer), events=events
    )


def one_step(tour: Tour, at: Attached, rank: int) -> None:
    """Takes one step of any method, on the batches of `rank` and step."""

    def loss(sample: int) -> Tensor:
        x, y = batch(0, tour.data(rank), 10 * at.step + sample)
        return ((at.model(x) - y) ** 2).mean() * tour.loss_scale(rank, at.step)

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


def go_on(tour: Tour, trip: Trip, group: tw.Group, upto: int) -> Trip:
    while trip.at_work.step < upto and not trip.at_work.stopping:
        one_step(tour, trip.at_work, group.rank)
        trip.weights.append(weights(trip.at_work.model))
    return trip


def all_of_them(rank: int) -> dict[str, tuple[Tensor, ...]]:
    """Runs in a world of processes, and returns the weights that every method leaves on all replicas."""
    group, left = tw.TorchGroup.from_world(replicas=4, timeout=600.0), {}
    for name, method in LOOPS.items():
        made = Tour(method)
        trip = go_on(made, attach(made, group), group, made.steps)
        agreed = [trip.at_work.state()[0][key] for key in ("x", "c") if key in trip.at_work.state()[0]]
        trip.at_work.finish()
        left[name] = (*agreed, weights(trip.at_work.model))
    at = Saddle(Masha1(step=0.3), saddle(lambda x, y: (x * y * (1 + rank)).sum(), 20), torch.linspace(-1, 1, 40), group)
    for _ in range(30):
        at.iterate()
    return left | {"masha1": (at.z, at.w, at.mean_at_w)}


def tour(method: Method, replicas: int, **how: Any) -> list[Trip]:
    made = Tour(method, **how)

    def replica(group: tw.Group) -> Trip:
        trip = go_on(made, attach(made, group), group, made.steps)
        trip.at_work.finish()
        trip.final = weights(trip.at_work.model)
        return trip

    return tw.run_threads(replicas, replica, timeout=600.0)
