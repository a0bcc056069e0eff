"""`thinwire simulate stragglers`: the cost of waiting for late replicas, with and without gradient codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_seconds, text_of_share
from thinwire.comm import quantities
from thinwire.errors import ConfigurationError
from thinwire.lab.methods.gradient_codes import gradient_code
from thinwire.lab.methods.sequential_codes import Coded, Multiplexed, Scheme, SelectiveRepeat
from thinwire.lab.simulate.figure import stragglers_chart
from thinwire.lab.simulate.stragglers import (
    FAMILIES,
    PATIENCE_SHARE,
    CodedRun,
    Delays,
    gilbert_elliott,
    search,
    shifted_exponential,
    simulate,
    without_the_slowest,
)

IGNORING = "ignore the slowest"


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate stragglers`."""

    replicas: int = 16
    """Replicas; each holds the whole model, and a step's batch is divided among them."""
    step_seconds: str = "1s"
    """Time that a replica needs for its share of the batch if nothing delays it."""
    compute_share: float = 1.0
    """Share of that time which grows with a replica's share of the batch; the rest is constant."""
    pattern: Literal["bursts", "exponential"] = "bursts"
    """bursts: each replica is sometimes slow for some steps (Gilbert-Elliott); exponential: each step of each replica is delayed."""
    pause: str = "5s"
    """bursts: delay of a step in a burst; exponential: mean delay of a step."""
    burst_every: float = 20.0
    """Steps between two bursts of a replica, on average."""
    burst_steps: float = 2.0
    """Steps of a burst, on average."""
    recorded: Path | None = None
    """Instead of these: a run folder with the compute times of each step. Default: delays that are drawn."""
    stragglers: int | None = None
    """Number of replicas without which gradient coding, and ignoring, continue. Default: that of the fastest gradient code in the probed steps."""
    patience: float = PATIENCE_SHARE
    """With sequential codes: a replica that takes more than 1 + this times as long as the first is late."""
    probe: int = 50
    """Steps for the search of parameters; all figures are of the steps after them."""
    steps: int = 200
    """Steps after the probed ones. A recorded run has its own number."""
    seed: int = 0
    """Seed of the delays."""
    plot: Path | None = None
    """Draw steps against time: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "Gradient codes, sequential ones, waiting, and ignoring, under stragglers (simulated)."
    asked = options.read(Options, "simulate stragglers", arguments, description)
    figures.check(asked.plot)
    delays, said = _delays(asked)
    if not 10 <= asked.probe < len(delays.seconds) - 10:
        raise ConfigurationError(
            f"probe={asked.probe} of {len(delays.seconds)} steps: at least 10 steps to probe, and more than 10 after them, are needed."
        )
    outcomes = _outcomes(asked, delays.part(0, asked.probe), delays.part(asked.probe))
    rows = [_row(name, outcome, outcomes["data-parallel"]) for name, outcome in outcomes.items()]
    title = f"{delays.replicas} replicas, {said}"
    console = options.console(asked.json)
    console.print(_table(title, rows, delays, asked.probe))
    if asked.plot is not None:
        ends = {name: (outcome.ends, outcome.jobs) for name, outcome in outcomes.items()}
        figures.draw(stragglers_chart(ends), title, asked.plot, "simulated", options.teller(console))
    facts = {
        "study": "stragglers", "provenance": "simulated", "replicas": delays.replicas, "delays": said,
        "batch_seconds": delays.batch_seconds, "probe": asked.probe, "methods": rows,
    }  # fmt: skip
    return options.answer(asked.json, facts)


def _delays(asked: Options) -> tuple[Delays, str]:
    """The compute times, and a description."""
    if not 0 <= asked.compute_share <= 1:
        raise ConfigurationError(f"compute_share={asked.compute_share}: a share, from 0 to 1, is needed.")
    if asked.recorded is not None:
        return _recorded(asked.recorded, asked.compute_share)
    step, pause = quantities.seconds(asked.step_seconds), quantities.seconds(asked.pause)
    rounds = asked.probe + asked.steps
    if asked.pattern == "bursts":
        found = gilbert_elliott(rounds, asked.replicas, step, pause, asked.burst_every, asked.burst_steps, asked.seed)
        said = f"{text_of_seconds(pause)} late for {asked.burst_steps:g} steps after every {asked.burst_every:g}"
    else:
        found = shifted_exponential(rounds, asked.replicas, step, pause, asked.seed)
        said = f"exponential delays of {text_of_seconds(pause)}"
    said = f"{text_of_seconds(step)} a step, {said}"
    return Delays(found, asked.compute_share * step * asked.replicas), said


def _recorded(folder: Path, compute_share: float) -> tuple[Delays, str]:
    """The compute times of the replicas of a run, step by step as far as all have them."""
    took = [replica.compute_seconds for replica in RunRecord.load(folder).replicas]
    steps = min(map(len, took))
    if len(took) < 2 or steps < 21:
        raise ConfigurationError(
            f"{folder} holds {steps} steps of {len(took)} replicas: at least 21 steps of 2 replicas are needed."
        )
    seconds = np.maximum(np.stack([one[:steps] for one in took], axis=1), 1e-9)
    step = float(np.median(seconds.min(axis=1)))
    return Delays(
        seconds, compute_share * step * len(took)
    ), f"delays recorded in {folder}, {text_of_seconds(step)} a step"


def _outcomes(asked: Options, probe: Delays, rest: Delays) -> dict[str, CodedRun]:
    replicas = rest.replicas
    found = {"data-parallel": simulate(Coded(gradient_code(replicas, 0)), rest, asked.patience)}
    given = None if asked.stragglers is None else Coded(gradient_code(replicas, asked.stragglers))
    schemes: dict[str, Scheme] = {family: search(family, probe, asked.patience) for family in FAMILIES}
    coded = given or schemes["gradient coding"]
    assert isinstance(coded, Coded)
    schemes["gradient coding"] = coded
    found[IGNORING] = without_the_slowest(rest, coded.code.stragglers)
    return found | {name: simulate(scheme, rest, asked.patience) for name, scheme in schemes.items()}


def _row(name: str, outcome: CodedRun, control: CodedRun) -> dict[str, Any]:
    scheme = outcome.scheme
    return {
        "method": name,
        "parameters": _parameters(scheme),
        "load": float(scheme.load * scheme.replicas),
        "delay": scheme.delay,
        "seconds_per_step": outcome.seconds_per_job,
        "against_data_parallel": outcome.seconds_per_job / control.seconds_per_job,
        "late": outcome.late / (len(outcome.ends) * scheme.replicas),
        "lost": outcome.lost,
    }


def _parameters(scheme: Scheme) -> dict[str, int]:
    """Settings by the letters of the papers."""
    found = {"s": scheme.code.stragglers} if isinstance(scheme, Coded | SelectiveRepeat) else {}
    if isinstance(scheme, SelectiveRepeat | Multiplexed):
        found |= {"B": scheme.burst, "W": scheme.window, "λ": scheme.stragglers}
    return found


def _table(title: str, rows: Sequence[dict[str, Any]], delays: Delays, probe: int) -> Table:
    table = options.table(title + " (simulated)")
    table.add_column("method")
    for head in ("a step", "of it", "computes", "T", "not awaited", "lost"):
        table.add_column(head, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row["method"], text_of_seconds(row["seconds_per_step"]), f"{row['against_data_parallel']:.2f} ×", f"{row['load']:.2f} ×",
            str(row["delay"]), text_of_share(row["late"]), text_of_share(row["lost"]), _said(row),
        )  # fmt: skip
    table.caption = (
        "of it, computes: beside data-parallel. T: steps until a gradient is there, so T + 1\n"
        "models take turns. lost: share of the batch that never counts. One replica would\n"
        f"compute a batch in {text_of_seconds(delays.batch_seconds)}. Parameters are the fastest of {probe} steps before these"
    )
    return table


def _said(row: dict[str, Any]) -> str:
    said = {"data-parallel": "waits for all", IGNORING: "biased where data differ"}
    letters = ", ".join(f"{letter}={value}" for letter, value in row["parameters"].items())
    return said.get(row["method"], letters)
