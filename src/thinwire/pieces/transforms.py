"""Filters change a replica's signal before it is encoded, and the estimate afterwards: momentum, clipping, Adam's moments, signs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.codecs.exact import root, summed
from thinwire.errors import ConfigurationError
from thinwire.pieces.filters import Filter
from thinwire.pieces.policy import LONG_RUN
from thinwire.types import State

NEVER_KNOWN = LONG_RUN + 1  # rounds


@dataclass(frozen=True)
class Clip(Filter):
    """s ← s · min(1, c/‖s‖) with c = √M · `norm`: each replica's own signal, before any piece keeps it. `norm=0` does not clip.

        c = √M·norm,   ‖s‖: the norm of a fragment's signal, and so the model's with `Whole()`

    *Source*: Deep Gradient Compression (arXiv 1712.01887, §3.2). *Differs*: there a replica's gradient is its share of a sum, and the threshold
    N^(−1/2) times that of the sum; here it is one of M whose mean is taken, and so M times as long: √M. The two are the same. (The mean of M
    independent gradients of norm √M·c has about norm c.)

    Args:
        norm: c/√M, in the unit of the signal; 0 does not clip. A norm is at least 0.
        replicas: M, the number of replicas; the replica sets it.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Clip(1.0).signal(torch.tensor([3.0, 4.0]), {}).tolist()
    [0.6000000238418579, 0.800000011920929]
    """

    norm: float = 1.0
    replicas: int = field(default=1, repr=False, compare=False)  # filled in

    def __post_init__(self) -> None:
        if not 0 <= self.norm < math.inf or self.replicas < 1:
            raise ConfigurationError(f"Clip(norm={self.norm}): 0 (no clipping) or more is needed; 1.0 is usual.")

    @property
    def needs_whole(self) -> bool:
        return self.norm > 0

    def fitted(self, codec: Codec, numel: int, size: int) -> Clip:
        return replace(self, replicas=size)

    def signal(self, s: Tensor, state: State) -> Tensor:
        norm, most = float(torch.linalg.vector_norm(s, dtype=torch.float64)), self.norm * math.sqrt(self.replicas)
        return s * (most / norm) if self.norm and not norm <= most else s  # NaN is not below anything


@dataclass(frozen=True)
class Momentum(Filter):
    """u ← decay·u + s, and u is sent in place of s: each replica keeps its own momentum, before compression.

        u ← decay·u + s,   u is sent;   then, with clears = 'sent', u_k ← 0 where the value k that was sent is not 0

    With `Feedback()`, whose residual is v, and a sparse codec: Deep Gradient Compression's momentum correction (arXiv 1712.01887,
    §3.2: v ← v + u, what is large of v is sent). `clears="sent"` is its momentum factor masking (§3.3), so that old directions do not
    continue. `clears="nothing"` is momentum SGD on each replica.

    *Differs*: the rest that an `Each` codec sends in full is spared, because a codec that sends everything would clear u each time, which
    is plain SGD.

    State: 4 bytes a parameter. The outer step (for gradients the inner step) must have no momentum.

    Args:
        decay: the share of u that is kept per round, in (0, 1).
        clears: 'sent' sets u to 0 where something was sent; 'nothing' does not.
        spared: ranges of a fragment, in elements, in which u is not set to 0.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Momentum(0.5)
    Momentum(decay=0.5, clears='sent')
    """

    decay: float = 0.9
    clears: Literal["sent", "nothing"] = "sent"
    spared: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)  # filled in

    momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1 or self.clears not in ("sent", "nothing"):
            raise ConfigurationError(
                f"Momentum(decay={self.decay}, clears={self.clears!r}): 0 < decay < 1, and 'sent' or 'nothing', are needed; "
                "0.9 and 'sent' are usual."
            )

    def fitted(self, codec: Codec, numel: int, size: int) -> Momentum:
        return replace(self, spared=codec.spans_of_rest(numel))

    def init(self, numel: int) -> State:
        return {"velocity": torch.zeros(numel)}

    def signal(self, s: Tensor, state: State) -> Tensor:
        return torch.mul(state["velocity"], self.decay).add_(s)

    def settle(self, s: Tensor, sent: Tensor, mean: Tensor, state: State, held: State) -> tuple[Tensor, State]:
        velocity = self.signal(s, state)
        if self.clears == "sent":
            cleared = sent.abs() > 0  # not NaN: nothing was sent
            for begin, end in self.spared:
                cleared[begin:end] = False
            velocity.masked_fill_(cleared, 0.0)
        return mean, {"velocity": velocity}


@dataclass(frozen=True)
class Settled:
    """Freeze v when ‖v_t‖₁ and ‖v_(t−Δ)‖₁, Δ = 1/(1 − β₂) rounds apart, are alike: the smaller is at least `ratio` times the
    larger. Not before `least` rounds, when the warm-up of the learning rate should be over.

        min(‖v_t‖₁, ‖v_(t−Δ)‖₁) ≥ ratio·max(‖v_t‖₁, ‖v_(t−Δ)‖₁)          at t = Δ, 2Δ, …, if t ≥ least

    *Source*: the test of 1-bit Adam (Tang et al., arXiv 2102.02888). *Differs*: it is made once in Δ rounds, and holds in both directions;
    `least` is ours.

    Args:
        ratio: in (0, 1].
        least: rounds before which v is not frozen.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Settled(0.9)
    Settled(ratio=0.9, least=100)
    """

    ratio: float = 0.96
    least: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.least < 1:
            raise ConfigurationError(
                f"Settled(ratio={self.ratio}, least={self.least}): 0 < ratio <= 1 and least >= 1 are needed; 0.96 is the paper's."
            )


@dataclass(frozen=True)
class Moments(Filter):
    """Adam's moments m and v, the same on all replicas; once v is frozen, m travels.

        first:    ḡ = mean of g_i (in fp32);   m ← β₁·m + (1−β₁)·ḡ;   v ← β₂·v + (1−β₂)·ḡ²
        frozen:   m_i = β₁·m + (1−β₁)·g_i is sent;   m ← the estimate of its mean
        estimate: m / (√v + ε)

    *Source*: 1-bit Adam (Tang et al., arXiv 2102.02888, Algorithm 1), with `Sign("l2")`, `Feedback()` and `TwoShot(Feedback())`. Without
    bias correction, as there. The caller takes the step: SGD with decoupled weight decay for gradients, the outer step for deltas.
    Gradients themselves cannot be encoded in this way: v is quadratic in them, and the codec's errors would not cancel.

    *Differs*: a parameter whose v is zero when it freezes has had no gradient (a row of an embedding that no text has used). It is not sent,
    kept or moved, because a code of one bit cannot represent zero, and its noise divided by ε would move the parameter. `freeze` is a number
    of rounds that were not refused, or `Settled()`, a test of v. State: 8 bytes a parameter.

    Args:
        beta1, beta2: Adam's β₁ and β₂, decay per round, in [0, 1).
        eps: Adam's ε, a number above 0, in the unit of the signal.
        freeze: rounds until v is frozen, or `Settled()`.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> state = Moments(freeze=1).init(2)
    >>> estimate, state = Moments(freeze=1).settle(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([1.0, 0.0]), state, {})
    >>> [round(x, 4) for x in estimate.tolist()], Moments(freeze=1).dense(state)
    ([3.1623, 0.0], False)
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    freeze: int | Settled = 100

    momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        fits = 0 <= self.beta1 < 1 and 0 < self.beta2 < 1 and 0 < self.eps < math.inf
        if not fits or not ((type(self.freeze) is int and self.freeze >= 1) or isinstance(self.freeze, Settled)):
            raise ConfigurationError(
                f"{self}: 0 <= beta1 < 1, 0 < beta2 < 1, eps > 0, and freeze as rounds (1 or more) or Settled() are needed; 15 to 25 % "
                "of the training is usual for freeze."
            )

    @property
    def full(self) -> int:
        return self.freeze if isinstance(self.freeze, int) else NEVER_KNOWN

    def init(self, numel: int) -> State:
        # rounds so far, the norm of v at the last test, whether v is frozen
        phase = torch.zeros(3, dtype=torch.float64)
        return {"average": torch.zeros(numel), "square": torch.zeros(numel), "phase": phase}

    def dense(self, state: State) -> bool:
        return not bool(state["phase"][2])

    def signal(self, s: Tensor, state: State) -> Tensor:
        if self.dense(state):
            return s
        said = _blended(state["average"], s, self.beta1)
        return said.masked_fill_(state["square"] == 0, 0.0)

    def settle(self, s: Tensor, sent: Tensor, mean: Tensor, state: State, held: State) -> tuple[Tensor, State]:
        square, phase = state["square"], state["phase"]
        if self.dense(state):
            average = _blended(state["average"], mean, self.beta1)
            square = _blended(square, mean * mean, self.beta2)
            phase = self._turned(phase, square)
        else:
            untouched = square == 0
            average = mean.masked_fill(untouched, 0.0)
            for value in held.values():
                value.masked_fill_(untouched, 0.0)
        return average / root(square).add_(self.eps), {"average": average, "square": square, "phase": phase}

    def _turned(self, phase: Tensor, square: Tensor) -> Tensor:
        rounds, before, _ = phase.tolist()
        rounds += 1
        if isinstance(self.freeze, int):
            return torch.tensor([rounds, 0.0, float(rounds >= self.freeze)], dtype=torch.float64)
        if rounds % round(1 / (1 - self.beta2)):
            return torch.tensor([rounds, before, 0.0], dtype=torch.float64)
        norm = summed(square)
        alike = min(norm, before) >= self.freeze.ratio * max(norm, before) and rounds >= self.freeze.least
        return torch.tensor([rounds, norm, float(alike)], dtype=torch.float64)


def _blended(before: Tensor, now: Tensor, share: float) -> Tensor:
    """share·before + (1 − share)·now, each product and the sum rounded separately: torch's `add(alpha=)`, `addcmul` and `lerp` round once on
    some processors and twice on others.
    """
    return torch.mul(before, share).add_(now * (1 - share))


@dataclass(frozen=True)
class Signs(Filter):
    """Replace the estimate by its sign: sign descent on the common estimate (DeMo, arXiv 2411.19870; 0 where it is 0).

        estimate ← sign(estimate)

    *Differs*: nothing.

    >>> Signs()
    Signs()
    """

    def settle(self, s: Tensor, sent: Tensor, mean: Tensor, state: State, held: State) -> tuple[Tensor, State]:
        return mean.sign(), {}
