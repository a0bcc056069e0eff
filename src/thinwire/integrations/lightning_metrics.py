"""The metrics by which Lightning's callbacks and learning rate schedules decide: their means over all replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from thinwire.comm import Group
from thinwire.comm.group import gather
from thinwire.replica import Replica

_NAMES = 1 << 16  # most bytes of one replica's list of names


def monitored(trainer: Trainer) -> list[str]:
    """The names of the metrics that callbacks and schedules of this trainer follow."""
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    names = {getattr(one, "monitor", None) for one in callbacks}
    names |= {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    return sorted(name for name in names if name not in (None, "epoch", "step"))  # these two are equal on all


def all_monitored(trainer: Trainer, group: Group) -> list[str]:
    """The names that any replica follows, because all must exchange the same ones. Collective."""
    told_of = gather(group, json.dumps(monitored(trainer)).encode(), _NAMES, "metrics")
    return sorted({str(name) for text in told_of for name in json.loads(text)})


def average(trainer: Trainer, replica: Replica, names: Sequence[str]) -> None:
    """Replace the metrics of these `names` in `trainer.callback_metrics` by their means over all replicas. Collective."""
    found = trainer.callback_metrics
    means = {name: torch.full_like(found[name], replica.mean(found[name].item())) for name in names if name in found}
    results: Any = trainer._results
    for _, logged in results.valid_items():  # Lightning reads them again
        for name in results._forked_name(logged, False):
            if name in means and logged.meta.on_epoch:
                logged._computed = means[name]
    trainer._logger_connector._callback_metrics.update(means)
