"""`thinwire plan fit`: exponents, intervals and joint laws from a user's own ladder of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from thinwire.app.cli import options
from thinwire.app.records.units import text_of_count, text_of_share
from thinwire.errors import DataError
from thinwire.lab.plan.fit import Fitted, Form, Ladder, density, fit, hold_out, intervals

MOST_DRAWS = 100_000
LIKELY = ("parameters", "replicas", "every", "tokens")


@dataclass(frozen=True)
class Options:
    """The options of `thinwire plan fit`."""

    file: tyro.conf.Positional[Path]
    """CSV with a header, or a JSON list of objects: loss, parameters, and replicas, every, tokens, ... of each run."""
    variables: tuple[str, ...] | None = None
    """Variables of the law. Default: those of parameters, replicas, every and tokens that vary independently."""
    reference: str | None = None
    """The name of the data-parallel runs in the file (such as data_parallel); gives the training density of all others. Default: no densities."""
    draws: int = 400
    """Number of bootstrap draws; of laws with a constant, which are slower, an eighth, at least 10."""
    level: float = 0.9
    """Confidence level of the intervals."""
    json: bool = False
    """Tables go to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = (
        "Fit scaling laws of the loss to your own runs, with bootstrap intervals and a hold-out at the largest size."
    )
    asked = options.read(Options, "plan fit", arguments, about)
    if not 10 <= asked.draws <= MOST_DRAWS or not 0 < asked.level < 1:
        raise DataError(
            f"draws={asked.draws}, level={asked.level}: 10 to {MOST_DRAWS:,} draws and a level between 0 and 1 are needed."
        )
    console, ladder = options.console(asked.json), Ladder.load(asked.file)
    variables = asked.variables or telling(ladder)
    rows = [row for form in forms(variables) if (row := law(ladder, variables, form, asked)) is not None]
    if not rows:
        intervals(ladder, variables, draws=asked.draws, level=asked.level)  # raises the reason
    console.print(_table(rows, asked, len(ladder)))
    for name in variables:
        low, high = ladder.columns[name].min(), ladder.columns[name].max()
        console.print(
            f"{name}: fitted from {text_of_count(low)} to {text_of_count(high)}; outside it is a guess", highlight=False
        )
    facts: dict[str, Any] = {"word": "predicted", "runs": len(ladder), "variables": list(variables), "laws": rows}
    if asked.reference is not None:
        facts["density"] = _densities(console, ladder, asked.reference)
    return options.answer(asked.json, facts)


def telling(ladder: Ladder) -> tuple[str, ...]:
    """The likely variables that vary, without those that follow from others."""
    chosen: list[str] = []
    for name in LIKELY:
        if name in ladder.columns and len(set(ladder.columns[name])) > 1:
            try:
                fit(ladder, [*chosen, name])
            except DataError:
                continue
            chosen.append(name)
    return tuple(chosen) or ("parameters",)


def forms(variables: Sequence[str]) -> list[Form]:
    """The forms of laws to fit in these variables."""
    return ["power", *(["constant"] if len(variables) == 1 else []), *(["mixed"] if len(variables) == 2 else [])]  # type: ignore[list-item]


def law(ladder: Ladder, variables: Sequence[str], form: Form, asked: Options) -> dict[str, Any] | None:
    """One law with its intervals; None if there are too few runs for it."""
    try:
        fitted: Fitted = fit(ladder, variables, form)
        draws = asked.draws if form == "power" else max(10, asked.draws // 8)  # those with a constant are slower
        spread = intervals(ladder, variables, form, draws, asked.level)
    except DataError:
        return None
    return {
        "form": form, "law": str(fitted), "coefficient": fitted.coefficient, "constant": fitted.constant,
        "exponents": dict(zip(fitted.names, fitted.exponents)), "intervals": spread, "residual": fitted.residual,
        "hold_out": hold_out(ladder, variables, form),
    }  # fmt: skip


def _table(rows: Sequence[dict[str, Any]], asked: Options, runs: int) -> Table:
    table = Table(
        "law", f"exponents, {text_of_share(asked.level)} of draws", title=f"Laws of the loss in {runs} runs (predicted)"
    )
    table.add_column("mean error", justify="right")
    table.add_column("at the largest size, held out", justify="right")
    for row in rows:
        spread = "\n".join(f"{name} {low:.4f} … {high:.4f}" for name, (low, high) in row["intervals"].items())
        held = "–" if row["hold_out"] is None else f"{100 * row['hold_out']:.2f} %"
        table.add_row(row["law"], spread, f"{100 * row['residual']:.2f} %", held)
    return table


def _densities(console: Console, ladder: Ladder, reference: str) -> list[dict[str, Any]]:
    control = ladder.where(reference)
    found = density(control, ladder)
    names = [" ".join(texts[row] for texts in ladder.labels.values()) for row in range(len(ladder))]
    table = Table("run", title=f"Training density beside {reference} (predicted)")
    for head in ("parameters", "loss", "density"):
        table.add_column(head, justify="right")
    rows = []
    for name, size, loss, value in zip(names, ladder.columns["parameters"], ladder.columns["loss"], found):
        known = bool(np.isfinite(value))
        table.add_row(name, text_of_count(float(size)), f"{loss:.4f}", f"{value:.3f}" if known else "outside")
        rows.append(
            {"run": name, "parameters": float(size), "loss": float(loss), "density": float(value) if known else None}
        )
    table.caption = (
        "compute with which the reference reaches that loss, over the compute spent; outside: of the reference's losses"
    )
    console.print(table)
    if any(math.isnan(value) for value in found):
        console.print(
            "warning: density-outside-fit: losses that the reference did not reach are not extrapolated",
            highlight=False,
        )
    return rows
