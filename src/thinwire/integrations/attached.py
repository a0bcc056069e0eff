"""The common part of the bridges to accelerate and to transformers' `Trainer`: a replica attached to a prepared model and optimizer."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm import Group, ThreadGroup, TorchGroup
from thinwire.comm.group import gather
from thinwire.drivers.model_buffers import average
from thinwire.errors import CheckpointError, ConfigurationError, LinkError, PacketError
from thinwire.files import parsed
from thinwire.pieces.partition import trainable
from thinwire.recipes import finetune
from thinwire.strategy import Strategy


def world(size: int, seconds: float) -> Group:
    """The group of the launcher's `size` processes, each a replica. `seconds`: the longest wait."""
    if size == 1:
        return ThreadGroup.create(1)[0]
    return TorchGroup.from_world(size, timeout=float(seconds))


def newest_of_all(
    whole: Iterable[tuple[int, ...]], skipped: Sequence[str], group: Group | None, folder: Path
) -> tuple[int, ...] | None:
    """The newest position in training at which every replica holds a whole checkpoint; None if training begins. Collective.

    A kill may catch a replica before its save. So does the first save of all: then one replica has none, no other has two, and training begins.

    Args:
        whole: the positions of this replica's whole checkpoints, each the step first.
        skipped: why each other checkpoint of this replica cannot be used.
        group: the replicas; None: this replica resumes alone.
        folder: of this replica's checkpoints, for messages.

    Raises:
        CheckpointError: no checkpoint is common, and more than the first save would be lost.
        LinkError, PacketError: a replica was lost, or sent what is no list of positions.
    """
    own = json.dumps([len(skipped), sorted(whole)]).encode()
    told = [own] if group is None else gather(group, own, 1 << 16, "resume")
    try:
        lists = [parsed(json.loads, text) for text in told]
        counts = [int(torn) + len(held) for torn, held in lists]
        each = [{tuple(map(int, position)) for position in held} for _, held in lists]
    except (ValueError, TypeError, OverflowError) as error:
        raise PacketError(
            f"a replica told what is no list of its checkpoints ({error}); run the same version on every replica."
        ) from None
    for reason in skipped:
        print(f"thinwire: passed over: {reason}", file=sys.stderr, flush=True)
    if common := set.intersection(*each):
        return max(common)
    if max(counts) > 1 or all(each):
        held = "; ".join(
            f"replica {rank}: {', '.join(str(step) for step, *_ in sorted(one)) or 'none'}"
            for rank, one in enumerate(each)
        )
        raise CheckpointError(
            f"no step has a whole checkpoint of every replica (steps of {held}; {folder} here): one step of all is needed. Restore the missing "
            "ones, or move all away to begin again; and keep two of each from now on."
        )
    if any(counts):
        print("thinwire: not all replicas had saved for the first time, so training begins again", file=sys.stderr)
    return None


def too_short(strategy: Strategy, steps: int) -> str:
    """A warning if `steps` inner steps are too few for the outer momentum to build up, otherwise ""."""
    momentum: float = getattr(strategy.outer, "momentum", 0.0)
    rounds = steps // strategy.schedule.every
    if strategy.exchanges_gradients or not 0.0 < momentum < 1.0 or rounds >= (needed := round(2 / (1 - momentum))):
        return ""
    advice = "Exchange more often" if strategy.outer == finetune().outer else "Take finetune(), or exchange more often"
    return (
        f"{steps} steps are {rounds} rounds of each fragment, too few for an outer momentum of {momentum:g}, which needs some {needed}: such "
        f"runs end worse than with plain averages (docs/methods/finetune.md). {advice}"
    )


def sample(model: nn.Module) -> Tensor:
    """Some 64 values of each trained parameter: enough to see that other weights were put into the model."""
    parts = [p.detach().flatten() for _, p in trainable(model)]
    return torch.cat([part[:: 1 + part.numel() // 64].float().cpu() for part in parts])


def equalize(model: nn.Module, group: Group, trained: Tensor) -> None:
    """Replace what another callback has left in the model, if it has, by the mean of all replicas'. Collective then.

    The mean of averages of weights is the average of the mean weights.

    Args:
        model: its parameters that are trained.
        group: the replicas.
        trained: the `sample` of the weights that all replicas had at the end of training.
    """
    if group.size == 1 or torch.equal(sample(model), trained):
        return
    try:
        for _name, parameter in trainable(model):
            average([parameter.detach()], group.size, partial(gather, group))
    except LinkError as error:
        message = "a callback has put weights of its own into the model at the end of training, and not on all replicas, which hold other ones now"
        warnings.warn(f"{message}: {error}", RuntimeWarning, stacklevel=2)


def count_skipped(optimizer: Any) -> None:
    """Count a step that the trainer skipped as an inner step without changes. Its gradients are None, or zeros, which become None."""
    if getattr(optimizer, "scaler", None) is None:
        raise ConfigurationError(
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__} was stepped without a call of its hooks: an optimizer whose `step` "
            "calls them is needed; all of torch's do. Choose another `optim`."
        )
    optimizer.optimizer.zero_grad()  # zeros would still move weights, by momentum and weight decay
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad()
