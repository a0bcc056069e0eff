"""Merges: how a landed anchor changes a replica's own parameters.

If a round takes a `whole_period`, it lands just before its fragment departs again: the new delta is computed, the previous round
lands, and the new one departs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import unwritten
from thinwire.errors import ConfigurationError
from thinwire.pieces.feedback import Feedback


@runtime_checkable
class Merge(Protocol):
    """How a landed anchor changes the parameters: a frozen dataclass with the method `into`. The defaults of its declarations are
    those of a merge that lands within a period."""

    @property
    def whole_period(self) -> bool:
        """Whether a round takes a whole period: `delay` is `every`."""
        return False

    @property
    def eager(self) -> bool:
        """With `whole_period`: whether the own delta is applied at once, for which the outer step must be linear."""
        return False

    @property
    def forgets(self) -> bool:
        """Whether a landing drops the training during the flight."""
        return False

    @property
    def keeps_flight(self) -> bool:
        """Whether a landing keeps all training during the flight; then `into` is called only if there was none."""
        return False

    @property
    def keeps_unsent(self) -> bool:
        """With `keeps_flight`: whether `leave` is called after a landing during training."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round; empty: the membership may change, and `alpha` is declared."""
        return "needs rounds that take a whole period, no more and no less" if self.whole_period else _NOT_SAID

    @property
    def alpha(self) -> float:
        """The share of its own values that a replica keeps; a merge that needs no fixed group must declare it."""
        return 0.0

    def check(self, delay: int, feedback: Feedback | None) -> None:
        """Raise `ConfigurationError` for a strategy whose flights or feedback do not suit this merge."""
        return

    def into(self, parameter: Tensor, anchor: Tensor) -> None:
        """Merge a slice of the anchor (fp32, same shape) into `parameter` in place, in the parameter's own dtype."""
        raise unwritten(self, "no whole_period", "into")

    def leave(self, parameter: Tensor, residual: Tensor) -> None:
        """Leave a part of what was not sent in `parameter`, and the rest in this slice of feedback's `residual`; both in place."""
        raise unwritten(self, "keeps_unsent", "leave")


_NOT_SAID = "does not declare that rounds may land late (needs_fixed_group = '')"


@dataclass(frozen=True)
class Mix(Merge):
    """θ ← α·θ + (1−α)·anchor (Streaming DiLoCo, arXiv 2501.18512, Algorithm 2, line 14).

        θ ← α·θ + (1 − α)·anchor          in fp32, rounded to the dtype of θ;   α = 0: θ ← anchor;   α = 1: θ ← θ

    With α = 0 the steps of the flight are lost. With α = 1 a replica keeps its own values and never learns from the others.
    *Differs*: nothing.

    Args:
        alpha: the share of its own values that a replica keeps, 0 to 1.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Mix(0.5)
    Mix(alpha=0.5)
    """

    alpha: float = 0.0

    needs_fixed_group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"merge={self.alpha}: between 0 (take the anchor) and 1 (keep the local values) is needed."
            )

    @property
    def forgets(self) -> bool:
        return self.alpha == 0

    @torch.no_grad()
    def into(self, parameter: Tensor, anchor: Tensor) -> None:
        if self.alpha == 0:
            parameter.copy_(anchor)
        elif self.alpha < 1:
            parameter.copy_(torch.lerp(anchor, parameter.to(anchor), self.alpha))


@dataclass(frozen=True)
class Keep(Merge):
    """θ ← anchor + (θ − θ at the departure): take the anchor, and add all steps of the flight.

        θ ← anchor + (θ − θ_d)          θ_d: θ at the departure = the old anchor − Δ, so that it needs no memory

    `Mix(0)` drops these steps, which are τ of every H; `Mix(½)` keeps half of them, and half of the replica's distance from the others.
    With `delay` 0 it is `Mix(0)`. Use it for short flights: the steps were taken from another point, so a long flight costs loss
    (docs/experiments.md). *Source*: none; our own.

    >>> Keep()
    Keep()
    """

    keeps_flight: ClassVar[bool] = True
    needs_fixed_group: ClassVar[str] = ""

    @torch.no_grad()
    def into(self, parameter: Tensor, anchor: Tensor) -> None:
        parameter.copy_(anchor)


