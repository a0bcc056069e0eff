"""Replicas of different small language models that codistill: a synthetic text, two models, and a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.comm import Group
from thinwire.lab.methods import Codistill, codistill
from thinwire.lab.methods.codistill import Talking
from thinwire.testing.toy import fill, weights

VOCABULARY, PROBE = 12, 6
METHOD = codistill(every=4, delay=2, probe=PROBE, top=3, warmup=4, weight=1.0)
Change = Callable[[int, int, Tensor], Tensor]  # maps (rank, part of the probe set, logits) to the logits that are sent


def as_they_are(rank: int, number: int, logits: Tensor) -> Tensor:
    return logits


def chain(stream: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and the tokens that follow them, mostly 3·x + 1."""
    generator = torch.Generator().manual_seed(stream)
    tokens = torch.randint(0, VOCABULARY, (count,), generator=generator)
    noise = torch.randint(0, 3, (count,), generator=generator)
    return tokens, (3 * tokens + 1 + torch.where(noise == 0, noise + 1, 0)) % VOCABULARY


def model_of(width: int, seed: int = 0) -> nn.Module:
    return fill(nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)), seed)


@dataclass
class ChainProbe:
    """The probe set. `change` replaces the logits that a replica's model gives."""

    model: nn.Module
    rank: int = 0
    change: Change = as_they_are
    vocabulary: int = VOCABULARY

    def targets(self, number: int) -> Tensor:
        return chain(1000 + number, PROBE)[1]

    def logits(self, number: int) -> Tensor:
        logits: Tensor = self.model(chain(1000 + number, PROBE)[0])
        return logits if torch.is_grad_enabled() else self.change(self.rank, number, logits)


@dataclass
class TrainedReplica:
    """The history of one replica."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    events: list[dict[str, Any]] = field(default_factory=list)
    attached: Talking | None = None

    @property
    def final(self) -> Tensor:
        return weights(self.model)

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]


def attach(
    method: Codistill, group: Group, change: Change = as_they_are, seed: int = 0, width: int = 0
) -> TrainedReplica:
    """Attaches a replica. Replica 0 has width 4, replica 1 has 6, and so on, unless `width` is given."""
    model = model_of(width or 4 + 2 * group.rank, seed)
    trained = TrainedReplica(model, torch.optim.AdamW(model.parameters(), lr=0.05))

    def observe(event: str, step: int, **fields: Any) -> None:
        trained.events.append({"event": event, "step": step, **fields})

    probe = ChainProbe(model, group.rank, change)
    trained.attached = method.attach(model, trained.optimizer, group, probe=probe, observer=observe)
    return trained


def inner_step(trained: TrainedReplica, rank: int, step: int) -> None:
    tokens, targets = chain(100 * step + rank, 5)
    trained.optimizer.zero_grad()
    F.cross_entropy(trained.model(tokens), targets).backward()
    trained.optimizer.step()


def train_until(trained: TrainedReplica, rank: int, until: int) -> TrainedReplica:
    assert trained.attached
    while trained.attached.step < until and not trained.attached.stopping:
        inner_step(trained, rank, trained.attached.step + 1)
    return trained


def train(
    group: Group, method: Codistill = METHOD, steps: int = 24, change: Change = as_they_are, **more: Any
) -> TrainedReplica:
    """Runs the whole training of one replica."""
    trained = train_until(attach(method, group, change, **more), group.rank, steps)
    assert trained.attached
    trained.attached.finish()
    return trained


def alone(rank: int, steps: int = 24) -> Tensor:
    """Trains the same replica without any method, and returns its weights."""
    model = model_of(4 + 2 * rank)
    trained = TrainedReplica(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(1, steps + 1):
        inner_step(trained, rank, step)
    return trained.final
