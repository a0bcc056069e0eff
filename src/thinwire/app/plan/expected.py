"""The loss that a setting should reach: the laws of `scaling`, corrected for H, overlap and tokens. *Predicted*.

Corrections are from published tables: Streaming DiLoCo (arXiv 2501.18512, tables 5 to 7 and figure 8) for H, M and delay; Eager
Updates (arXiv 2502.12996, table 2) for flights of a whole period. Corrections are ratios of losses, so they apply to other texts
too. The loss itself is that of C4 with a vocabulary of 32,000, and applies to no other text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from thinwire.app.plan.scaling import LAWS, TOKENS_PER_PARAMETER, Outside, Prediction, outside, predict

_H = (30, 100)  # the values of H in the tables
_H_COST = {2: 0.0068, 4: 0.0112}  # loss(H=100)/loss(H=30) − 1, mean over 35 M to 1 B
# loss(eager) / loss(a flight of one step) − 1, by parameters: at H = 30, and at H = 100. At H = 100 both sides include the cost
# of H, so the additional cost of eager updates is smaller (eager itself loses 0, 0 and 0.8 % from H = 30 to 100)
_EAGER = (
    ((35e6, 0.0255), (100e6, 0.0187), (200e6, 0.0168), (300e6, 0.0178), (500e6, 0.0150), (1e9, 0.0081)),
    ((35e6, 0.0169), (500e6, 0.0074), (1e9, 0.0080)),
)
_DELAY = 10  # a flight of up to so many steps costs less than 0.2 %
# streaming_sign: its distance to data-parallel training as a share of DiLoCo's, and the cost of each step of a flight after
# the first, as a share of H, where a form's own was not measured; with 0.18 M parameters, 500 steps and two replicas
_SIGN, _SIGN_DELAY = 0.1, 0.085
_RATIO = (0.9 * TOKENS_PER_PARAMETER, 250.0)  # tokens per parameter: the laws, and 1 B on Dolma
_OF_TOKENS = -0.0395  # d ln(loss) / d ln(tokens), 1 B on Dolma, from 25 to 100 and 250 billion tokens
_OF_COMPUTE = LAWS["loss"][0].exponent / 2  # C = 6·N·20·N: loss ∝ C^(a/2)


class Form(NamedTuple):
    """A form of `streaming_sign`: H, the codec (None: the recipe's), and what it costs."""

    every: int
    codec: str | None
    above: float  # its loss over the recipe's, less 1
    of_delay: tuple[tuple[int, float], ...]  # delays that were measured, and what each adds to the loss
    steps: int = 0  # of a run for which it is proposed; a shorter one ends higher than `above`


# measured with 0.18 M parameters and two replicas after 500 steps (docs/experiments.md); the last after 2,000
# (there too), where after 500 it is 0.162 above, and what its delays add
FORMS = (
    Form(4, None, 0.0, ((1, 0.0), (2, 0.008), (3, 0.037))),
    Form(7, "Sign(block=512)", 0.014, ((1, 0.0), (2, 0.009), (3, 0.025), (5, 0.054))),
    Form(24, "TopK(0.05, values=Sign(block=512))", 0.062, ((1, 0.0), (5, 0.028), (10, 0.049)), steps=2000),
)
# the loss of streaming_sparse over the default's after so many steps, less 1 (benchmarks/frontier.py); other H and delays were not measured
_SPARSE, _SPARSE_STEPS = 0.019, 2000


def loss(method: str, parameters: float, replicas: int, every: int, delay: int, tokens: float) -> Prediction:
    """Evaluation loss of `method` (a recipe's name) at its best learning rates, in nats per token.

    `sparse_loco`, `local_sgd`, `streaming_sign` and `streaming_sparse` have no published law. DiLoCo's law is used for them, with a named
    warning; those of the last two are corrected by our measurement with a small model.

    >>> round(loss("streaming_diloco", 1e9, 2, every=100, delay=5, tokens=20e9).value, 3)
    2.537
    """
    if method == "data_parallel":
        base, factor = predict("loss", parameters, None), 1.0
        warnings: tuple[Outside, ...] = ()
    else:
        base = predict("loss", parameters, replicas)
        factor, warnings = _of_period(method, parameters, replicas, every, delay)
    ratio = tokens / (TOKENS_PER_PARAMETER * parameters)
    warnings += outside("tokens-per-parameter", tokens / parameters, *_RATIO)
    return Prediction(base.value * factor * ratio**_OF_TOKENS, base.law, base.warnings + warnings)


def density(method: str, parameters: float, replicas: int, every: int, delay: int) -> float:
    """The compute with which data-parallel training reaches the same loss, over the compute spent.

    It is 1 for data-parallel training, and below 1 if low communication costs loss. It makes H, τ and M comparable: tokens per second
    times density is the speed of a data-parallel training that would learn as much.
    ρ = (L / L_DP)^(2/a), with a the data-parallel law's exponent and D = 20·N.

    >>> [round(density("streaming_diloco", 1e9, 2, every, 1), 2) for every in (30, 100)]
    [0.97, 0.84]
    """
    tokens = TOKENS_PER_PARAMETER * parameters
    own = loss(method, parameters, replicas, every, delay, tokens).value
    return math.exp(math.log(own / predict("loss", parameters, None).value) / _OF_COMPUTE)


def short_run(method: str, steps: float) -> tuple[Outside, ...]:
    """A warning if `method` was measured after more than `steps` inner steps.

    >>> [str(warning) for warning in short_run("streaming_sparse", 800)]
    ['short-run: 800 steps; measured after 2,000, a shorter run ends higher']
    """
    if method != "streaming_sparse" or steps >= _SPARSE_STEPS:
        return ()
    return (Outside("short-run", f"{steps:,.0f} steps; measured after {_SPARSE_STEPS:,}, a shorter run ends higher"),)


def _of_period(
    method: str, parameters: float, replicas: int, every: int, delay: int
) -> tuple[float, tuple[Outside, ...]]:
    """The factor on the loss for H and the length of a flight, and warnings for what is outside the tables."""
    if method == "streaming_sign":
        return _of_signs(method, parameters, replicas, every, delay)
    if method == "streaming_sparse":
        factor, warnings = _of_signs(method, parameters, replicas, FORMS[0].every, 1)
        return factor * (1 + _SPARSE + _SIGN_DELAY * max(0, delay - 1) / every), warnings
    cost = _H_COST[2] + (_H_COST[4] - _H_COST[2]) * min(2.0, max(0.0, math.log2(replicas / 2)))
    factor = 1 + cost * max(0.0, math.log(every / _H[0]) / math.log(_H[1] / _H[0]))
    warnings = outside("every", every, *_H)
    if method == "eager_diloco":
        share = min(1.0, max(0.0, math.log(every / _H[0]) / math.log(_H[1] / _H[0])))
        short, long = (_interpolated(parameters, table) for table in _EAGER)
        factor *= 1 + short + share * (long - short)
    elif delay > _DELAY:
        factor *= 1 + 0.002 * delay / _DELAY
        warnings += outside("delay", delay, 0, _DELAY)
    if method in ("sparse_loco", "local_sgd"):
        warnings += (Outside(f"{method}-unfitted", "no published law; DiLoCo's is used"),)
    return factor, warnings


def cost_of_delay(every: int, delay: int) -> float:
    """The factor on the loss of `streaming_sign` for a flight of `delay` steps.

    >>> [round(cost_of_delay(4, delay), 3) for delay in (1, 2, 3)]
    [1.0, 1.008, 1.037]
    """
    measured = next((form.of_delay for form in FORMS if form.every == every), ((1, 0.0),))
    delays, costs = zip(*measured, strict=True)
    beyond: int = max(0, delay - delays[-1])
    return 1 + float(np.interp(delay, delays, costs)) + _SIGN_DELAY * beyond / every


def _of_signs(
    method: str, parameters: float, replicas: int, every: int, delay: int
) -> tuple[float, tuple[Outside, ...]]:
    control = predict("loss", parameters, None).value / predict("loss", parameters, replicas).value
    says = "no published law; DiLoCo's is used, corrected by a measurement of signs on 0.18 million parameters"
    factor = control + _SIGN * (1 - control)
    known, above = [math.log(form.every) for form in FORMS], [form.above for form in FORMS]
    factor *= 1 + float(np.interp(math.log(every), known, above))
    return factor * cost_of_delay(every, delay), (Outside(f"{method}-unfitted", says),)


def _interpolated(parameters: float, table: Sequence[tuple[float, float]]) -> float:
    """The value of `table` at `parameters`, interpolated in log N; outside its sizes the nearest value."""
    sizes, costs = zip(*table, strict=True)
    return float(np.interp(math.log(parameters), [math.log(size) for size in sizes], costs))
