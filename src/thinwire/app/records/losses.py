"""Evaluation losses. None: there was no evaluation. NaN or an infinity: there was one, and no model that can be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.app.records.printable import printable
from thinwire.app.records.replica_record import Evaluations
from thinwire.app.records.sessions import number
from thinwire.app.records.units import text_of_loss

MOST_LOSSES = 32  # most losses of an evaluation
DIVERGED = "diverged"  # the status of a run that did all its steps, and whose model is worse than before them
WORSE_THAN_BEST, CONVERGED = 10.0, 0.01  # factors, see `outcome`
OUT_OF_HAND = 1e3  # times the loss of the first step: no loss in training grows like that and means anything
LEAST_LOSS = 1e-6  # a smaller loss of a first step is rounding, as of policies that are still equal
ABOVE_UNIFORM = 1.0  # nats; measured for untrained models: 0.61 (nano, 256 tokens)
JUMPED = "jumped"  # the status of an elastic run that came to its last step, and most of whose steps nobody trained
NO_RESULT = "no result"  # the status of a run that did all its steps, and whose last evaluation is not finite


def named_losses(said: object) -> dict[str, float]:
    """The losses that an end names: at most so many as a job may, under short names."""
    named = list(said.items())[:MOST_LOSSES] if isinstance(said, dict) else []
    return {printable(name, 40): number(loss) for name, loss in named if isinstance(loss, int | float)}


def outcome(
    status: str,
    loss: float | None,
    evaluations: Evaluations,
    uniform: float,
    skipped: float,
    trained: Sequence[tuple[float, float]] = (),
) -> str:
    """`status`; or, of a run that has finished, why it has no result or has diverged.

    Args:
        status: what became of the run.
        loss: its last evaluation.
        evaluations: all of them. One at step 0 tells the loss of the untrained model.
        uniform: the loss of a model that knows nothing; NaN if nobody knows it. An untrained language model is a little above it.
        skipped: the share of inner steps that changed no weights, because their gradients were not finite.
        trained: for each replica, the loss in training of its first step, before which no weight had changed, and of its last ones.
    """
    if status != "finished" or loss is None:
        return status
    if math.isfinite(loss):
        return _divergence(loss, evaluations, uniform, skipped, trained) or status
    since = None
    for step, value in zip(evaluations.step[::-1], evaluations.loss[::-1]):
        if math.isfinite(value):
            break
        since = int(step)
    value = "NaN" if math.isnan(loss) else "infinite"
    return f"{NO_RESULT}: the evaluation loss is {value}" + (f" since step {since}" if since is not None else "")


def useless(status: str) -> bool:
    """Whether a run with this status came to its last step and has no model that can be used."""
    return status.startswith((NO_RESULT, DIVERGED, JUMPED))


def _divergence(
    loss: float, evaluations: Evaluations, uniform: float, skipped: float, trained: Sequence[tuple[float, float]]
) -> str:
    """The status of a run that has diverged; empty for others."""
    told, finite = f"{DIVERGED}: the evaluation loss is {text_of_loss(loss)}", np.isfinite(evaluations.loss)
    steps, losses = evaluations.step[finite], evaluations.loss[finite]
    first = float(losses[0]) if len(losses) else math.nan
    untrained = first if len(losses) and steps[0] == 0 else uniform + ABOVE_UNIFORM
    if loss > untrained:
        return f"{told}, above that of an untrained model ({text_of_loss(first if untrained == first else uniform)})"
    best = int(losses.argmin()) if len(losses) else 0
    # far below the first evaluation, a tenfold loss is noise around an optimum
    if len(losses) and 0 < WORSE_THAN_BEST * losses[best] < loss and loss > CONVERGED * first:
        return f"{told}, over {WORSE_THAN_BEST:g} times its best ({text_of_loss(float(losses[best]))} at step {int(steps[best])})"
    # a job may evaluate with another loss than it trains with, so that both must have grown
    begun = max((abs(first) for first, _ in trained), default=math.nan)
    if begun > LEAST_LOSS and all(value > WORSE_THAN_BEST * begun for value in (loss, *(last for _, last in trained))):
        return f"{told}, over {WORSE_THAN_BEST:g} times the loss of its first step ({text_of_loss(begun)})"
    # an error rate or a cost with a bound of its own does not grow; then it must not have improved
    grown = begun > LEAST_LOSS and all(last > OUT_OF_HAND * begun for _, last in trained)
    if grown and len(losses) > 1 and loss >= first:
        last = text_of_loss(max(last for _, last in trained))
        return f"{told}, no better than at first, and the loss in training is {last}, over {OUT_OF_HAND:g} times that of its first step"
    if skipped > 0.5:
        return f"{told}, and {skipped:.0%} of all steps changed no weights, because their gradients were not finite"
    return ""


def for_json(value: Any) -> Any:
    """`value` with None instead of NaN and the infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {name: for_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
