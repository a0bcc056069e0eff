"""Buffers of a model: running statistics, averages of weights. Gradients do not train them, so rounds do not exchange them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group, gather
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import local
from thinwire.runtime.handshake import digest


def floating(model: nn.Module) -> list[Tensor]:
    """The persistent floating-point buffers of `model`: this rank's part of each, tied ones once."""
    persistent = model.state_dict().keys()
    return [local(b) for name, b in model.named_buffers() if name in persistent and b.is_floating_point()]


def average(model: nn.Module, group: Group) -> None:
    """Set each floating-point buffer to the mean of all replicas', in fp32 and in rank order, with the same bits on all. Collective.

    A mean of running means is that of all samples; a mean of averages of weights is the average of the mean weights. Buffers that are
    equal on all replicas, such as tables, do not change. On the wire: 24 bytes to each other replica, and if any differ 4 bytes a value.
    """
    buffers = floating(model)
    if group.size == 1 or not buffers or len(set(gather(group, digest(buffers), 16, "buffers"))) == 1:
        return
    own = torch.cat([one.detach().float().cpu().reshape(-1) for one in buffers])
    mean, alike = torch.zeros_like(own), torch.ones_like(own, dtype=torch.bool)
    for rank, said in enumerate(gather(group, own.numpy().tobytes(), own.nbytes, "buffers")):
        if len(said) != own.nbytes:
            raise DisagreementError(
                f"replica {rank} sent {len(said)} bytes of buffers, {own.nbytes} are needed; its model differs."
            )
        theirs = torch.frombuffer(bytearray(said), dtype=torch.float32)
        mean += theirs
        alike &= theirs == own
    sizes = [one.numel() for one in buffers]
    for buffer, values, same in zip(buffers, torch.split(mean / group.size, sizes), torch.split(alike, sizes)):
        same, values = (one.view_as(buffer).to(buffer.device) for one in (same, values))
        buffer.copy_(torch.where(same, buffer, values.to(buffer.dtype)))


class SharedBuffers:
    """The policy of a Replica for the buffers of its model: `mean` or `local`. Raises `ConfigurationError` for another."""

    def __init__(self, policy: str, model: nn.Module, group: Group | Membership) -> None:
        if policy not in ("mean", "local"):
            raise ConfigurationError(f"buffers={policy!r}: 'mean' or 'local' is needed.")
        self._model = model
        self._among = group if policy == "mean" and not isinstance(group, Membership) else None
        self.local = self._among is None

    def average(self) -> None:
        """Set them to the mean, if that is the policy. Collective then."""
        if self._among:
            average(self._model, self._among)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context with the buffers as after `average`; afterwards this replica's own again, bit for bit. Collective on entry."""
        kept = [] if self.local else [(one, one.clone()) for one in floating(self._model)]
        self.average()
        try:
            yield
        finally:
            for buffer, own in kept:
                buffer.copy_(own)
