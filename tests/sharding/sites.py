"""What the tests of sharding train: a small model of odd sizes, on threads or processes, beside plain data-parallel training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import CountedGroup, Group, Ledger
from thinwire.rng import derive
from thinwire.sharding import Sharded, Sharding


class Odd(nn.Module):
    """Three layers and what is outside them; no size is a multiple of eight, one parameter is frozen, one tensor tied."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3))
        self.layers[2][0].weight = self.layers[0][0].weight
        self.head = nn.Linear(5, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        generator = torch.Generator().manual_seed(derive(seed, "weights"))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + self.frozen * layer(x)
        return self.gain * self.head(x)


def batch(rank: int, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(derive(7, "batch", rank, step, micro))
    x = torch.randn(4, 3, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0, of: int = 1) -> Tensor:
    x, y = batch(rank, step, micro)
    return ((model(x) - y) ** 2).mean() / of


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)


def weights(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).float() for value in tensors.values()])


def plainly(ranks: int, steps: int, make: Any = adamw, micro: int = 1, clip: float | None = None) -> Tensor:
    """Data-parallel training in one process: the gradients of all ranks, times 1/ranks, added in the order of ranks."""
    model = Odd()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        means = {p: torch.zeros_like(p) for p in model.parameters() if p.requires_grad}
        for rank in range(ranks):
            for m in range(micro):
                loss_of(model, rank, step, m, micro).backward()
            for p, mean in means.items():
                mean.add_(p.grad * (1 / ranks))
                p.grad = None
        for p, mean in means.items():
            p.grad = mean
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return weights(model.state_dict())


@dataclass
class Seen:
    """What one rank saw."""

    final: Tensor
    counts: list[dict[str, dict[int, int]]] = field(default_factory=list)  # of each step, by purpose and peer
    numels: list[int] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def sent(ledger: Ledger) -> dict[str, dict[int, int]]:
    return {
        purpose: {int(peer): int(count["nbytes"]) for peer, count in peers.items()}
        for purpose, peers in ledger.as_dict()["sent"].items()
    }


def less(now: dict[str, dict[int, int]], before: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    """What was sent since, without what is nothing."""
    found = {
        purpose: {peer: n - before.get(purpose, {}).get(peer, 0) for peer, n in peers.items()}
        for purpose, peers in now.items()
    }
    return {p: {peer: n for peer, n in peers.items() if n} for p, peers in found.items() if any(peers.values())}


def train(
    group: Group, sharding: Sharding, steps: int = 4, make: Any = adamw, micro: int = 1, clip: float | None = None
) -> Seen:
    torch.set_num_threads(1)
    ledger = Ledger()
    counted = CountedGroup(group, ledger)
    model = Odd()
    optimizer = make(model)
    with Sharded(sharding, model, optimizer, counted) as sharded:
        seen = Seen(torch.empty(0), numels=sharded.numels)
        for step in range(steps):
            before = sent(ledger)
            total = 0.0
            for m in range(micro):
                loss = loss_of(model, group.rank, step, m, micro)
                loss.backward()
                total += float(loss.detach())
            if clip is not None:
                sharded.clip_grad_norm(clip)
            optimizer.step()
            optimizer.zero_grad()
            seen.counts.append(less(sent(ledger), before))
            seen.losses.append(total)
    seen.final = weights(model.state_dict())
    return seen
