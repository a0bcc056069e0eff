"""Outer steps: how the agreed delta moves the anchor.

Nothing is changed in place: results are new tensors, or are written into given ones. So a round that fails half-way changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import unwritten
from thinwire.codecs.exact import divide, energy
from thinwire.errors import ConfigurationError
from thinwire.types import State


@runtime_checkable
class Outer(Protocol):
    """A frozen dataclass with the method `step`, or `step_into` if it declares `elementwise`. The defaults of the other declarations
    describe a step without state that cannot be split.
    """

    @property
    def linear(self) -> bool:
        """Whether the anchor's movement is linear in the deltas, which eager updates need."""
        return False

    @property
    def elementwise(self) -> bool:
        """Whether elements are independent: then `step_into` is called range by range, while a range is in the cache."""
        return False

    @property
    def last(self) -> Outer:
        """The outer step for a round that ends training in the middle of a period; it leaves this one's state unchanged."""
        return self

    @property
    def needs_whole_period(self) -> bool:
        """Whether it needs deltas that land a whole period after they departed."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round; empty: a replica that joins may take over its state."""
        return ""

    def init(self, anchor: Tensor) -> State:
        """The first state for a fragment: tensors like `anchor` if it is `elementwise`."""
        return {}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        """The new anchor and state after `delta` (= anchor − parameters, so it is subtracted)."""
        moved, after = torch.empty_like(anchor), {name: torch.empty_like(kept) for name, kept in state.items()}
        self.step_into(anchor, delta, state, moved, after)
        return moved, after

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        """Like `step`, but writes into `moved` and the tensors of `after`."""
        raise unwritten(self, "no step of its own", "step_into")


@dataclass(frozen=True)
class Average(Outer):
    """anchor ← anchor − Δ: the mean of the replicas' parameters (Local SGD, arXiv 1805.09767).

        anchor ← anchor − Δ = (1/M) Σ_m θ_m          with Δ = (1/M) Σ_m (anchor − θ_m)

    *Source*: Stich (arXiv 1805.09767, Algorithm 1). *Differs*: deltas travel, not parameters: the same mean up to rounding and the codec.

    >>> Average().step(torch.zeros(2), torch.tensor([1.0, -2.0]), {})[0]
    tensor([-1.,  2.])
    """

    linear: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        torch.sub(anchor, delta, out=moved)
        for name, kept in state.items():  # state of the outer step whose `last` this is
            after[name].copy_(kept)


@dataclass(frozen=True)
class Nesterov(Outer):
    """v ← μ·v + Δ;  anchor ← anchor − η·(Δ + μ·v)   (DiLoCo, arXiv 2311.08105, §3; the form of torch and optax).

        first step = −η·(1 + μ)·Δ,   steady step = −η·Δ/(1 − μ)          0.76Δ and 4Δ for η = 0.4, μ = 0.9

    With μ = 0 it is plain SGD and keeps no state. State: 4 bytes per parameter. *Differs*: the default η is that of Streaming DiLoCo (DiLoCo's
    is 0.7). A round that ends training in the middle of a period takes the step of `Average`.

    Args:
        lr: η, the learning rate.
        momentum: μ, in [0, 1).

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Nesterov(lr=0.4).init(torch.zeros(2))
    {'momentum': tensor([0., 0.])}
    """

    lr: float = 0.4
    momentum: float = 0.9

    linear: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    last: ClassVar[Outer] = Average()  # a whole momentum step for a small delta would overshoot

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"Nesterov(lr={self.lr}, momentum={self.momentum}): lr > 0 and 0 <= momentum < 1 are needed; the paper uses 0.4 and 0.9."
            )

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)} if self.momentum else {}

    def step_into(self, anchor: Tensor, delta: Tensor, state: State, moved: Tensor, after: State) -> None:
        if not self.momentum:
            torch.sub(anchor, torch.mul(delta, self.lr, out=moved), out=moved)
            return
        before, velocity = state["momentum"], after["momentum"]
        fast = kernels.of(anchor, delta, before, moved, velocity)
        fast.nesterov(anchor, delta, before, self.lr, self.momentum, moved, velocity)


