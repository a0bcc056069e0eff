"""What else reduces the gradients of a model: it may reach the other ranks of a site, and never another replica."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.group import Group, WrappedGroup
from thinwire.errors import ModelError
from thinwire.pieces.partition import is_sharded

_ADVICE = (
    "Give the Replica a plain model, or one whose process group has the ranks of one site alone, and site=group.site (docs/own-loop.md); to keep "
    "DistributedDataParallel between the replicas, use thinwire.drivers.ddp_hook."
)


def check_reducers(model: nn.Module, site: Group | None) -> None:
    """Raise `ModelError` if DistributedDataParallel, composable `replicate` or `fully_shard` sends gradients of `model` outside the `site` of this
    replica, which would take more than its rounds. A DistributedDataParallel inside `no_sync` sends nothing.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    for what, ranks in _reaches(model):
        allowed, count = _ranks_of(site)
        outside = ranks - allowed if allowed else ranks if len(ranks) > count else set()
        if len(ranks) > 1 and outside:
            of_site = f"its site has {sorted(allowed) or count}" if site else "no site was given"
            raise ModelError(
                f"{what} reduces every gradient of the model among the ranks {sorted(ranks)}, and {of_site}: it would send more than the rounds of "
                f"this Replica do. {_ADVICE}"
            )


def _reaches(model: nn.Module) -> Iterator[tuple[str, set[int]]]:
    """What reduces gradients of `model`, and the ranks of the world that it reaches."""
    parameters = list(model.parameters())
    own = set(map(id, parameters))
    if any(_wraps(one, own) for one in gc.get_objects()):
        gc.collect()  # a wrapper that was dropped reduces nothing any more, once it is collected
        for wrapper in (one for one in gc.get_objects() if _wraps(one, own)):
            yield "DistributedDataParallel", set(dist.get_process_group_ranks(wrapper.process_group))
    for module in model.modules():
        yield "torch.distributed._composable.replicate", _ranks_of_replicate(module)
    for mesh in {p.device_mesh for p in parameters if p.requires_grad and is_sharded(p)}:
        yield f"its sharding over {mesh}", set(mesh.mesh.flatten().tolist())


def _wraps(value: object, parameters: set[int]) -> bool:
    """Whether `value` is a wrapper that reduces gradients of these parameters. A loop may hold it and give its `module` to the Replica, so all
    objects are asked, and by `type(...)`, because a proxy's `__class__` may raise.
    """
    if not issubclass(type(value), DistributedDataParallel):
        return False
    assert isinstance(value, DistributedDataParallel)
    return bool(value.require_backward_grad_sync) and not parameters.isdisjoint(map(id, value.parameters()))


def _ranks_of_replicate(module: nn.Module) -> set[int]:
    """The ranks of a `replicate` that has made no DistributedDataParallel yet, which it does in the first forward pass; afterwards none."""
    composable = sys.modules.get("torch.distributed._composable.replicate")  # if it was not imported, no module has it
    if composable is None or "replicate" not in (composable._get_registry(module) or {}):
        return set()
    state = composable.replicate.state(module)
    if not getattr(state, "_init_args", None):
        return set()
    arguments: dict[str, Any] = state._init_kwargs
    if (mesh := arguments.get("device_mesh")) is not None:
        return set(mesh.mesh.flatten().tolist())
    return set(dist.get_process_group_ranks(arguments.get("process_group") or dist.group.WORLD))


def _ranks_of(site: Group | None) -> tuple[set[int], int]:
    """The ranks of the world in `site`, empty if its carrier does not know them, and their number."""
    if site is None:
        return set(), 1
    carrier: object = site
    while isinstance(carrier, WrappedGroup):
        carrier = carrier.group
    return set(getattr(carrier, "world_ranks", ())), site.size
