"""Merges: how a landed anchor changes a replica's own parameters.

If a round takes a `whole_period`, it lands just before its fragment departs again: the new delta is computed, the previous round
lands, and the new one departs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import unwritten
from thinwire.errors import ConfigurationError
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import held_by
from thinwire.types import State


class Landing(NamedTuple):
    """A parameter of a fragment whose round lands: its own values, and slices of the anchor `before` and of the next one, in its shape. If steps
    were taken in flight and are to count, the `delta` that departed and the next `residual` of feedback; otherwise None.
    """

    parameter: Tensor
    before: Tensor
    anchor: Tensor
    delta: Tensor | None = None
    residual: Tensor | None = None


class Held(Protocol):
    """What a merge needs of a fragment (drivers/fragment.py)."""

    anchor: Tensor
    rounds: int
    own: Tensor | None
    deviation: Tensor | None
    deviation_state: State

    @property
    def base(self) -> Tensor: ...

    @property
    def dropped(self) -> bool: ...

    def load_into_parameters(self, flat: Tensor) -> None: ...


class Room(Protocol):
    """What a merge needs of a pool of buffers (exchange/buffers.py)."""

    def like(self, tensor: Tensor) -> Tensor: ...

    def give(self, *tensors: Tensor | None) -> None: ...

    def swap(self, old: Iterable[Tensor | None], new: Iterable[Tensor]) -> None: ...


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
        """Whether a landing keeps all training during the flight."""
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

    def before_send(self, fragment: Held, delta: Tensor, outer: Outer, share: float, buffers: Room) -> None:
        """Called when `delta` is about to depart and the round before it has landed; may change it, the parameters, and what the `fragment`
        keeps. `share` is this replica's in the mean."""
        return

    def on_land(self, parts: Sequence[Landing]) -> None:
        """Called when a round lands: merges the next anchor into the parameters, by default by `into`."""
        for part in parts:
            self.into(part.parameter, part.anchor.to(part.parameter.device))


_PIECE = 1 << 22  # values that a landing moves at a time: few calls and copies, and little memory
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

    def on_land(self, parts: Sequence[Landing]) -> None:
        # θ ← θ + (anchor' − (anchor − Δ)) part by part, in pieces: it needs no buffers of the fragment's size
        for part, base, ahead, change, _ in parts:
            if change is None:
                self.into(part, ahead.to(part.device))
                continue
            if not part.is_contiguous() or part.dtype == torch.float64:
                part.copy_(part.to(base) + (held_by(part, ahead) - (held_by(part, base) - change)))
                continue
            flat = (part.view(-1), base.reshape(-1), change.reshape(-1), ahead.reshape(-1))
            pieces = zip(*(torch.split(tensor, _PIECE) for tensor in flat)) if part.numel() > _PIECE else [flat]
            for own, before, by, after in pieces:
                if own.device == before.device and own.dtype == torch.float32:
                    kernels.of(own, before, by, after).carry(own, before, by, after)
                else:
                    own.add_((held_by(own, after) - (held_by(own, before) - by)).to(own.device))


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

    def on_land(self, parts: Sequence[Landing]) -> None:
        super().on_land(parts)
        for part in parts:
            if part.residual is not None:
                self.leave(part.parameter, part.residual)

    @torch.no_grad()
    def leave(self, parameter: Tensor, residual: Tensor) -> None:
        """Leave a part of what was not sent in `parameter`, and the rest in this slice of feedback's `residual`; both in place."""
        parameter.copy_(parameter.sub(residual.to(parameter.device), alpha=self.share))
        residual.mul_(1 - self.share)


class WholePeriod(Merge, Protocol):
    """A merge whose rounds take a whole period. It changes the parameters when a delta departs, not when a round lands."""

    whole_period: ClassVar[bool] = True

    def before_send(self, fragment: Held, delta: Tensor, outer: Outer, share: float, buffers: Room) -> None:
        own = fragment.own
        if fragment.rounds and own is None:  # this replica started again from the anchors
            delta.zero_()
        elif fragment.rounds and own is not None and fragment.dropped and bool(torch.isfinite(own).all()):
            delta.add_(own)  # it departs again
        self.begin_next(fragment, delta, outer, share, buffers)
        fragment.load_into_parameters(fragment.base)

    @abstractmethod
    def begin_next(self, fragment: Held, delta: Tensor, outer: Outer, share: float, buffers: Room) -> None:
        """Set where the parameters begin the next period, and keep `delta` as the fragment's `own`."""

    def on_land(self, parts: Sequence[Landing]) -> None:
        return


@dataclass(frozen=True)
class Eager(WholePeriod):
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

    eager: ClassVar[bool] = True

    def begin_next(self, fragment: Held, delta: Tensor, outer: Outer, share: float, buffers: Room) -> None:
        """Apply the change of `delta` since the last one at once, as this replica's share of the mean."""
        if fragment.deviation is None or fragment.own is None:
            fragment.deviation = torch.zeros_like(fragment.anchor)
            fragment.deviation_state, fragment.own = outer.init(fragment.deviation), torch.zeros_like(fragment.anchor)
        fresh = torch.sub(delta, fragment.own, out=fragment.own).mul_(share)
        present, state = fragment.deviation, fragment.deviation_state
        if outer.elementwise:
            moved = buffers.like(present)
            after: State = {name: buffers.like(values) for name, values in state.items()}
            outer.step_into(present, fresh, state, moved, after)
        else:
            moved, after = outer.step(present, fresh, state)
        buffers.swap([fresh, present, *state.values()], [moved, *after.values()])
        fragment.deviation, fragment.deviation_state, fragment.own = moved, after, delta


@dataclass(frozen=True)
class Reset(WholePeriod):
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

    def begin_next(self, fragment: Held, delta: Tensor, outer: Outer, share: float, buffers: Room) -> None:
        buffers.give(fragment.own)
        fragment.own = delta
