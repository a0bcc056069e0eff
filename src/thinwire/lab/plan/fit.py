"""Fits scaling laws to a user's ladder of runs: exponents with intervals, joint laws, training density.

Everything is fitted in log space with the Huber loss (a run that went wrong counts less), as the scaling-law paper
does (arXiv 2503.09799, §4); the laws here are linear in the logs except for the constant C, so the best fit is found
directly: reweighted least squares, and a search over C alone. *Differs*: no 256 random starts are needed.

    power       L = A·N^a·M^b…            one exponent for every variable given
    constant    L = A·N^a + C
    mixed       L = A·N^(a + b·M) + C     the paper's best form
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.app.records.printable import reason
from thinwire.choices import listed
from thinwire.errors import DataError, MissingError
from thinwire.files import contents, parsed

Form = Literal["power", "constant", "mixed"]
Floats = NDArray[np.float64]
HUBER = 1e-3  # of ln(loss): a larger residual counts linearly, not by its square
_ROUNDS = 60
NEEDED = ("loss", "parameters")


@dataclass(frozen=True)
class Ladder:
    """A table of runs: columns of positive numbers, all of one length, and columns of text such as a method's name."""

    columns: Mapping[str, Floats]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.columns.items():
            if not (fits := np.isfinite(values) & (values > 0)).all():
                raise DataError(
                    f"column {name!r} holds {values[~fits][:3].tolist()}: finite numbers above 0 are needed."
                )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def take(self, rows: Sequence[int] | NDArray[np.intp]) -> Ladder:
        kept = np.asarray(rows, dtype=np.intp)
        labels = {name: tuple(texts[row] for row in kept) for name, texts in self.labels.items()}
        return Ladder({name: values[kept] for name, values in self.columns.items()}, labels)

    def where(self, label: str) -> Ladder:
        """The runs that have `label` in some column."""
        rows = [row for row in range(len(self)) if any(texts[row] == label for texts in self.labels.values())]
        if not rows:
            known = sorted({text for texts in self.labels.values() for text in texts})
            raise DataError(f"no run is called {label!r}; there are {listed(known) or 'no names at all'}.")
        return self.take(rows)

    @classmethod
    def load(cls, path: Path) -> Ladder:
        """Read a CSV with a header, or a JSON list of objects. The columns `loss` and `parameters` must have numbers."""
        try:
            text = contents(path)
            rows = parsed(json.loads, text) if path.suffix == ".json" else list(csv.DictReader(io.StringIO(text)))
            if not rows:
                raise ValueError("it has no rows")
            names = list(rows[0])
            table = {name: [row[name] for row in rows] for name in names}
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            known = isinstance(error, OSError | ValueError | csv.Error)
            why = reason(error) if known else "its rows have unlike columns"
            raise (MissingError if isinstance(error, FileNotFoundError) else DataError)(
                f"{path} cannot be read as a ladder of runs ({why}); a CSV with a header, or a JSON list of objects, "
                "with loss and parameters (and replicas, every, tokens, ...) is needed."
            ) from None
        columns = {name: values for name in names if (values := _numbers(table[name])) is not None}
        missing = [name for name in NEEDED if name not in columns]
        if missing:
            raise DataError(f"{path} has no numbers in {', '.join(missing)}; its columns are {', '.join(names)}.")
        return cls(columns, {name: tuple(map(str, table[name])) for name in names if name not in columns})


def _numbers(values: Sequence[object]) -> Floats | None:
    try:
        return np.array([float(str(value)) for value in values])
    except ValueError:
        return None


@dataclass(frozen=True)
class Fitted:
    """L = coefficient · Π variable^exponent (+ constant). `residual` is the mean |ln(predicted / given)|."""

    form: Form
    variables: tuple[str, ...]
    coefficient: float
    exponents: tuple[float, ...]
    constant: float
    residual: float

    def __call__(self, columns: Mapping[str, Floats]) -> Floats:
        logs = _features(self.form, self.variables, columns)
        value: Floats = self.coefficient * np.exp(logs @ np.array(self.exponents)) + self.constant
        return value

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the exponents; in the mixed form the last one belongs to M·ln N."""
        return (
            self.variables if self.form != "mixed" else (self.variables[0], f"{self.variables[0]}^{self.variables[1]}")
        )

    def __str__(self) -> str:
        if self.form == "mixed":
            a, b = self.exponents
            text = f"{self.coefficient:.4g} · {self.variables[0]}^({a:.4f} {b:+.5f}·{self.variables[1]})"
        else:
            text = f"{self.coefficient:.5g}" + "".join(
                f" · {n}^{e:.4f}" for n, e in zip(self.variables, self.exponents)
            )
        return text + (f" + {self.constant:.4g}" if self.constant else "")


def fit(ladder: Ladder, variables: Sequence[str], form: Form = "power") -> Fitted:
    """Fit the law of the loss in `variables`. The mixed form takes two: the size, and the variable that changes its exponent.

    >>> n = np.array([1e6, 1e7, 1e8, 1e9])
    >>> str(fit(Ladder({"parameters": n, "loss": 18.0 * n**-0.095}), ["parameters"]))
    '18 · parameters^-0.0950'
    """
    needed = len(variables) + (1 if form == "power" else 2)
    for name in variables:
        if name not in ladder.columns:
            raise DataError(f"no column {name!r} in the ladder; it has {', '.join(ladder.columns)}.")
        if len(set(ladder.columns[name])) < 2:
            raise DataError(
                f"{name!r} is the same in all runs: its exponent cannot be determined. Leave it out, or vary it."
            )
    if len(ladder) < needed:
        raise DataError(f"{len(ladder)} runs: at least {needed} are needed for {form} in {', '.join(variables)}.")
    if form == "mixed" and len(variables) != 2:
        raise DataError(f"mixed in {', '.join(variables)}: two variables are needed, such as parameters and replicas.")
    values, features = ladder.columns["loss"], _features(form, tuple(variables), ladder.columns)
    if np.linalg.matrix_rank(np.column_stack([np.ones(len(values)), features])) < features.shape[1] + 1:
        raise DataError(
            f"{', '.join(variables)} vary only together: their exponents cannot be distinguished. Leave one out."
        )

    def at(constant: float) -> tuple[float, Floats]:
        weights = (values - constant) / values  # so that residuals are those of ln(loss), whatever the constant
        return _huber(features, np.log(values - constant), weights)

    constant = 0.0 if form == "power" else _golden(lambda c: at(c)[0], 0.0, 0.999 * float(values.min()))
    _, solution = at(constant)
    coefficient, exponents = math.exp(solution[0]), tuple(float(e) for e in solution[1:])
    law = Fitted(form, tuple(variables), coefficient, exponents, constant, 0.0)
    residual = float(np.abs(np.log(law(ladder.columns) / values)).mean())
    return Fitted(form, tuple(variables), coefficient, exponents, constant, residual)


def intervals(
    ladder: Ladder, variables: Sequence[str], form: Form = "power", draws: int = 400, level: float = 0.9, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals of the exponents at `level`: runs are drawn with replacement, and the law is fitted to each draw.

    A draw that cannot be fitted (one size only) is replaced by another.
    """
    random = np.random.default_rng(seed)
    found: list[tuple[float, ...]] = []
    names = fit(ladder, variables, form).names
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        try:
            found.append(fit(ladder.take(random.integers(0, len(ladder), len(ladder))), variables, form).exponents)
        except DataError:
            continue
    if len(found) < draws:
        raise DataError(
            f"{len(ladder)} runs are too few to draw from: add runs, at least three sizes of each variable."
        )
    low, high = np.quantile(np.array(found), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(a), float(b)) for name, a, b in zip(names, low, high)}


