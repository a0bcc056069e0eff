"""Buffers and frozen parameters of a model. Gradients do not train them, so rounds do not exchange them.

Buffers are running statistics, averages of weights, tables. Frozen parameters are equal on all replicas at the start, and most loops leave
them so. Some change them: momentum encoders, mean teachers, target networks, low-rank updates that are merged into their base. These follow
each replica's own weights, so their digests are compared now and then (`Flights`), and at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinwire.comm.group import ElasticGroup, Group, gather
from thinwire.drivers.handshake import agree_on_weights, digest
from thinwire.errors import ConfigurationError, DisagreementError
from thinwire.pieces.partition import is_sharded, local
from thinwire.types import Observer, compact

Gather = Callable[[bytes, int, str], list[bytes]]  # as `comm.group.gather`, without the group
_FACT, _SAMPLE = 8, 64  # bytes of a digest, and about how many values of a frozen tensor are looked at during training
_TOGETHER = "They become the mean of all at the end and within averaged_buffers(); until then each replica uses its own"
_APART = (
    "Each replica keeps its own: make them from weights on which all agree; or train in a fixed group with buffers='mean', where floating "
    "ones become the mean"
)
_PIECE = 1 << 24  # values that are averaged at a time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


def floating(model: nn.Module) -> list[Tensor]:
    """The persistent floating-point buffers of `model`: this rank's part of each, tied and expanded ones once. Sparse ones, such as graphs, are
    none: they may have unlike indices."""
    found = [b for b in model.buffers() if b.layout == torch.strided and b.is_floating_point()]
    if not found:
        return []
    from thinwire.pieces.training_state import names_in_state

    persistent = set(names_in_state(model))
    return [compact(local(b)) for b in found if id(b) in persistent]


def _parts(buffer: Tensor) -> list[Tensor]:
    """The dense tensors that hold this rank's part of `buffer`, as views: if it is sparse, its indices and values."""
    if buffer.layout == torch.strided:
        return [compact(local(buffer))]
    if buffer.layout == torch.sparse_coo:
        return [buffer._indices(), buffer._values()]
    if buffer.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [buffer.crow_indices(), buffer.col_indices(), buffer.values()]
    return [buffer.ccol_indices(), buffer.row_indices(), buffer.values()]


