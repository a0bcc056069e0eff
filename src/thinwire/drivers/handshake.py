"""The handshake: replicas compare code, model and settings before they train."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group, gather
from thinwire.errors import ConfigurationError, DisagreementError, ModelError
from thinwire.packet import FIELD_VALUES
from thinwire.pieces.partition import Fragment, local
from thinwire.pieces.piece import digests
from thinwire.strategy import Strategy
from thinwire.types import Observer
from thinwire.version import PROTOCOLS, Protocols, common, unlike_releases

_SPEAKS, _NOTES = "protocols", "notes"
DIGEST_NBYTES = 16
_PIECE = 1 << 24  # values that a digest copies from a device at a time
_LIMIT = 1 << 24  # bytes of one replica's introduction, enough for the names of a million tensors


def introduce(
    group: Group,
    strategy: Strategy,
    fragments: Sequence[Fragment],
    more: Mapping[str, str] = MappingProxyType({}),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Compare protocols, strategy, model and the facts in `more` with every other replica: about 60 bytes a tensor, once. Raises and returns like
    `compare_settings`."""
    if max(group.size, len(fragments)) > FIELD_VALUES:
        raise ConfigurationError(
            f"{group.size} replicas and {len(fragments)} fragments: at most {FIELD_VALUES} of each fit into a packet's fields; use fewer."
        )
    tensors = _tensors(fragments)
    return compare_settings(
        group,
        {"strategy": repr(strategy)}
        | {f"model, {name}": text for name, text in tensors.items()}
        | {"model, order of tensors": list(tensors)}
        | digests(strategy)
        | dict(more),
        notes,
    )


def introduction(
    strategy: Strategy, fragments: Sequence[Fragment], frozen: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The strategy and digests of the model and of its `frozen` parameters, as facts of a `Membership`, which compares the rest."""
    tensors = _tensors(fragments)
    numel = sum(fragment.numel for fragment in fragments)
    facts = {"model": f"{len(tensors)} tensors, {numel:,} parameters, digest {_digest_of(tensors)}"}
    if frozen:
        facts["frozen parameters"] = f"{len(frozen)} tensors, digest {_digest_of(frozen)}"
    return {"strategy": repr(strategy)} | facts | digests(strategy)


def _digest_of(facts: Mapping[str, str]) -> str:
    return hashlib.blake2b(json.dumps(dict(facts)).encode(), digest_size=8).hexdigest()


def _tensors(fragments: Sequence[Fragment]) -> dict[str, str]:
    return {
        f"{fragment.name} / {name}": f"{tuple(p.shape)} {p.dtype}, {local(p).numel()} held"
        for fragment in fragments
        for name, p in fragment.parameters
    }


def compare_settings(group: Group, facts: Mapping[str, Any], notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Compare `facts` (JSON) with every other replica's, and the protocols of this release: one must be in the ranges of all. Returns a warning if
    `notes` differ, which may be meant, otherwise "".

    Raises `DisagreementError` on every replica; it names the first replica that differs from replica 0, the setting, and both values.
    """
    told = json.dumps({_SPEAKS: str(PROTOCOLS), _NOTES: dict(notes), **facts}).encode()
    introductions = gather(group, told, _LIMIT, "introduction")
    first: dict[str, Any] = {}
    texts: list[str] = []
    noted: list[dict[str, Any]] = []
    for rank, text in enumerate(introductions):
        try:
            other = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            raise DisagreementError(f"replica {rank} sent settings that cannot be read. Nothing was trained.") from None
        texts = [*texts, str(other.pop(_SPEAKS, "none"))]
        theirs = other.pop(_NOTES, {})
        noted.append(theirs if isinstance(theirs, dict) else {})
        if not common([*map(Protocols.parse, texts)]):
            raise DisagreementError(
                f"replica {rank} does not fit the replicas before it: it speaks protocols {texts[rank]}, they {', '.join(texts[:rank])}. Nothing "
                "was trained. Install one release on all, or one that speaks a protocol of each."
            )
        first = first or other
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                raise DisagreementError(
                    f"replica {rank} does not fit replica 0: {name}: {other.get(name, 'absent')} there, {first.get(name, 'absent')} "
                    f"on replica 0{unlike_releases(texts[rank], texts[0], 'on replica 0')}. Nothing was trained. Give every replica the same "
                    "code, model and settings."
                )
    for rank, theirs in enumerate(noted):
        for name in [*noted[0], *theirs]:
            if noted[0].get(name) != theirs.get(name):
                return (
                    f"the replicas train unlike: {str(name)[:200]} is {str(theirs.get(name, 'absent'))[:200]} on replica {rank} and "
                    f"{str(noted[0].get(name, 'absent'))[:200]} on replica 0. If that is not meant, give all the same optimizer and settings"
                )
    return ""


def digest(tensors: Iterable[Tensor]) -> bytes:
    """BLAKE2b over the bytes of `tensors`, 16 bytes. Equal weights have equal digests."""
    state = hashlib.blake2b(digest_size=DIGEST_NBYTES)
    for tensor in tensors:
        for piece in torch.split(
            tensor.detach().contiguous().view(-1), _PIECE
        ):  # one piece of a device's is here at a time
            state.update(piece.cpu().view(torch.uint8).numpy().data)
    return state.digest()


def agree_on_start(group: Group, tensors: Sequence[Tensor], observe: Observer, name: str = "weights") -> None:
    """Make all replicas start from replica 0's `tensors`, by `agree_on_weights`. Reports a warning if any differed."""
    if agree_on_weights(group, tensors, "start")[1]:
        observe("warning", 0, message=f"replicas began with different {name}; all start from replica 0's")


def agree_on_weights(group: Group, tensors: Sequence[Tensor], purpose: str) -> tuple[bytes, bool]:
    """Give all replicas the `tensors` of replica 0, if any replica differs. Returns their digest, and whether any differed.

    Sends 24 bytes to each other replica; if they differ, also the tensors, from replica 0 to each.
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


def agree_on_resume(group: Group, step: int, state_digest: bytes) -> None:
    """Raises `DisagreementError` on every replica, unless all resume at the same step and with the same 16 bytes `state_digest` of their
    shared state. 24 bytes each."""
    told = gather(group, step.to_bytes(8, "little") + state_digest, 24, "resume")
    for rank, text in enumerate(told):
        if text != told[0]:
            other, first = (int.from_bytes(one[:8], "little") for one in (text, told[0]))
            differs = f"replica 0 at step {first}" if other != first else "with other anchors than replica 0"
            raise DisagreementError(
                f"replica {rank} resumes at step {other}, {differs}; choose one step for all, of which each has its own checkpoint."
            )


def check_start(fragments: Sequence[Fragment], anchors: Sequence[Tensor]) -> None:
    """Raise `ModelError` if the first weights are not finite."""
    for fragment, anchor in zip(fragments, anchors):
        if not bool(torch.isfinite(anchor).all()):
            raise ModelError(
                f"fragment {fragment.name!r} of replica 0 holds NaN or infinity; the weights that all start from must be finite. "
                "Initialise them, or load a sound checkpoint, before attaching the Replica."
            )
