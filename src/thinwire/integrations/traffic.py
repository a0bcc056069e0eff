"""What replicas send, compared with DistributedDataParallel; every bridge logs it once."""

from __future__ import annotations

from torch import nn

from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.strategy import Strategy


def gradient_nbytes(model: nn.Module, size: int) -> int:
    """Bytes that a process of DistributedDataParallel sends at a step: a ring all-reduce of all gradients."""
    return sum(p.numel() * p.element_size() for _, p in trainable(model)) * 2 * (size - 1) // size


def told(strategy: Strategy, replica: Replica, size: int) -> str:
    """A sentence on how much each of `size` replicas sends."""
    every = strategy.schedule.every
    nbytes = strategy.nbytes_per_period([fragment.shapes for fragment in replica.fragments], size)
    return (
        f"{size} replica{'s' * (size > 1)}; each sends {nbytes / every:,.0f} bytes a step on average ({nbytes:,} every {every} steps, "
        f"{'at most, ' if strategy.bound else ''}predicted), "
        f"where DistributedDataParallel sends {gradient_nbytes(replica.model, size):,}"
    )