class FrozenWeights:
    """The parameters of `model` that were not trained when this was made."""

    averaged = False  # whether those that differ become the mean at the end
    elastic = False  # whether members may come and go, so that each compares with its own start only

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = [name for name, p in model.named_parameters() if not p.requires_grad]
        self._start: list[bytes] = []
        self._warned = False

    def facts(self) -> dict[str, str]:
        """The shape and a digest of all values of each, by name. None is ever sent in a round, so replicas compare these at the start."""
        return {
            f"frozen parameter {name.replace('_orig_mod.', '')}": f"{tuple(p.shape)} {p.dtype}, digest {digest(_held(p)).hex()}"
            for name, p in self._present().items()
        }

    def begin(self) -> None:
        """Remember a sample of the present values; `changed` compares with it."""
        self._start = self._digests()

    def sample(self) -> bytes:
        """8 bytes that differ if a sample of values does; cheap enough to be taken during training. Empty if nothing is frozen."""
        return hashlib.blake2b(b"".join(self._digests()), digest_size=_FACT).digest() if self._names else b""

    def changed(self) -> list[str]:
        """The names of those whose sample has changed since `begin`. They are parameters of this replica; others may have the same change."""
        if not self._start:
            return []
        return [name for name, before, now in zip(self._present(), self._start, self._digests()) if before != now]

    def differing(self, gathered: Gather) -> list[str]:
        """The names of those that are not equal on all replicas, with the same result on all. Collective, if any parameter is frozen.

        On the wire: 16 bytes to each other replica, and if any differ 8 for each frozen parameter.
        """
        if not self._names:
            return []
        own = b"".join(self._digests(whole=True))
        if len(set(gathered(hashlib.blake2b(own, digest_size=16).digest(), 16, "frozen parameters"))) == 1:
            return []
        told = gathered(own, len(own), "frozen parameters")
        for rank, theirs in enumerate(told):
            if len(theirs) != len(own):
                raise DisagreementError(
                    f"replica {rank} has {len(theirs) // _FACT} frozen parameters, this one has {len(own) // _FACT}; give all the same model."
                )
        spans = [slice(_FACT * place, _FACT * (place + 1)) for place in range(len(own) // _FACT)]
        return [name for name, span in zip(self._present(), spans) if len({theirs[span] for theirs in told}) > 1]

    def parts(self, names: Collection[str]) -> list[Tensor]:
        """This rank's part of each parameter of these `names` that has a mean: floating, dense, and one tensor."""
        return [compact(local(p.detach())) for name, p in self._present().items() if name in names and _has_mean(p)]

    def warn(self, names: Sequence[str], observe: Callable[[str], object]) -> None:
        """Warn once that the loop changes the parameters of these `names`."""
        if self._warned or not names:
            return
        self._warned = True
        then = _TOGETHER if self.averaged and len(self.parts(names)) == len(names) else _APART
        observe(
            f"the loop changes {len(names)} frozen parameters ({names[0]}, ...), which rounds do not exchange, so that they differ between "
            f"replicas. {then} (docs/own-loop.md, frozen parameters)"
        )

    def _present(self) -> dict[str, Tensor]:
        parameters = dict(self._model.named_parameters())  # which may have been replaced
        return {name: parameters[name] for name in self._names if name in parameters}

    @torch.no_grad()
    def _digests(self, whole: bool = False) -> list[bytes]:
        """8 bytes for each parameter, of a sample of its values; if `whole`, also of the sum of the bits of all."""
        raw: list[Tensor] = []
        counts: list[int] = []
        for parameter in self._present().values():
            flat = [part.reshape(-1) for part in _held(parameter.detach())]
            taken = [values[:: max(1, values.numel() // _SAMPLE)].contiguous().view(torch.uint8) for values in flat]
            if whole:  # integers add up to the same bits in any order
                taken += [
                    values.view(_INTEGERS[values.itemsize]).sum(dtype=torch.int64).view(1).view(torch.uint8)
                    for values in flat
                    if values.numel()
                ]
            raw, counts = raw + taken, [*counts, len(taken)]
        on_cpu = iter(_to_cpu(raw))
        return [
            hashlib.blake2b(b"".join(next(on_cpu).numpy().tobytes() for _ in range(count)), digest_size=_FACT).digest()
            for count in counts
        ]


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The flat `tensors` of one dtype on the CPU, with one copy from each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    split = {
        device: iter(torch.cat(held).cpu().split_with_sizes([one.numel() for one in held]))
        for device, held in by_device.items()
    }
    return [next(split[tensor.device]) for tensor in tensors]


def _has_mean(parameter: Tensor) -> bool:
    plain = is_sharded(parameter) or not hasattr(parameter, "__tensor_flatten__")
    return plain and parameter.is_floating_point() and parameter.layout == torch.strided


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
    batches: list[list[Tensor]] = [[]]
    for buffer in buffers:  # not all values of a large model in memory at once
        if batches[-1] and sum(one.numel() for one in (*batches[-1], buffer)) > _PIECE:
            batches.append([])
        batches[-1].append(buffer)
    for batch in batches:
        own = torch.cat([one.detach().float().cpu().reshape(-1) for one in batch])
        pairs = [_mean(piece, size, gathered) for piece in torch.split(own, _PIECE)]
        mean, alike = (torch.cat(pieces) for pieces in zip(*pairs))
        sizes = [one.numel() for one in batch]
        for buffer, values, same in zip(batch, torch.split(mean, sizes), torch.split(alike, sizes)):
            same, values = (one.view_as(buffer).to(buffer.device) for one in (same, values))
            buffer.copy_(torch.where(same, buffer, values.to(buffer.dtype)))


def _mean(own: Tensor, size: int, gathered: Gather) -> tuple[Tensor, Tensor]:
    """The mean of all replicas' flat fp32 tensors, in rank order, and where all are equal."""
    mean, alike = torch.zeros_like(own), torch.ones_like(own, dtype=torch.bool)
    for rank, said in enumerate(gathered(own.numpy().tobytes(), own.nbytes, "buffers")):
        if len(said) != own.nbytes:
            raise DisagreementError(
                f"replica {rank} sent {len(said)} bytes of buffers, {own.nbytes} are needed; its model differs."
            )
        theirs = torch.frombuffer(bytearray(said), dtype=torch.float32)
        mean += theirs
        alike &= theirs == own
    return mean / size, alike


class SharedBuffers:
    """The policy of a Replica for the buffers of its model, and for `frozen` parameters that the loop changes: `mean` or `local`. Raises
    `ConfigurationError` for another."""

    def __init__(
        self,
        policy: str,
        model: nn.Module,
        group: Group | ElasticGroup,
        frozen: FrozenWeights,
        warn: Callable[[str], object],
    ) -> None:
        if policy not in ("mean", "local"):
            raise ConfigurationError(f"buffers={policy!r}: 'mean' or 'local' is needed.")
        self._model, self._frozen, self._warn = model, frozen, warn
        fixed = None if isinstance(group, ElasticGroup) else group
        self._among = fixed if policy == "mean" else None
        self.local = self._among is None
        frozen.averaged, frozen.elastic = not self.local, fixed is None

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
        """Set them to the mean, if that is the policy, and warn of frozen parameters that differ. Collective in a fixed group."""
        unlike = self._unlike(gathered)
        if self._among:
            average([*floating(self._model), *self._frozen.parts(unlike)], self._among.size, gathered)

    @contextmanager
    def averaged(self, gathered: Gather) -> Iterator[None]:
        """A context with them as after `average`; afterwards this replica's own again, bit for bit. Collective on entry, unless `local`."""
        unlike = [] if self.local else self._unlike(gathered)

        def held() -> list[Tensor]:  # which may have been moved
            return [] if self.local else [*floating(self._model), *self._frozen.parts(unlike)]

        kept = [one.clone() for one in held()]
        if self._among:
            average(held(), self._among.size, gathered)
        try:
            yield
        finally:
            for buffer, own in zip(held(), kept):
                buffer.copy_(own)

    def _unlike(self, gathered: Gather) -> list[str]:
        """The names of the frozen parameters that differ between replicas; warns of them. A member of an elastic run names its own changes."""
        if self._frozen.elastic:
            self._frozen.warn(self._frozen.changed(), self._warn)
            return []
        unlike = self._frozen.differing(gathered)
        self._frozen.warn(unlike, self._warn)
        return unlike
