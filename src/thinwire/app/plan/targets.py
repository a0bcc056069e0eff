"""Targets of a plan, and the message if no setting meets them: the targets that contradict each other, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import isfinite
from typing import NamedTuple

from thinwire.app.plan.compute import shape_of
from thinwire.app.plan.search import fits
from thinwire.app.plan.setting import RANKS, Setting, Task
from thinwire.app.records.units import text_of_count, text_of_loss, text_of_nbytes, text_of_seconds, text_of_share
from thinwire.app.trainer.model import SIZES
from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Targets:
    """Bounds on a setting; None is no bound. The memory limit always applies."""

    utilization: float | None = None  # at least
    deadline_seconds: float | None = None  # for all tokens, at most
    loss: float | None = None  # at most

    def __post_init__(self) -> None:
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise ConfigurationError(
                f"utilization={self.utilization}: a share above 0, up to 1, is needed; such as 0.95."
            )
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ConfigurationError(f"{field.name}={value}: more than 0 is needed.")


class _Aim(NamedTuple):
    """One target: a setting meets it if its `cost` is at most `most`."""

    asked: str
    cost: Callable[[Setting], float]
    most: float
    value: Callable[[Setting], str]

    def met(self, setting: Setting) -> bool:
        return self.cost(setting) <= self.most


def _aims(targets: Targets) -> list[_Aim]:
    aims = [
        _Aim(
            "memory as it is",
            lambda s: s.memory_nbytes - s.memory_limit,
            0.0,
            lambda s: text_of_nbytes(s.memory_nbytes),
        )
    ]
    if (least := targets.utilization) is not None:
        asked = f"utilization >= {text_of_share(least)}"
        aims.append(_Aim(asked, lambda s: -s.pace.utilization, -least, lambda s: text_of_share(s.pace.utilization)))
    if (deadline := targets.deadline_seconds) is not None:
        asked = f"deadline <= {text_of_seconds(deadline)}"
        aims.append(_Aim(asked, lambda s: s.seconds, deadline, lambda s: text_of_seconds(s.seconds)))
    if (loss := targets.loss) is not None:
        aims.append(_Aim(f"loss <= {loss}", lambda s: s.loss.value, loss, lambda s: text_of_loss(s.loss.value)))
    return aims


def meeting(found: Sequence[Setting], targets: Targets, task: Task) -> list[Setting]:
    """The settings that meet all targets. Raises `ConfigurationError`, which names the contradicting targets, if none does."""
    aims = _aims(targets)
    met = [setting for setting in found if all(aim.met(setting) for aim in aims)]
    if met:
        return met
    if not any(setting.fits for setting in found):
        raise ConfigurationError(too_large(found, task))
    for size in range(1, len(aims) + 1):
        for some in combinations(aims, size):
            if not any(all(aim.met(setting) for aim in some) for setting in found):
                raise ConfigurationError(_contradiction(found, some))
    raise AssertionError("some targets contradict each other, or all are met")


def too_large(found: Sequence[Setting], task: Task) -> str:
    """The message if nothing fits: the memory that is needed, the number of ranks that would suffice, and the sizes that would fit."""
    leanest = min(found, key=lambda s: s.memory_nbytes)
    limit = leanest.memory_limit
    says = (
        f"no setting of {task.base.model.label} fits: the leanest ({leanest.label}, micro-batch {leanest.batch}) needs "
        f"{text_of_nbytes(leanest.memory_nbytes)} a rank (predicted), {text_of_nbytes(limit)} may be used"
    )
    advice: list[str] = []
    task = replace(task, methods=(leanest.method,))
    ranks = 2 * task.ranks
    while ranks <= RANKS:
        if fits(replace(task, ranks=ranks)):
            advice.append(f"--ranks {ranks}: {ranks} ranks a replica, sharded by FSDP2")
            break
        ranks *= 2
    for share in (2, 4, 8) if not task.base.model.job else ():
        shorter = replace(task, base=task.base.changed(sequence=max(1, task.base.data.sequence // share)))
        if fits(shorter):
            advice.append(f"--sequence {shorter.base.data.sequence}")
            break
    own = shape_of(task.base).parameters()
    for model in sorted(SIZES, key=lambda name: -SIZES[name].parameters()) if not task.base.model.job else ():
        smaller = replace(task, base=task.base.changed(model=model))
        if shape_of(smaller.base).parameters() < own and fits(smaller):
            advice.append(f"--model {model} ({text_of_count(shape_of(smaller.base).parameters())} parameters)")
            break
    return f"{says}. What would fit: {'; or '.join(advice) or 'nothing that was tried; give more --memory'}."


def _contradiction(found: Sequence[Setting], aims: Sequence[_Aim]) -> str:
    """The message that names the targets which no setting meets together, and the nearest setting."""
    *others, last = aims
    best = min([setting for setting in found if all(aim.met(setting) for aim in others)], key=last.cost)
    nearest = f"{last.value(best)} ({best.label}, M = {best.replicas}; predicted)"
    if not others:
        return (
            f"no setting meets {last.asked}: the best is {nearest}. Ask for less, or change links, machines or model."
        )
    under = " and ".join(aim.asked for aim in others)
    return (
        f"{under} and {last.asked} contradict each other here: with {under} the best is {nearest}. Give one of them up."
    )
