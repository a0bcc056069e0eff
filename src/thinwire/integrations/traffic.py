"""The traffic of replicas, compared with DistributedDataParallel; every bridge logs it once."""

from __future__ import annotations

from torch import nn

from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.strategy import Strategy


def gradient_nbytes(model: nn.Module, size: int) -> int:
    """Bytes that a process of DistributedDataParallel sends at a step: a ring all-reduce of all gradients."""
    return sum(p.numel() * p.element_size() for _, p in trainable(model)) * 2 * (size - 1) // size


def told(strategy: Strategy, replica: Replica, size: int) -> str:
    """A sentence on the bytes that each of `size` replicas sends; for a member, whose number of others changes, the bytes to one other."""
    every = strategy.schedule.every
    if isinstance(replica.group, Membership):
        nbytes = strategy.nbytes_per_period([fragment.shapes for fragment in replica.fragments], 2)
        return (
            f"replica {replica.group.name!r} joined at step {replica.step}; it sends {nbytes / every:,.0f} bytes a step on average to each "
            f"other ({nbytes:,} every {every} steps, {'at most, ' if strategy.bound else ''}predicted)"
        )
    nbytes = strategy.nbytes_per_period([fragment.shapes for fragment in replica.fragments], size)
    return (
        f"{size} replica{'s' * (size > 1)}; each sends {nbytes / every:,.0f} bytes a step on average ({nbytes:,} every {every} steps, "
        f"{'at most, ' if strategy.bound else ''}predicted), "
        f"where DistributedDataParallel sends {gradient_nbytes(replica.model, size):,}"
    )
