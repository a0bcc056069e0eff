"""Targets of a plan, and the message if no setting meets them: the targets that contradict each other, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from math import inf, isfinite

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

    def tests(self) -> dict[str, Callable[[Setting], bool]]:
        """For each target, a function that tests whether a setting meets it."""
        utilization, deadline, loss = self.utilization or 0.0, self.deadline_seconds or inf, self.loss or inf
        given = {"memory": True, "utilization": self.utilization, "deadline": self.deadline_seconds, "loss": self.loss}
        tests: dict[str, Callable[[Setting], bool]] = {
            "memory": lambda s: s.fits,
            "utilization": lambda s: s.pace.utilization >= utilization,
            "deadline": lambda s: s.seconds <= deadline,
            "loss": lambda s: s.loss.value <= loss,
        }
        return {name: test for name, test in tests.items() if given[name] is not None}


def meeting(found: Sequence[Setting], targets: Targets, task: Task) -> list[Setting]:
    """The settings that meet all targets. Raises `ConfigurationError`, which names the contradicting targets, if none does."""
    tests = targets.tests()
    met = [setting for setting in found if all(test(setting) for test in tests.values())]
    if met:
        return met
    if not any(tests["memory"](setting) for setting in found):
        raise ConfigurationError(too_large(found, task))
    for size in range(1, len(tests) + 1):
        for names in combinations(tests, size):
            if not any(all(tests[name](setting) for name in names) for setting in found):
                raise ConfigurationError(_contradiction(found, tests, names, targets))
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


def _contradiction(
    found: Sequence[Setting], tests: dict[str, Callable[[Setting], bool]], names: Sequence[str], targets: Targets
) -> str:
    """The message that names the targets which no setting meets together, and the nearest setting."""
    asked = [f"{name} {_wish(targets, name)}" for name in names]
    last = names[-1]
    others = [setting for setting in found if all(tests[name](setting) for name in names[:-1])]
    best = min(others, key=lambda s: _distance(s, last))
    nearest = f"{_value(best, last)} ({best.label}, M = {best.replicas}; predicted)"
    if len(names) == 1:
        return f"no setting meets {asked[0]}: the best is {nearest}. Ask for less, or change links, machines or model."
    under = " and ".join(asked[:-1])
    return (
        f"{under} and {asked[-1]} contradict each other here: with {under} the best is {nearest}. Give one of them up."
    )


def _distance(setting: Setting, name: str) -> float:
    return {
        "memory": setting.memory_nbytes,
        "utilization": -setting.pace.utilization,
        "deadline": setting.seconds,
        "loss": setting.loss.value,
    }[name]


def _value(setting: Setting, name: str) -> str:
    return {
        "memory": text_of_nbytes(setting.memory_nbytes),
        "utilization": text_of_share(setting.pace.utilization),
        "deadline": text_of_seconds(setting.seconds),
        "loss": text_of_loss(setting.loss.value),
    }[name]


def _wish(targets: Targets, name: str) -> str:
    return {
        "memory": "as it is",
        "utilization": f">= {text_of_share(targets.utilization)}",
        "deadline": f"<= {text_of_seconds(targets.deadline_seconds)}",
        "loss": f"<= {targets.loss}",
    }[name]
