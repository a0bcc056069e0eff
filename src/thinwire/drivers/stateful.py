"""A replica's state for torch.distributed.checkpoint, which needs the same keys and sizes when it loads as when it saved.

{"replica-1": {                  or "replica-1.shard-0", or the name of a member: many replicas may share one checkpoint
    "0.anchor": Tensor, ...      tensors that a fragment always has
    "passing": bytes             safetensors: tensors that exist only at times: deltas in flight, what the optimizer holds
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
from thinwire.pieces.optimizer_attributes import without_attributes

_BESIDE = ("passing", "facts", "strategy")


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


def pack_state(owner: str, strategy: object, state: tuple[dict[str, Tensor], dict[str, Any]]) -> dict[str, Any]:
    """The `state` of the replica `owner`."""
    tensors, facts = state
    (of_fragments, _), _ = without_attributes(state)
    always = {name: value for name, value in of_fragments.items() if not passing(name)}
    at_times = {name: value.detach().cpu().contiguous() for name, value in tensors.items() if name not in always}
    return {owner: always | dict(zip(_BESIDE, (save(at_times), json.dumps(facts), repr(strategy))))}


def unpack_state(owner: str, strategy: object, saved: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The inverse of `pack_state`. Raises `CheckpointError` if there is no state of `owner`, or it belongs to another strategy, or is
    damaged."""
    if owner not in saved:
        raise CheckpointError(
            f"the checkpoint has a state of {', '.join(map(str, saved)) or 'no replica'}, none of {owner}; resume with as many replicas as "
            "before, each with its own rank or name."
        )
    own = dict(saved[owner])
    at_times, facts, saved_strategy = (own.pop(name, None) for name in _BESIDE)
    _check_strategy(saved_strategy, strategy)
    try:
        return own | load(at_times), dict(parsed(json.loads, facts))
    except (SafetensorError, ValueError, TypeError) as error:
        raise CheckpointError(f"the state of {owner} in the checkpoint is damaged: {error}.") from error
