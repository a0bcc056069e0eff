"""Asynchronous methods with a syncer, as compositions: frozen values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.codecs import E3M0, Codec
from thinwire.comm.group import Group
from thinwire.drivers.attached import Method, silent
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.driver import Unequal
from thinwire.drivers.unequal.messages import DOWN, UP, SyncerMessages
from thinwire.errors import ConfigurationError
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.outer import DelayedNesterov, Nesterov, Outer
from thinwire.pieces.partition import Strided, Whole
from thinwire.types import Observer


@dataclass(frozen=True, kw_only=True)
class Decoupled(Composition, Method):
    """Each replica trains by itself and sends its deltas when they are due; a syncer averages those that have arrived.

    *Wire*, in a period of a replica: 80 + nbytes(codec) up; 56 + 17·M + nbytes(down) to each other replica from the one that hosts the syncer.

    >>> Decoupled(every=50, quorum=2).nbytes_per_period(1_000_000, size=3)
    507893
    """

    outer: Outer = Nesterov(1.0, 0.0)  # the mean as it is

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Unequal:  # fmt: skip
        """Attach this method to a model. Collective. Raises `ModelError`, `ConfigurationError`, `DisagreementError`, `LinkError`."""
        if self.slow and len(self.slow) != group.size:
            raise ConfigurationError(f"slow={self.slow} for {group.size} replicas: one factor for each is needed.")
        if self.quorum > group.size:
            raise ConfigurationError(
                f"quorum={self.quorum} of {group.size} replicas: at most all replicas can be a quorum."
            )
        return Unequal(self, model, optimizer, group, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 1, period: int = 0) -> int:
        """Predicted bytes in a period in which a replica reports once; they equal the counted ones. Replica 0 hosts the syncer and sends each
        round to all others.
        """
        messages = SyncerMessages(size, 0, [numel], [self.codec], [self.down])
        return messages.nbytes(UP, 0) if rank else (size - 1) * messages.nbytes(DOWN, 0)


def decoupled_diloco(
    *,
    every: int = 30,
    fragments: int = 1,
    quorum: int = 1,
    grace: float = 0.5,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    codec: Codec = E3M0(),
    slow: tuple[float, ...] = (),
    delay: int = 0,
) -> Decoupled:
    """Decoupled DiLoCo (arXiv 2604.21428): replicas of unequal speed send at their own pace; a syncer waits for a quorum, and shortly for others.

        Δ_m = a − θ_m,   w_m = tokens²/steps·(1 + s_m)^−½,   z = Σ w_m·Δ_m / Σ w + e,   c = decode(encode(z)),   e ← z − c
        a ← outer step on c,   θ_m ← θ_m + (a − a_old) + Δ_m          on every replica; + Δ_m if it was counted

    s_m is the staleness of a delta: the number of rounds of its fragment since the delta's anchor. Σ w is over all replicas: one that
    has sent nothing to a round counts as a zero delta with the weight of its last one. With a momentum `HeLoCo` corrects a stale delta.
    *Differs*: the outer step takes the mean as it is; the estimate is sent back in the codec, not the new anchor in bf16; the grace
    follows arrivals; the syncer is a thread of replica 0.
    *Wire*: 80 + nbytes(codec) bytes from each replica every H_m of its own steps; 56 + 17·M + nbytes(codec) bytes a round from replica 0 to
    each other one. Deltas and estimates are fp32 before the codec.

    Args:
        every: H, inner steps between two deltas of a fragment, in the mean over all replicas; H_m follows the speed of replica m.
        fragments: number of fragments; 1: the whole model.
        quorum: number of replicas whose deltas a round needs at least.
        grace: how long a round waits for other replicas that are expected, as a share of the time between two deltas; 0 or more.
        outer_lr: η, the learning rate of the outer step; 1 with μ = 0: the weighted mean of the replicas' progress, no more and no less.
        outer_momentum: μ, its momentum, in [0, 1).
        codec: how deltas and estimates become bytes.
        slow: factor of the duration of an inner step on each replica, in virtual time; (): real time.
        delay: τ, inner steps in the mean over all replicas from departure to landing; in virtual time only.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> decoupled_diloco(every=50, quorum=2).nbytes_per_period(1_000_000, size=3, rank=1)  # bytes
    507893
    """
    return Decoupled(
        every=every,
        partition=Strided(fragments) if fragments > 1 else Whole(),
        codec=codec,
        down=codec,
        outer=Nesterov(outer_lr, outer_momentum),
        quorum=quorum,
        grace=grace,
        slow=slow,
        delay=delay,
    )


def async_local_sgd(
    *,
    every: int = 30,
    updates: int = 2,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    codec: Codec = E3M0(),
    slow: tuple[float, ...] = (),
    delay: int = 0,
) -> Decoupled:
    """Asynchronous Local-SGD (arXiv 2401.09135): every delta is applied when it arrives, momentum with every N-th; H follows a replica's speed.

        a delta arrives:           a ← a − η·Δ/M,   S ← S + Δ/M
        after every N-th, also:    v ← μ·v + S,   a ← a − η·μ·v,   S ← 0

    *Differs*: the weights of deltas follow tokens and age, the paper's are equal; 4 bits in both directions, with feedback on both sides.
    *Wire*: the bytes of `decoupled_diloco`; every delta is a separate round.

    Args:
        every: H, inner steps between two deltas, in the mean over all replicas; each has its own by its speed.
        updates: N, number of deltas after which the momentum changes.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        codec: how deltas and estimates become bytes.
        slow: factor of the duration of an inner step on each replica, in virtual time; (): real time.
        delay: τ, inner steps in the mean over all replicas from departure to landing; in virtual time only.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> async_local_sgd().nbytes_per_period(1_000_000, size=3, rank=0)  # bytes, from the replica that hosts the syncer
    1015840
    """
    return Decoupled(
        every=every,
        codec=codec,
        down=codec,
        outer=DelayedNesterov(outer_lr, outer_momentum, updates),
        correct=None,
        grace=0.0,
        slow=slow,
        delay=delay,
    )


DECOUPLED: dict[str, Callable[..., Method]] = {f.__name__: f for f in (decoupled_diloco, async_local_sgd)}
