"""Evaluation losses. None: there was no evaluation. NaN or an infinity: there was one, and no model that can be compared."""

from __future__ import annotations

import math
from typing import Any

from thinwire.records.printable import printable
from thinwire.records.replica_record import Evaluations
from thinwire.records.sessions import number

MOST_LOSSES = 32  # most losses of an evaluation
NO_RESULT = "no result"  # the status of a run that did all its steps, and whose last evaluation is not finite


def named_losses(said: object) -> dict[str, float]:
    """The losses that an end names: at most so many as a job may, under short names."""
    named = list(said.items())[:MOST_LOSSES] if isinstance(said, dict) else []
    return {printable(name, 40): number(loss) for name, loss in named if isinstance(loss, int | float)}


def outcome(status: str, loss: float | None, evaluations: Evaluations) -> str:
    """`status`; or, of a run that has finished, why it has no result: what its last evaluation gave, and since which step."""
    if status != "finished" or loss is None or math.isfinite(loss):
        return status
    since = None
    for step, value in zip(evaluations.step[::-1], evaluations.loss[::-1]):
        if math.isfinite(value):
            break
        since = int(step)
    value = "NaN" if math.isnan(loss) else "infinite"
    return f"{NO_RESULT}: the evaluation loss is {value}" + (f" since step {since}" if since is not None else "")


def for_json(value: Any) -> Any:
    """`value` with None instead of NaN and the infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: for_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
