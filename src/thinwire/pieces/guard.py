"""Limits on deltas. The guard clips a replica's own delta if its norm is far too large, after a loss spike, a broken batch or a memory fault."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.types import State

_NEWEST = 0.2  # the least share of the newest norm in mean and variance: norms fall by a tenth in ten rounds
_PIECE = 1 << 20  # values whose squares are added in fp32
_LEAST = 1 / 2  # the least standard deviation, as a share of the mean: a few norms may be equal by chance


class Judged(NamedTuple):
    """A guard's judgement of a delta: the `limit` for its norm, the factor to multiply it by, and the next state."""

    limit: float
    scale: float
    state: State


@dataclass(frozen=True)
class Guard:
    """Clip a replica's own delta if its norm is far above those of its rounds before, by a test of this replica's norms of the fragment:

        limit = max(1, s/H)·(mean + z·max(standard deviation, mean/2))       s: inner steps of the delta, H = `every`
        Δ ← Δ·2^−k     for the smallest k that brings ‖Δ‖ below the mean, if ‖Δ‖ > limit; the parameters go back to anchor − Δ

    Mean and variance are exponential moving ones (a fifth for the newest norm), so they follow a learning rate that decays. They are those of
    ‖Δ‖·H/s, at most the limit of a period, so that they follow a lasting change. A delta of zeros, as while a learning rate is 0, does not
    count. Each replica judges itself, before feedback and codec. So the clipped part is in no packet and in no feedback, all exchanges and
    codecs work, and all replicas decode the same. The scale is a power of two, so its bits do not depend on a machine's order of additions.
    Without clipping all bits are unchanged. The guard does not help against a replica that lies: see `docs/robust.md`. NaN and infinities
    are refused elsewhere.

    *Source*: the test is EDiT's (Cheng et al., arXiv 2412.07210, §3.3). *Differs*: there the threshold is 3 standard deviations, the newest norm
    counts 0.02, after 100 rounds, and all replicas, which know each other's norms, leave anomalous deltas out.
    docs/experiments.md has the experiment.

    *Wire*: nothing. State: 24 bytes a fragment. Cost: one pass over a delta when it departs.

    Args:
        z: number of standard deviations above the mean from which a norm is clipped.
        warm_up: first rounds of a fragment, from which mean and deviation are learned; none of these is clipped.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> guard, state = Guard(warm_up=2), Guard().init()
    >>> for norm in (1.0, 1.0, 1.0, 100.0):
    ...     limit, scale, state = guard.judged(norm, 1.0, state)
    >>> limit, scale
    (3.0, 0.0078125)
    """

    z: float = 4.0
    warm_up: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.z < math.inf or type(self.warm_up) is not int or self.warm_up < 2:
            raise ConfigurationError(
                f"{self}: z is a number of standard deviations above 0, warm_up a number of rounds, 2 or more; Guard() is usual, None is off."
            )

    def init(self) -> State:
        """The first state: rounds, mean and variance of 0."""
        return {"norms": torch.zeros(3, dtype=torch.float64)}

    def judged(self, norm: float, periods: float, state: State) -> Judged:
        """The judgement of a delta of finite `norm`, trained for so many `periods` of H inner steps."""
        rounds, mean, variance = state["norms"].tolist()
        most, whole = mean + self.z * max(math.sqrt(variance), mean * _LEAST), max(1.0, periods)
        limit = whole * most
        if not norm or not periods:
            return Judged(limit, 1.0, state)
        judges = rounds >= self.warm_up and limit > 0
        clips = judges and norm > limit
        # a delta of a few steps, as after an outage, must not make that of the next whole period look large
        seen, share = norm / periods, max(_NEWEST, 1 / (rounds + 1))
        off = (min(seen, most) if judges else seen) - mean
        after = [rounds + 1, mean + share * off, (1 - share) * (variance + share * off * off)]
        scale = 2.0 ** math.floor(math.log2(whole * mean / norm)) if clips else 1.0
        return Judged(limit, scale, {"norms": torch.tensor(after, dtype=torch.float64)})


def norm_of(delta: Tensor) -> float:
    """‖Δ‖ of flat fp32 `delta`; not finite if `delta` is not."""
    squares = [torch.dot(piece, piece) for piece in torch.split(delta, _PIECE)]  # a long sum in fp32 loses small values
    square = float(torch.stack(squares).double().sum())
    return math.sqrt(square) if square < math.inf else float(torch.linalg.vector_norm(delta, dtype=torch.float64))


@runtime_checkable
class Privacy(Protocol):
    """Bounds what the packets of a replica reveal, by what it does to each delta before the codec."""

    @property
    @abstractmethod
    def needs_fixed_group(self) -> str:
        """See `Piece`."""

    @abstractmethod
    def apply(self, x: Tensor, size: int) -> Tensor:
        """Flat fp32 `x` as it may be sent by one of `size` replicas; in place. NaN and infinities become NaN."""

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigurationError` if `spent` could not be computed at the end."""

    @abstractmethod
    def spent(self, rounds: int, size: int) -> Mapping[str, Any]:
        """What `rounds` rounds among `size` replicas have revealed, for a summary."""