@dataclass(frozen=True)
class DelayedNesterov(Outer):
    """Every step −η·Δ; momentum only at every N-th:  v ← μ·v + Σ Δ of the last N, and then −η·(Δ + μ·v).

        S ← S + Δ;   at every N-th step  v ← μ·v + S,   S ← 0,   anchor ← anchor − η·(Δ + μ·v);   at the others  anchor ← anchor − η·Δ

    For deltas that come one by one (`thinwire.drivers.unequal`): momentum at each of them would count the same direction N times.
    N such steps are about one of `Nesterov`; with N = 1 each is.

    *Source*: Liu et al., *Asynchronous Local-SGD Training for Language Modeling* (arXiv 2401.09135, Algorithm 3). *Differs*: c,
    a setting of the paper, is 0, and Δ is a replica's share of the mean, where the paper divides by N in the step.
    State: 8 bytes per parameter, and a count.

    Args:
        lr: η, the learning rate.
        momentum: μ, in [0, 1).
        updates: N, the number of steps for one change of the momentum; the number of replicas is usual.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> outer, x = DelayedNesterov(lr=1.0, momentum=0.5, updates=2), torch.zeros(1)
    >>> state = outer.init(x)
    >>> for _ in range(2):
    ...     x, state = outer.step(x, torch.ones(1), state)
    >>> x.item(), state["momentum"].item()
    (-3.0, 2.0)
    """

    lr: float = 0.4
    momentum: float = 0.9
    updates: int = 2

    linear: ClassVar[bool] = True
    last: ClassVar[Outer] = Average()

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1 or type(self.updates) is not int or self.updates < 1:
            raise ConfigurationError(
                f"{self}: lr > 0, 0 <= momentum < 1 and a whole number of updates above 0 are needed; 0.4, 0.9 and the number of replicas "
                "are usual."
            )

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor), "sum": torch.zeros_like(anchor), "count": torch.zeros(1)}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        total, count = state["sum"] + delta, int(state["count"]) + 1
        if count < self.updates:
            after = {"momentum": state["momentum"].clone(), "sum": total, "count": torch.tensor([float(count)])}
            return anchor - delta * self.lr, after
        momentum = torch.mul(state["momentum"], self.momentum).add_(total)
        moved = anchor - (momentum * self.momentum).add_(delta).mul_(self.lr)
        return moved, {"momentum": momentum, "sum": torch.zeros_like(total), "count": torch.zeros(1)}


@dataclass(frozen=True)
class HeavyBall(Outer):
    """m ← clip(μ·m + Δ/Λ, ±φ);  anchor ← anchor − η·m     (SlowMo, arXiv 1910.00643; CO2, Sun et al., ICLR 2024)

        Λ = 1 + gap·‖anchor − the anchor that Δ is from‖ / ‖Δ‖      over the fragment

    `lr` is η, `momentum` μ, `clip` φ, for each element. `gap` penalises deltas that are a round old (`Reset`) by the anchor's movement
    meanwhile, which is η·‖m‖; 0 turns it off. *Differs*: the paper measures Λ in inner steps, whose length a replica knows only
    for its own; here it is measured in the anchor's movement, which all replicas know. So it is larger if replicas move apart
    (docs/experiments.md). Their released code uses a constant Λ, and its clip has no effect.

    State: 4 bytes per parameter, and twice that during the step.

    Args:
        lr: η, the learning rate.
        momentum: μ, in [0, 1).
        gap: factor of the penalty; 0 turns it off.
        clip: φ, the largest magnitude of the values of m; None does not clip.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> outer, still = HeavyBall(lr=0.5, momentum=0.0, clip=1.0), torch.zeros(2)
    >>> outer.step(still, torch.tensor([4.0, -0.5]), outer.init(still))[0]
    tensor([-0.5000,  0.2500])
    """

    lr: float = 1.0
    momentum: float = 0.0
    gap: float = 0.0
    clip: float | None = None

    last: ClassVar[Outer] = Average()  # as Nesterov's

    def __post_init__(self) -> None:
        bounded = self.clip is None or 0 < self.clip < math.inf
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1 or not 0 <= self.gap < math.inf or not bounded:
            raise ConfigurationError(
                f"{self}: lr > 0, 0 <= momentum < 1, gap >= 0 and clip > 0 (or None) are needed; CO2 has 1.0, 0.0 to 0.6, 1.0 and 1.0."
            )

    @property
    def linear(self) -> bool:
        return not self.gap and self.clip is None

    @property
    def needs_whole_period(self) -> bool:
        return self.gap > 0  # without it the anchor has not moved meanwhile

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)}

    def step(self, anchor: Tensor, delta: Tensor, state: State) -> tuple[Tensor, State]:
        momentum = torch.mul(state["momentum"], self.momentum).add_(divide(delta.clone(), self.penalty(delta, state)))
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        return torch.sub(anchor, torch.mul(momentum, self.lr)), {"momentum": momentum}

    def penalty(self, delta: Tensor, state: State) -> float:
        """Λ, with the same bits on every machine."""
        if not self.gap or not bool(delta.any()):
            return 1.0
        moved = self.lr * math.sqrt(energy(state["momentum"]))
        return 1.0 + self.gap * moved / math.sqrt(energy(delta))
