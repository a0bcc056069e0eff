"""The common part of the bridges to accelerate and to transformers' `Trainer`: a replica attached to a prepared model and optimizer."""

from __future__ import annotations

from typing import Any

from thinwire.comm import Group, ThreadGroup, TorchGroup
from thinwire.errors import ConfigurationError
from thinwire.recipes import finetune
from thinwire.strategy import Gradients, Strategy


def world(size: int, seconds: float) -> Group:
    """The group of the launcher's `size` processes, each a replica. `seconds`: the longest wait."""
    if size == 1:
        return ThreadGroup.create(1)[0]
    return TorchGroup.from_world(size, timeout=float(seconds))


def too_short(strategy: Strategy, steps: int) -> str:
    """A warning if `steps` inner steps are too few for the outer momentum to build up, otherwise ""."""
    momentum: float = getattr(strategy.outer, "momentum", 0.0)
    rounds = steps // strategy.schedule.every
    if (
        isinstance(strategy.signal, Gradients)
        or not 0.0 < momentum < 1.0
        or rounds >= (needed := round(2 / (1 - momentum)))
    ):
        return ""
    advice = "Exchange more often" if strategy.outer == finetune().outer else "Take finetune(), or exchange more often"
    return (
        f"{steps} steps are {rounds} rounds of each fragment, too few for an outer momentum of {momentum:g}, which needs some {needed}: such "
        f"runs end worse than with plain averages (docs/methods/finetune.md). {advice}"
    )


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
