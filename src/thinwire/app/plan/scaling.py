"""The published scaling laws of DiLoCo: learning rate, batch and loss by parameters N and replicas M. *Predicted*.

Source: Scaling Laws for DiLoCo (Charles et al., arXiv 2503.09799): AdamW, C4, D = 20·N tokens, H = 30, sizes from 35 M
to 2.4 B fitted, 4 B and 10 B trained as a check. Every law is A·N^a (one fit for data-parallel and each M), or
A·N^a·M^b (joint over M). A prediction outside of the fitted range is returned with a warning that names the quantity.

*Differs*: between the fitted numbers of replicas, the independent laws are interpolated in log M; above 8 they are extrapolated
with the joint law's exponent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import ConfigurationError

Quantity = Literal["loss", "learning_rate", "batch_tokens"]
Fit = Literal["independent", "joint"]
TOKENS_PER_PARAMETER = 20.0
FITTED = (35e6, 2.4e9)  # parameters
REPLICAS = (1, 2, 4, 8)
OUTER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}  # best of 0.2 … 1.0 for large N at H = 30 (figure 7)


@dataclass(frozen=True)
class Law:
    """A·N^a·M^b.

    >>> round(Law(19.226, -0.0985, 0.0116)(parameters=1e9, replicas=4), 3)
    2.537
    """

    coefficient: float
    exponent: float
    replicas_exponent: float = 0.0

    def __call__(self, parameters: float, replicas: float = 1) -> float:
        return self.coefficient * math.pow(parameters, self.exponent) * math.pow(replicas, self.replicas_exponent)


# Keys of the independent fits: 0 is data-parallel, else M.
LAWS: Mapping[Quantity, Mapping[int, Law]] = {
    "loss": {
        0: Law(18.129, -0.0953),
        1: Law(18.363, -0.0961),
        2: Law(18.768, -0.0969),
        4: Law(19.762, -0.0992),
        8: Law(21.051, -0.1018),
    },
    "learning_rate": {
        0: Law(16319.2, -0.819),
        1: Law(74620.6, -0.945),
        2: Law(3978.82, -0.780),
        4: Law(4512.99, -0.789),
        8: Law(618986, -1.102),
    },
    "batch_tokens": {
        0: Law(462.68, 0.281),
        1: Law(27.873, 0.435),
        2: Law(15.749, 0.479),
        4: Law(10.957, 0.510),
        8: Law(38.072, 0.455),
    },
}
JOINT: Mapping[Quantity, Law] = {
    "loss": Law(19.226, -0.0985, 0.0116),
    "learning_rate": Law(22256, -0.8827, 0.2929),
    "batch_tokens": Law(14.521, 0.4695, 0.3399),
}


@dataclass(frozen=True)
class Outside:
    """A named warning: a prediction is outside of the fitted range."""

    name: str
    says: str

    def __str__(self) -> str:
        return f"{self.name}: {self.says}"


def outside(what: str, given: float, low: float, high: float) -> tuple[Outside, ...]:
    """A warning if `given` is outside of `low` to `high`; half a percent beyond still counts as inside.

    >>> [str(warning) for warning in outside("every", 500, 30, 100)]
    ['every-outside-fit: 500 given, 30 to 100 fitted']
    """
    if low * 0.995 <= given <= high * 1.005:
        return ()
    numbers = [f"{value:,.3f}".rstrip("0").rstrip(".") for value in (given, low, high)]
    return (Outside(f"{what}-outside-fit", "{} given, {} to {} fitted".format(*numbers)),)


@dataclass(frozen=True)
class Prediction:
    """A predicted number, the law that it is from, and warnings for the quantities outside of that law's range."""

    value: float
    law: str
    warnings: tuple[Outside, ...] = ()


def predict(quantity: Quantity, parameters: float, replicas: int | None, fit: Fit = "independent") -> Prediction:
    """`quantity` for a model of `parameters` on `replicas` (None: data-parallel, on any number).

    "loss" is in nats per token, "batch_tokens" counts all replicas together. The independent fits of the learning
    rate scatter (M = 8 is a seventh of the joint law at 2.4 B): prefer "joint" there.

    >>> round(predict("loss", 1e9, replicas=2).value, 3)
    2.52
    >>> [str(w) for w in predict("loss", 70e9, replicas=3).warnings]
    ['parameters-outside-fit: 70,000,000,000 given, 35,000,000 to 2,400,000,000 fitted']
    """
    if not (0 < parameters < math.inf) or (replicas is not None and replicas < 1):
        raise ConfigurationError(
            f"{parameters} parameters on {replicas} replicas: both must be more than 0 and finite."
        )
    warnings = outside("parameters", parameters, *FITTED)
    if replicas is None:
        return Prediction(LAWS[quantity][0](parameters), f"{quantity}, data-parallel", warnings)
    warnings += outside("replicas", replicas, REPLICAS[0], REPLICAS[-1])
    if fit == "joint":
        return Prediction(JOINT[quantity](parameters, replicas), f"{quantity}, joint", warnings)
    value = _between(LAWS[quantity], parameters, replicas)
    value *= (max(1.0, replicas / REPLICAS[-1])) ** JOINT[quantity].replicas_exponent
    return Prediction(value, f"{quantity}, M = {replicas}", warnings)


def outer_lr(replicas: int) -> Prediction:
    """The best outer learning rate for DiLoCo with Nesterov 0.9 at H = 30; it does not depend on N."""
    below = max(m for m in REPLICAS if m <= max(1, replicas))
    warnings = outside("replicas", replicas, REPLICAS[0], REPLICAS[-1])
    return Prediction(OUTER_LR[below], f"outer learning rate, M = {below}", warnings)


def _between(laws: Mapping[int, Law], parameters: float, replicas: int) -> float:
    """The independent laws, interpolated in log M (the geometric mean for M half-way)."""
    low = max(m for m in REPLICAS if m <= replicas)
    high = min((m for m in REPLICAS if m >= replicas), default=low)
    if low == high:
        return laws[low](parameters)
    share = math.log(replicas / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(laws[low](parameters)) + share * math.log(laws[high](parameters)))
