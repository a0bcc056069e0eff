"""First contact: replicas that do not fit together find out before anything is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import thinwire
from thinwire.errors import DisagreementError
from thinwire.group.base import Group, gather
from thinwire.packet import VERSION
from thinwire.partition import Fragment, local
from thinwire.strategy import Strategy

_LIMIT = 1 << 24  # bytes of one replica's introduction; a million tensors' names


def introduce(group: Group, strategy: Strategy, fragments: Sequence[Fragment]) -> None:
    """Compare code version, strategy and model with every other replica.

    Raises `DisagreementError` on every replica, naming the one that differs, in what, and both values. Sends about 60 bytes a tensor, once.
    """
    own: dict[str, Any] = {
        "code version": thinwire.__version__,
        "wire format": VERSION,
        "strategy": repr(strategy),
        "model": {
            f"{fragment.name} / {name}": f"{tuple(p.shape)} {p.dtype} {local(p).numel()}"
            for fragment in fragments
            for name, p in fragment.parameters
        },
    }
    introductions = gather(group, json.dumps(own).encode(), _LIMIT, "introduction")
    for rank, text in enumerate(introductions):
        try:
            other = json.loads(text)
            problem = _difference(introductions[0], text) if isinstance(other, dict) else "an unreadable introduction"
        except ValueError:
            problem = "an unreadable introduction"
        if problem:
            raise DisagreementError(
                f"replica {rank} does not fit replica 0: {problem}. Nothing was trained. "
                "Give every replica the same code, model and strategy."
            )


def _difference(first: bytes, second: bytes) -> str:
    """The first thing in which two introductions differ, in words; empty if they agree."""
    one, two = json.loads(first), json.loads(second)
    for key in ("code version", "wire format", "strategy"):
        if one.get(key) != two.get(key):
            return f"{key} {two.get(key)} there, {one.get(key)} on replica 0"
    a, b = one.get("model", {}), two.get("model", {})
    for name in [*a, *b]:
        if a.get(name) != b.get(name):
            return f"model: {name} is {b.get(name, 'absent')} there, {a.get(name, 'absent')} on replica 0"
    return "" if list(a) == list(b) else "model: the same parameters in another order"


def digest(tensors: Sequence[Tensor]) -> bytes:
    """BLAKE2b over the bytes of `tensors`, 16 bytes: equal weights, equal digest."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.digest()


def agree_on_start(group: Group, anchors: Sequence[Tensor]) -> bool:
    """Make all replicas start from replica 0's weights: `anchors` are overwritten where any replica differs.

    Returns whether bytes had to be sent: 16 a replica if all are equal already (the same seed), else 4 a parameter from replica 0 to each.
    """
    digests = gather(group, digest(anchors), 16, "start")
    if len(set(digests)) == 1:
        return False
    for index, anchor in enumerate(anchors):
        whole = anchor.cpu().contiguous()
        raw = whole.view(-1).view(torch.uint8)
        if group.rank == 0:
            group.post(index, {peer: raw for peer in range(1, group.size)}, {}, "start").wait()
        else:
            group.post(index, {}, {0: raw}, "start").wait()
            anchor.copy_(whole)
    return True
