"""A replica's state for torch.distributed.checkpoint, which needs the same keys and sizes when it loads as when it saved.

{"replica-1": {                  or "replica-1.shard-0", or the name of a member: many replicas may share one checkpoint
    "0.anchor": Tensor, ...      tensors that a fragment always has
    "passing": bytes             safetensors: tensors that exist only at times, such as deltas in flight
    "optimizer": bytes           safetensors: what the optimizer holds in its attributes, beside its state dict,
    "tree": str                  and JSON
    "facts": str                 JSON
    "strategy": str}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from thinwire.comm.group import ElasticGroup, Group
from thinwire.drivers.base import Training
from thinwire.drivers.saved_state import passing
from thinwire.errors import CheckpointError
from thinwire.files import parsed
from thinwire.state_tree import Packed

_BESIDE = ("passing", "optimizer", "tree", "facts", "strategy")


def owner(group: Group | ElasticGroup, site: Group | None) -> str:
    """The owner of a state: a rank in a fixed group, or a member by its name."""
    name = group.name if isinstance(group, ElasticGroup) else f"replica-{group.rank}"
    return f"{name}.shard-{site.rank}" if site else name


def with_origin(
    state: tuple[dict[str, Tensor], dict[str, Any]], strategy: object, group: Group | ElasticGroup, site: Group | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The `state` with its strategy and, in a fixed group, with its owner and their number, for `check_origin`."""
    tensors, facts = state
    facts = facts | {"strategy": repr(strategy)}
    place = _place(group, site)
    return tensors, facts | {"replica": place} if place else facts


def check_origin(
    facts: Mapping[str, Any], training: Training, group: Group | ElasticGroup, site: Group | None
) -> Mapping[str, Any]:
    """The `facts` of a state. Raises `CheckpointError` if it is that of another strategy, or of another replica, or of another number, where
    a replica `keeps_own`."""
    _check_strategy(facts.get("strategy", "an unknown strategy"), training.strategy)
    here = _place(group, site)
    if not here or not training.keeps_own:
        return facts
    if (saved := facts.get("replica", here)) != here:
        raise CheckpointError(
            f"the checkpoint is that of {saved}, and this is {here}: it holds what that replica alone has trained or not yet sent. Resume with "
            "as many replicas as before, each from its own checkpoint; for another number begin anew from export()."
        )
    return facts


def _place(group: Group | ElasticGroup, site: Group | None) -> str:
    """The owner among how many; empty for a member, whose number of others changes."""
    return "" if isinstance(group, ElasticGroup) else f"{owner(group, site)} of {group.size}"


def _check_strategy(saved: object, strategy: object) -> None:
    if saved != repr(strategy):
        raise CheckpointError(
            f"the checkpoint was made by {saved}, this run uses {strategy!r}; resume with the run's own strategy."
        )


def pack_state(
    owner: str, strategy: object, state: tuple[dict[str, Tensor], dict[str, Any]], attributes: Packed | None
) -> dict[str, Any]:
    """The `state` of the replica `owner`, and what its optimizer holds in its attributes."""
    tensors, facts = state
    at_times = {name: value for name, value in tensors.items() if passing(name)}
    held = attributes or Packed(None, {})
    beside = (_bytes(at_times), _bytes(held.tensors), json.dumps(held.json), json.dumps(facts), repr(strategy))
    return {owner: {name: t for name, t in tensors.items() if name not in at_times} | dict(zip(_BESIDE, beside))}


def _bytes(tensors: Mapping[str, Tensor]) -> bytes:
    made: bytes = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    return made


def unpack_state(
    owner: str, strategy: object, saved: Mapping[str, Any]
) -> tuple[tuple[dict[str, Tensor], dict[str, Any]], Packed | None]:
    """The inverse of `pack_state`. Raises `CheckpointError` if there is no state of `owner`, or it belongs to another strategy, or is
    damaged."""
    if owner not in saved:
        raise CheckpointError(
            f"the checkpoint has a state of {', '.join(map(str, saved)) or 'no replica'}, none of {owner}; resume with as many replicas as "
            "before, each with its own rank or name."
        )
    own = dict(saved[owner])
    at_times, held, tree, facts, saved_strategy = (own.pop(name, None) for name in _BESIDE)
    _check_strategy(saved_strategy, strategy)
    try:
        attributes = parsed(json.loads, tree)
        state = own | load(at_times), dict(parsed(json.loads, facts))
        return state, None if attributes is None else Packed(attributes, load(held))
    except (SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"the state of {owner} in the checkpoint is damaged: {error}.") from error
