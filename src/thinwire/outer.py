"""The outer step: how the agreed delta moves the anchor.

Nothing is changed in place, so a round that fails half-way has changed nothing: new tensors come back, or are written
into others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.errors import ConfigurationError

State = Mapping[str, Tensor]


@runtime_checkable
class Outer(Protocol):
    """`linear`: the anchor's movement is linear in the deltas (eager updates need that)."""

    @property
    def linear(self) -> bool: ...

    def init(self, anchor: Tensor) -> State: ...

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        """The new anchor and state after `delta` (= anchor − parameters, so it is subtracted)."""


@runtime_checkable
class Elementwise(Outer, Protocol):
    """An outer step that treats every element by itself: any range of a fragment may be stepped alone, in place of the
    whole, while it is in the cache.
    """

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        """As `step`, into `moved` and the tensors of `after`."""


def _stepped(outer: Elementwise, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
    moved, after = torch.empty_like(anchor), {name: torch.empty_like(kept) for name, kept in state.items()}
    outer.step_into(anchor, delta, state, moved, after)
    return moved, after


@dataclass(frozen=True)
class Average:
    """anchor ← anchor − Δ: the mean of the replicas' parameters (Local SGD, arXiv 1805.09767)."""

    linear = True

    def init(self, anchor: Tensor) -> State:
        return {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return _stepped(self, anchor, delta, state)

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        torch.sub(anchor, delta, out=moved)


@dataclass(frozen=True)
class Nesterov:
    """v ← μ·v + Δ;  anchor ← anchor − η·(Δ + μ·v)   (DiLoCo, arXiv 2311.08105, §3; the form of torch and optax).

    `lr` is η, `momentum` is μ. The first step is −η(1+μ)Δ, the steady one −ηΔ/(1−μ): 0.76Δ and 4Δ for η = 0.4, μ =
    0.9. With μ = 0 it is plain SGD and keeps no state. State: 4 bytes per parameter.
    """

    lr: float = 0.4
    momentum: float = 0.9

    linear = True

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"Nesterov(lr={self.lr}, momentum={self.momentum}): lr > 0 and 0 <= momentum < 1 are needed; 0.4 and 0.9 are the paper's."
            )

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)} if self.momentum else {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        return _stepped(self, anchor, delta, state)

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        if not self.momentum:
            torch.sub(anchor, torch.mul(delta, self.lr, out=moved), out=moved)
            return
        before, velocity = state["momentum"], after["momentum"]
        fast = kernels.of(anchor, delta, before, moved, velocity)
        fast.nesterov(anchor, delta, before, self.lr, self.momentum, moved, velocity)
