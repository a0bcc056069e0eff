"""Buffers of a model: running statistics, averages of weights. Gradients do not train them, so rounds do not exchange them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group, gather
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.membership.rendezvous import Membership
from thinwire.pieces.partition import is_sharded, local
from thinwire.runtime.handshake import agree_on_weights, digest
from thinwire.types import Observer

Gather = Callable[[bytes, int, str], list[bytes]]  # as `comm.group.gather`, without the group


def floating(model: nn.Module) -> list[Tensor]:
    """The persistent floating-point buffers of `model`: this rank's part of each, tied ones once. Sparse ones, such as graphs, are none: they
    may have unlike indices."""
    persistent = model.state_dict().keys()
    dense = [(name, b) for name, b in model.named_buffers() if b.layout == torch.strided]
    return [local(b) for name, b in dense if name in persistent and b.is_floating_point()]


def _parts(buffer: Tensor) -> list[Tensor]:
    """The dense tensors that hold this rank's part of `buffer`, as views: if it is sparse, its indices and values."""
    if buffer.layout == torch.strided:
        return [local(buffer)]
    if buffer.layout == torch.sparse_coo:
        return [buffer._indices(), buffer._values()]
    if buffer.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [buffer.crow_indices(), buffer.col_indices(), buffer.values()]
    return [buffer.ccol_indices(), buffer.row_indices(), buffer.values()]


def frozen(model: nn.Module) -> dict[str, str]:
    """The shape and a digest of each parameter of `model` that is not trained, by name. None is ever sent, so replicas compare these."""
    named = [
        (name.replace("_orig_mod.", ""), p.detach()) for name, p in model.named_parameters() if not p.requires_grad
    ]
    return {
        f"frozen parameter {name}": f"{tuple(p.shape)} {p.dtype}, digest {digest(_held(p)).hex()}" for name, p in named
    }


def _held(parameter: Tensor) -> list[Tensor]:
    """As `_parts`; for a parameter that is made of several tensors, such as a quantised one, these."""
    if is_sharded(parameter) or not hasattr(parameter, "__tensor_flatten__"):
        return _parts(parameter)
    return [part for name in parameter.__tensor_flatten__()[0] for part in _held(getattr(parameter, name))]


def average(buffers: Sequence[Tensor], size: int, gathered: Gather) -> None:
    """Set each of these dense floating-point tensors to the mean of all replicas', in fp32 and in rank order, with the same bits on all. Collective.

    A mean of running means is that of all samples; a mean of averages of weights is the average of the mean weights. Buffers that are
    equal on all replicas, such as tables, do not change. On the wire: 24 bytes to each other replica, and if any differ 4 bytes a value.
    """
    if size == 1 or not buffers or len(set(gathered(digest(buffers), 16, "buffers"))) == 1:
        return
    own = torch.cat([one.detach().float().cpu().reshape(-1) for one in buffers])
    mean, alike = torch.zeros_like(own), torch.ones_like(own, dtype=torch.bool)
    for rank, said in enumerate(gathered(own.numpy().tobytes(), own.nbytes, "buffers")):
        if len(said) != own.nbytes:
            raise DisagreementError(
                f"replica {rank} sent {len(said)} bytes of buffers, {own.nbytes} are needed; its model differs."
            )
        theirs = torch.frombuffer(bytearray(said), dtype=torch.float32)
        mean += theirs
        alike &= theirs == own
    sizes = [one.numel() for one in buffers]
    for buffer, values, same in zip(buffers, torch.split(mean / size, sizes), torch.split(alike, sizes)):
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

    def begin(self, observe: Observer) -> None:
        """Give all replicas the buffers of replica 0, also those that are not saved, unless the policy is `local`. Tell if any differed.

        Collective. 40 bytes to each other replica; if they differ, 24 more and the buffers, from replica 0. Raises `DisagreementError`.
        """
        if self._among is None or self._among.size == 1:
            return
        named = [(name, one.layout, part) for name, one in self._model.named_buffers() for part in _parts(one.detach())]
        layout = repr([(name, kind, tuple(part.shape), part.dtype) for name, kind, part in named]).encode()
        own = [part for _, _, part in named]
        facts = hashlib.blake2b(layout, digest_size=16).digest() + digest(own)
        told = gather(self._among, facts, len(facts), "buffers")
        for rank, other in enumerate(told):
            if other[:16] != told[0][:16]:
                raise DisagreementError(
                    f"replica {rank} has other buffers than replica 0: names, shapes or dtypes differ. Give every replica the same model."
                )
        if len(set(told)) > 1 and agree_on_weights(self._among, own, "buffers")[1]:
            observe("warning", 0, message="replicas began with different buffers; all start from replica 0's")

    def average(self, gathered: Gather) -> None:
        """Set them to the mean, if that is the policy. Collective then."""
        if self._among:
            average(floating(self._model), self._among.size, gathered)

    @contextmanager
    def averaged(self, gathered: Gather) -> Iterator[None]:
        """A context with the buffers as after `average`; afterwards this replica's own again, bit for bit. Collective on entry."""
        kept = [] if self.local else [one.clone() for one in floating(self._model)]
        self.average(gathered)
        try:
            yield
        finally:
            for buffer, own in zip(floating(self._model) if kept else [], kept):  # which may have been moved
                buffer.copy_(own)