def hold_out(ladder: Ladder, variables: Sequence[str], form: Form = "power") -> float | None:
    """Mean |ln(predicted / given)| at the largest size, of a law fitted to the other sizes; None if too few runs are left."""
    size = ladder.columns["parameters"]
    largest = size == size.max()
    try:
        law = fit(ladder.take(np.flatnonzero(~largest)), variables, form)
    except DataError:
        return None
    held = ladder.take(np.flatnonzero(largest))
    return float(np.abs(np.log(law(held.columns) / held.columns["loss"])).mean())


def density(reference: Ladder, runs: Ladder) -> Floats:
    """Training density: the compute with which a data-parallel reference reaches a run's loss, over the compute that the run spent.

    L = A·C^a + L₀ is fitted to `reference` (compute = 6·parameters·tokens, unless the column `compute` is there; with
    fewer than four runs L₀ = 0) and inverted. The density is 1 on the reference's curve. It is NaN outside of the losses that the
    reference reached, because nothing is extrapolated. A loss a thousandth lower is worth about two per cent of compute, so a
    density is only as exact as the loss.
    """
    ladder = Ladder({"compute": compute(reference), "loss": reference.columns["loss"]})
    law = fit(ladder, ["compute"], "constant" if len(ladder) >= 4 else "power")
    losses = reference.columns["loss"]
    inside = (runs.columns["loss"] >= losses.min()) & (runs.columns["loss"] <= losses.max())
    above = np.maximum(runs.columns["loss"] - law.constant, 1e-12)  # inside the reference's range it is positive
    worth = (above / law.coefficient) ** (1 / law.exponents[0])
    return np.where(inside, worth / compute(runs), np.nan)


def compute(ladder: Ladder) -> Floats:
    """Floating-point operations of each run."""
    if "compute" in ladder.columns:
        return ladder.columns["compute"]
    if "tokens" not in ladder.columns:
        raise DataError(
            "neither compute nor tokens in the ladder: the compute of a run is not known. Add a column tokens."
        )
    return 6 * ladder.columns["parameters"] * ladder.columns["tokens"]


def _features(form: Form, variables: tuple[str, ...], columns: Mapping[str, Floats]) -> Floats:
    logs = [np.log(columns[name]) for name in variables]
    if form == "mixed":
        logs = [logs[0], logs[0] * columns[variables[1]]]
    return np.column_stack(logs)


def _huber(features: Floats, target: Floats, scale: Floats) -> tuple[float, Floats]:
    """Least Huber loss of scale·(target − [1, features]·x): reweighted least squares. Returns the loss and x."""
    matrix = np.column_stack([np.ones(len(target)), features])
    weights = np.ones(len(target))
    solution = np.full(matrix.shape[1], np.inf)
    for _ in range(_ROUNDS):
        before = solution
        root = np.sqrt(weights) * scale
        solution = np.linalg.lstsq(matrix * root[:, None], target * root, rcond=None)[0]
        errors = np.abs(scale * (target - matrix @ solution))
        weights = HUBER / np.maximum(errors, HUBER)
        if np.allclose(solution, before, rtol=1e-10, atol=1e-12):
            break
    loss = np.where(errors <= HUBER, errors**2 / 2, HUBER * (errors - HUBER / 2)).sum()
    return float(loss), np.asarray(solution, dtype=np.float64)


def _golden(f: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of `f` between `low` and `high`: a coarse grid, then golden sections around its best point."""

    grid = np.linspace(low, high, 41)
    best = int(np.argmin([f(c) for c in grid]))
    a, b = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        a, b = (a, d) if f(c) < f(d) else (c, b)
    return float((a + b) / 2)
