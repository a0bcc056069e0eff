"""`thinwire simulate utilization`: the rate that a link needs, by method and target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.records.units import text_of_count, text_of_seconds
from thinwire.lab.simulate.figure import utilization_chart
from thinwire.lab.simulate.layers import Stack
from thinwire.lab.simulate.utilization import STUDIED, TARGETS, Study

Method = Literal[
    "data-parallel",
    "diloco",
    "streaming",
    "streaming-overlap",
    "streaming-overlap-fp4",
    "streaming-eager",
    "streaming-eager-fp4",
]


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate utilization`."""

    parameters: float = 1e9
    """Parameters of the model, such as 1e9; all in equal layers."""
    layers: int = 24
    """Layers of the model."""
    step_seconds: float = 0.1
    """Seconds of an inner step: a third of it forward, the rest backward."""
    method: Method | None = None
    """One method; with eager a round takes a whole period. Default: all."""
    every: int = 100
    """H: inner steps between two exchanges of the same parameters."""
    delay: int = 1
    """tau, with overlap: inner steps for which an exchange may be in flight."""
    fragment_layers: int = 3
    """Layers per fragment of the streaming methods; strided."""
    bits_per_parameter: float = 16.0
    """Bits per parameter and exchange (fp4: a quarter of it). 13.4 reproduces the paper's table, which says 16."""
    grid: Literal["fine", "paper"] = "fine"
    """fine: exact thresholds of a long run. paper: the first of 50 rates between 0.1 and 1000 Gbit/s, in about 300 steps."""
    plot: Path | None = None
    """Draw utilization against rate: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "The rate that a link needs for a compute utilization of 50, 80, 90, 95 and 99 % (simulated)."
    asked = options.read(Options, "simulate utilization", arguments, description)
    stack = Stack(asked.parameters, asked.layers, asked.step_seconds)
    study = Study(stack, asked.every, asked.delay, asked.fragment_layers, asked.bits_per_parameter)
    methods = STUDIED if asked.method is None else (asked.method,)
    figures.check(asked.plot)
    rows = [_row(study, method, asked.grid) for method in methods]
    console = options.console(asked.json)
    console.print(_table(study, rows, asked.grid))
    if asked.plot is not None:
        figures.draw(utilization_chart(study, methods), _title(study), asked.plot, "simulated", options.teller(console))
    setting = {name: getattr(asked, name) for name in ("parameters", "layers", "step_seconds", "grid")}
    facts = {"study": "utilization", "provenance": "simulated", **setting, "volume": study.convention()}
    return options.answer(asked.json, facts | {"targets": TARGETS} | (rows[0] if asked.method else {"methods": rows}))


def _row(study: Study, method: str, grid: str) -> dict[str, Any]:
    """The thresholds of a method, and the values that they follow from."""
    rates = study.paper_rates(method) if grid == "paper" else study.rates(method)
    schedule = study.strategy(method).schedule
    return {
        "method": method,
        "every": schedule.every,
        "delay": schedule.delay,
        "fragments": len(study.stack.fragments(study.strategy(method))),
        "bits_per_parameter": study.bits(method),
        "bandwidth_gbit_per_second": [None if rate is None else rate / 1e9 for rate in rates],
        "floor_gbit_per_second": study.floor(method) / 1e9,
    }


def _title(study: Study) -> str:
    stack = study.stack
    return (
        f"{text_of_count(stack.parameters)} parameters, {stack.layers} layers, {text_of_seconds(stack.step_seconds)} "
        f"a step, H = {study.every}"
    )


def _table(study: Study, rows: Sequence[dict[str, Any]], grid: str) -> Table:
    means = "first rate of the paper's grid" if grid == "paper" else "least rate"
    table = options.table(f"{_title(study)}\nGbit/s for a compute utilization of … (simulated; {means})")
    table.caption = study.convention() + "\nfloor: below it every schedule must wait (predicted)"
    table.add_column("method", no_wrap=True)
    for head in (*(f"{target:.0%}" for target in TARGETS), "floor", "bits", "period", "delay", "fragments"):
        table.add_column(head, justify="right")
    for row in rows:
        shown = ["–" if rate is None else f"{rate:.3g}" for rate in row["bandwidth_gbit_per_second"]]
        setting = [f"{row['bits_per_parameter']:g}", str(row["every"]), str(row["delay"]), str(row["fragments"])]
        table.add_row(row["method"], *shown, f"{row['floor_gbit_per_second']:.3g}", *setting)
    return table