@dataclass(frozen=True)
class KeepUnsent(Keep):
    """As `Keep`, and a share of what the codec did not send stays in the parameters; `Feedback` keeps the rest.

        θ ← anchor − ρ·e + (θ − θ_d),   e ← (1 − ρ)·e          e: the residual of feedback; ρ: `share`

    A very sparse codec sends a value after dozens of steps. With `Keep` a replica trains without it until then; here it trains on with a
    share of what it has learned itself, and its next delta contains that share again. When a run ends, the anchors lack what was not
    sent, so use `DenseLast` with it.

    *Source*: with ρ = 1 a replica's own part never leaves it, as in CHOCO-SGD (arXiv 1902.00340) with γ = 1. *Differs*: deltas start at an
    anchor that all know, there each replica tracks each neighbour; ρ is ours.

    Args:
        share: ρ, a number above 0 and at most 1.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed. A strategy needs `feedback` with kappa=0 and a delay of 1
            or more.

    >>> KeepUnsent()
    KeepUnsent(share=0.65)
    """

    share: float = 0.65

    keeps_unsent: ClassVar[bool] = True
    needs_fixed_group: ClassVar[str] = (
        "leaves a part of a counted delta in the parameters, which a round that is taken back would count twice"
    )

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"KeepUnsent(share={self.share}): a share above 0 and at most 1 is needed.")

    def check(self, delay: int, feedback: Feedback | None) -> None:
        if delay == 0 or not feedback or feedback.kappa:
            raise ConfigurationError(
                f"{self} with delay={delay}, feedback={feedback}: what was not sent is the residual of a round that lands during training; "
                "choose Feedback() and a delay of at least 1."
            )

    @torch.no_grad()
    def leave(self, parameter: Tensor, residual: Tensor) -> None:
        parameter.copy_(parameter.sub(residual.to(parameter.device), alpha=self.share))
        residual.mul_(1 - self.share)


@dataclass(frozen=True)
class Eager(Merge):
    """Count the own delta at once and the others' one round late: Δ̃_m(k) = Δ̄(k−1) + (Δ_m(k) − Δ_m(k−1)) / M   (arXiv
    2502.12996, §3).

        anchor ← step(anchor, Δ̄(k−1)),   d_m ← step(d_m, (Δ_m(k) − Δ_m(k−1)) / M),   θ_m ← anchor + d_m

    The exchange may take a whole period: `delay` must equal `every`.

    *Source*: Kale et al. (arXiv 2502.12996, §3). *Differs*: only in form. The outer step is linear, so it is taken twice, on Δ̄ for the anchor,
    which stays bit-identical on all replicas, and on the rest for the replica's own `deviation` d; θ is the paper's. Own deltas are applied
    locally without passing through the codec. State: anchor and momentum twice, and the last own delta: 12 bytes per parameter more than `Mix`.

    >>> Eager()
    Eager()
    """

    whole_period: ClassVar[bool] = True
    eager: ClassVar[bool] = True


@dataclass(frozen=True)
class Reset(Merge):
    """θ ← anchor whenever a fragment departs, so that every replica begins each round at the same point (CO2, Sun et al., ICLR 2024).
    The trained delta is in flight then, and returns with the anchor after the next period.

        x_(t+1) = x_t − step(mean Δ_(t−1)),   Δ_t = x_t − θ after H steps from x_t

    `delay` must equal `every`. The outer step sees deltas that are exactly one round old, so it needs a small rate or momentum, or
    `HeavyBall` with its penalty and clip. State: 4 bytes per parameter for the delta in flight.

    *Source*: Sun et al. (arXiv 2401.16265). *Differs*: deltas travel, in the paper parameters, which is the same up to rounding and the codec.
    A dropped round departs again with the next one.

    >>> Reset()
    Reset()
    """

    whole_period: ClassVar[bool] = True
