"""Asynchronous deltas: weights by tokens and age, and a correction of stale deltas.

A delta is `stale` by the number of its fragment's rounds since its replica took over the anchor at which the delta starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError


@runtime_checkable
class Weigh(Protocol):
    """The weight of a delta: a frozen dataclass. A round's estimate is Σ w·Δ / Σ w over all replicas present; one that has sent nothing
    counts as a zero delta with the weight of its last one.
    """

    def weight(self, tokens: float, steps: int, stale: int) -> float:
        """w ≥ 0 of a delta from `tokens` in inner `steps`, which is `stale` by a number of rounds."""


@dataclass(frozen=True)
class ByTokens(Weigh):
    """w = (tokens²/steps) · (1 + s)^−p: by tokens and tokens per step, less for each round of age s.

        w_m = (tokens² / steps)·(1 + s)^−p,   estimate = Σ_m w_m·Δ_m / Σ w          Σ w: over all replicas, absent ones with their last weight

    *Source*: c_tokens·(c_tokens/c_steps) is Decoupled DiLoCo's (arXiv 2604.21428). *Differs*: the age is ours, `power` 0 turns it off. The mean
    is the plain one; the paper's takes lengths and directions apart.

    Args:
        power: p, a factor's exponent, 0 or more.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> [round(ByTokens(0.5).weight(tokens, steps, stale), 3) for tokens, steps, stale in ((40, 4, 0), (20, 2, 0), (40, 4, 3))]
    [400.0, 200.0, 200.0]
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.power < math.inf:
            raise ConfigurationError(f"{self}: power >= 0 is needed; 0 ignores the age.")

    def weight(self, tokens: float, steps: int, stale: int) -> float:
        return float(tokens * tokens / max(1, steps) * (1 + stale) ** -self.power)


@dataclass(frozen=True)
class Alike(Weigh):
    """w = 1: every delta counts alike, however many tokens stand behind it.

        w_m = 1,   estimate = Σ_m Δ_m / the number of replicas present, whether they have sent one or not

    *Source*: none; equal weights.

    >>> Alike().weight(tokens=40, steps=4, stale=3)
    1.0
    """

    def weight(self, tokens: float, steps: int, stale: int) -> float:
        return 1.0


@runtime_checkable
class Correct(Protocol):
    """The correction of a stale delta before it counts: a frozen dataclass."""

    def corrected(self, delta: Tensor, momentum: Tensor | None, stale: int) -> Tensor:
        """The corrected delta, flat fp32; `delta` itself does not change. `momentum` is the outer step's; None if it has none."""


@dataclass(frozen=True)
class HeLoCo(Correct):
    """Removes from a stale delta the part that opposes the outer momentum:  Δ ← Δ − κ·min(0, ⟨Δ, v⟩)/⟨v, v⟩ · v,  κ = strength · s/(1 + s).

        κ = strength·s / (1 + s)          v: the outer momentum, s: the rounds by which Δ is stale

    *Source*: HeLoCo (arXiv 2606.00271) corrects stale deltas that oppose the outer momentum. *Differs*: only its abstract was available,
    so the rule is ours: a projection of the whole fragment, stronger for older deltas. A fresh delta, or one that does not oppose the
    momentum, is unchanged, bit for bit.

    Args:
        strength: 0 to 1; 0 corrects nothing.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> HeLoCo().corrected(torch.tensor([-2.0, 1.0]), torch.tensor([1.0, 0.0]), stale=1)  # half of −2 is removed
    tensor([-1.,  1.])
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise ConfigurationError(f"{self}: a strength from 0 to 1 is needed; 0 corrects nothing.")

    def corrected(self, delta: Tensor, momentum: Tensor | None, stale: int) -> Tensor:
        if not stale or momentum is None or not self.strength:
            return delta
        forward = float(torch.dot(delta.double(), momentum.double()))
        length = float(torch.dot(momentum.double(), momentum.double()))
        if forward >= 0 or not length < math.inf:
            return delta
        return delta.sub(momentum, alpha=self.strength * stale / (1 + stale) * forward / length)
