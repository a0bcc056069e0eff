"""Methods for replicas of unequal speed, as compositions: a frozen value that says what is exchanged and how it counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.codecs import E3M0, Codec
from thinwire.comm.group import Group
from thinwire.decoupled.composition import Composition
from thinwire.decoupled.driver import Unequal
from thinwire.decoupled.messages import DOWN, UP, SyncerMessages
from thinwire.errors import ConfigurationError
from thinwire.methods.base import silent
from thinwire.pieces.inner_optimizers import AdamW
from thinwire.pieces.outer import DelayedNesterov, Nesterov
from thinwire.pieces.partition import Strided, Whole
from thinwire.types import Observer


@dataclass(frozen=True, kw_only=True)
class Decoupled(Composition):
    """Each replica trains by itself and reports when it is due; a syncer holds rounds of what has come (docs/methods/decoupled_diloco.md).

    *Wire*, in a period of a replica: 80 + nbytes(codec) up; 56 + 17·M + nbytes(down) to each other replica from the one that hosts the syncer.

    >>> Decoupled(every=50, quorum=2).nbytes_per_period(1_000_000, size=3)
    507893
    """

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return AdamW().make(model, lr, 0.1)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group, *,
        observer: Observer = silent, clock: Callable[[], float] = time.monotonic,
    ) -> Unequal:  # fmt: skip
        """Join this method with what it trains. Collective. Raises `ModelError`, `ConfigurationError`, `DisagreementError`, `LinkError`."""
        if self.slow and len(self.slow) != group.size:
            raise ConfigurationError(f"slow={self.slow} for {group.size} replicas: one factor for each is needed.")
        if self.quorum > group.size:
            raise ConfigurationError(f"quorum={self.quorum} of {group.size} replicas: at most all can be.")
        return Unequal(self, model, optimizer, group, observer, clock)

    def nbytes_per_period(self, numel: int, size: int, rank: int = 1, period: int = 0) -> int:
        """Of a replica that does not host the syncer, in a period in which it reports once: predicted = counted. Replica 0 hosts it and sends each
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
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    codec: Codec = E3M0(),
    slow: tuple[float, ...] = (),
    delay: int = 0,
) -> Decoupled:
    """Decoupled DiLoCo (arXiv 2604.21428): unequal replicas report at their own pace; a syncer waits for a quorum, and shortly for those expected."""
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
    """Asynchronous Local-SGD (arXiv 2401.09135): every delta counts as it comes, momentum at every N-th; own H by speed."""
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


DECOUPLED: dict[str, Callable[..., Decoupled]] = {f.__name__: f for f in (decoupled_diloco, async_local_sgd)}
