"""First contact: replicas that do not fit together find out before anything is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import DisagreementError, ModelError
from thinwire.group.base import Group, gather
from thinwire.packet import VERSION
from thinwire.partition import Fragment, local
from thinwire.strategy import Strategy
from thinwire.version import __version__

_LIMIT = 1 << 24  # bytes of one replica's introduction; a million tensors' names


def introduce(group: Group, strategy: Strategy, fragments: Sequence[Fragment]) -> None:
    """Compare code version, strategy and model with every other replica: about 60 bytes a tensor, once. Raises as `agree`."""
    tensors = _tensors(fragments)
    agree(
        group,
        {"code version": __version__, "wire format": VERSION, "strategy": repr(strategy)}
        | {f"model, {name}": text for name, text in tensors.items()}
        | {"model, order of tensors": list(tensors)},
    )


def introduction(strategy: Strategy, fragments: Sequence[Fragment]) -> dict[str, str]:
    """The same in a few words, for a `Roster`, which compares the rest."""
    tensors = _tensors(fragments)
    told = hashlib.blake2b(json.dumps(tensors).encode(), digest_size=8).hexdigest()
    numel = sum(fragment.numel for fragment in fragments)
    return {"strategy": repr(strategy), "model": f"{len(tensors)} tensors, {numel:,} parameters, digest {told}"}


def _tensors(fragments: Sequence[Fragment]) -> dict[str, str]:
    return {
        f"{fragment.name} / {name}": f"{tuple(p.shape)} {p.dtype}, {local(p).numel()} held"
        for fragment in fragments
        for name, p in fragment.parameters
    }


def agree(group: Group, facts: Mapping[str, Any]) -> None:
    """Compare `facts` (JSON) with every other replica's.

    Raises `DisagreementError`, on every replica, naming the first that differs from replica 0, in what, and both
    values.
    """
    introductions = gather(group, json.dumps(facts).encode(), _LIMIT, "introduction")
    first: dict[str, Any] = {}
    for rank, text in enumerate(introductions):
        try:
            other = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise DisagreementError(f"replica {rank} introduced itself unreadably. Nothing was trained.") from None
        first = first or other
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise DisagreementError(
                    f"replica {rank} does not fit replica 0: {name}: {other.get(name, 'absent')} there, {first.get(name, 'absent')} "
                    "on replica 0. Nothing was trained. Give every replica the same code, model and settings."
                )


def digest(tensors: Sequence[Tensor]) -> bytes:
    """BLAKE2b over the bytes of `tensors`, 16 bytes: equal weights, equal digest."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.digest()


def agree_on_start(group: Group, anchors: Sequence[Tensor]) -> bool:
    """Make all replicas start from replica 0's weights, as `agree_on_weights`. Returns whether any differed."""
    return agree_on_weights(group, anchors, "start")[1]


def agree_on_weights(group: Group, tensors: Sequence[Tensor], purpose: str) -> tuple[bytes, bool]:
    """Make `tensors` those of replica 0 everywhere: overwritten where any replica differs. Their digest now, and whether any did.

    24 bytes to each other replica if all are equal already, else the tensors besides, from replica 0 to each.
    """
    digests = gather(group, digest(tensors), 16, purpose)
    if len(set(digests)) == 1:
        return digests[0], False
    for index, tensor in enumerate(tensors):
        whole = tensor.cpu().contiguous()
        raw = whole.view(-1).view(torch.uint8)
        if group.rank == 0:
            group.post(index, {peer: raw for peer in range(1, group.size)}, {}, purpose).wait()
        else:
            group.post(index, {}, {0: raw}, purpose).wait()
            tensor.copy_(whole)
    return digests[0], True


def check_start(fragments: Sequence[Fragment], anchors: Sequence[Tensor]) -> None:
    """Raise `ModelError` if what all start from is not finite."""
    for fragment, anchor in zip(fragments, anchors):
        if not bool(torch.isfinite(anchor).all()):
            raise ModelError(
                f"fragment {fragment.name!r} of replica 0 holds NaN or infinity; the weights that all start from must be finite. "
                "Initialise them, or load a sound checkpoint, before attaching the Replica."
            )
