"""A small model of odd shapes for the laws, and `journey`, which trains it on replicas in threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.codecs import in_full
from thinwire.comm import Group, run_threads
from thinwire.errors import LinkError
from thinwire.pieces.inner_optimizers import at_the_worst_point
from thinwire.pieces.partition import Fragment
from thinwire.replica import Replica
from thinwire.rng import derive
from thinwire.strategy import Strategy


class Toy(nn.Module):
    """Three layers of odd sizes, parameters outside them, a scalar, an empty and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=i > 0) for i in range(3))
        self.head = nn.Linear(5, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.frozen * torch.tanh(layer(x))
        return torch.mul(self.gain, self.head(x))


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights from a separate generator, because all threads share torch's global one."""
    generator = torch.Generator().manual_seed(derive(seed, "weights"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def toy(seed: int = 0) -> nn.Module:
    return fill(Toy(), seed)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def own(strategy: Strategy, model: nn.Module) -> torch.optim.Optimizer:
    """The strategy's own inner optimizer, or AdamW."""
    return strategy.inner.make(model, 0.01 / strategy.inner.lr_factor, 0.1) if strategy.inner else adamw(model)


def batch(seed: int, rank: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(derive(seed, "batch", rank, step))
    x = torch.randn(size, 3, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    at_the_worst_point(optimizer, partial(_backward, model, x, y))
    optimizer.step()


def _backward(model: nn.Module, x: Tensor, y: Tensor) -> float:
    loss = ((model(x) - y) ** 2).mean()
    torch.autograd.backward(loss)
    return float(loss.detach())


def weights(model: nn.Module) -> Tensor:
    """A flat copy of all trainable parameters, in fp32."""
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters() if p.requires_grad])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are equal bit for bit: NaN equals NaN, and 0 is not −0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes_of(a), _bytes_of(b))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def validation(model: nn.Module) -> Callable[[], list[float]]:
    """The losses on two batches on which no replica trains; these are equal for all replicas."""

    def losses() -> list[float]:
        return [float(((model(x) - y) ** 2).mean()) for x, y in (batch(0, -1, number) for number in range(2))]

    return losses


# ---- training


@dataclass
class Journey:
    """The training of one replica: its weights and the agreed state after every step, and its events."""

    weights: list[Tensor] = field(default_factory=list)
    agreed: list[dict[str, Tensor]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    final_fragments: list[Tensor] = field(default_factory=list)
    final_agreed: dict[str, Tensor] = field(default_factory=dict)
    stopped_at: int = 0

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]


AGREED = ("average", "square", "phase", "exchange.last")  # the states of filters, and the start of the next round


def agreed(replica: Replica) -> dict[str, Tensor]:
    """Anchors and outer state, which must be equal on all replicas."""
    tensors, _ = replica.state()
    kept = {
        name: t.clone()
        for name, t in tensors.items()
        if name.split(".")[1] in ("anchor", "outer") or name.endswith(("feedback.agreed", *AGREED))
    }
    return kept | {f"{i}.now": t.clone() for i, t in enumerate(replica.anchors())}


def still() -> float:
    """A clock that stands still, so that a strategy that depends on time repeats itself."""
    return 0.0


@dataclass
class Plan:
    """How `journey` trains."""

    strategy: Strategy
    steps: int = 14
    model: Callable[[], nn.Module] = toy
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None  # None: the strategy's, or AdamW
    wrap: Callable[[Group], Group] = lambda group: group
    before_step: Callable[[Replica, int], None] = lambda replica, step: None  # called when gradients are computed
    seed: int = 0
    data: Callable[[int], int] = lambda rank: rank  # the rank whose batches a replica trains on
    clock: Callable[[], float] = time.monotonic


def travel(plan: Plan, group: Group) -> Journey:
    """Train one replica, and return its journey."""
    journey, has_state, ends = Journey(), not plan.strategy.policy.constant, False

    def observer(event: str, step: int, **fields: Any) -> None:
        if event == "depart":
            fields |= {"last": ends, "known": {}}  # whether this round ends the run, and the state of the policy
            if has_state:
                prefix = f"{fields['fragment']}.policy."
                known = {name: t for name, t in replica.state()[0].items() if name.startswith(prefix)}
                fields["known"] = {name.removeprefix(prefix): t.clone() for name, t in known.items()}
        journey.events.append({"event": event, "step": step, **fields})

    model = plan.model()
    optimizer = plan.optimizer(model) if plan.optimizer else own(plan.strategy, model)
    group, told = plan.wrap(group), validation(model)
    with Replica(
        plan.strategy, model, optimizer, group, validation=told, observer=observer, clock=plan.clock
    ) as replica:
        for step in range(1, plan.steps + 1):
            x, y = batch(plan.seed, plan.data(group.rank), step)
            optimizer.zero_grad()
            at_the_worst_point(optimizer, partial(_backward, model, x, y))
            plan.before_step(replica, step)
            optimizer.step()
            journey.weights.append(weights(model))
            journey.agreed.append(agreed(replica))
            if replica.stopping:
                break
        journey.stopped_at, ends = replica.step, True
    journey.final, journey.final_agreed = weights(model), agreed(replica)
    journey.final_fragments = [
        torch.cat([p.detach().reshape(-1).float() for _, p in fragment.parameters]) for fragment in replica.fragments
    ]
    return journey


def weighs(strategy: Strategy, departure: dict[str, Any], fragment: Fragment, size: int, rank: int) -> int:
    """The predicted bytes of a departure, from its round and the state of the policy at that time."""
    codec = strategy.codec.fitted(fragment.shapes)
    if departure["round"] < max((one.full for one in strategy.filters), default=0):
        codec = in_full(codec)
    else:
        policy = strategy.policy.last if departure["last"] else strategy.policy
        codec = policy.at(codec, fragment.numel, departure["round"], departure["known"])
    return strategy.exchange.nbytes_sent(codec, fragment.numel, size, rank)


def journey(strategy: Strategy, replicas: int, **plan: Any) -> list[Journey]:
    made = Plan(strategy, **plan)
    return run_threads(replicas, lambda group: travel(made, group), timeout=600.0)


class Shuffled:
    """A group whose messages leave late and in any order. No two messages of a round share a tag, so any order is allowed."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.random = random.Random(f"{seed}/{group.rank}")

    def post(self, tag: int, send: Any, recv: Any, purpose: str = "packet", sized: Any = None) -> Any:
        arriving = self.group.post(tag, {}, recv, purpose, sized)
        peers = list(send)
        self.random.shuffle(peers)
        delays = {peer: self.random.random() * 0.004 for peer in peers}

        def carry() -> None:
            for peer in peers:
                threading.Event().wait(delays[peer])
                # nobody waits for these, so the group may be closed
                with suppress(*[LinkError] * (purpose == "monitor")):
                    self.group.post(tag, {peer: send[peer]}, {}, purpose)

        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        return _Shuffled(arriving, thread)

    def close(self) -> None:
        self.group.close()


class _Shuffled:
    queued_seconds = transfer_seconds = 0.0

    def __init__(self, arriving: Any, thread: threading.Thread) -> None:
        self.arriving, self.thread = arriving, thread

    @property
    def arrivals(self) -> Any:
        return self.arriving.arrivals

    def wait(self) -> None:
        self.thread.join()
        self.arriving.wait()
