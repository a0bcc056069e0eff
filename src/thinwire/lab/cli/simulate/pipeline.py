"""`thinwire simulate pipeline`: one step of 1F1B over slow hops, compared with closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from thinwire.app.cli import figures, options
from thinwire.app.records.units import text_of_seconds, text_of_share
from thinwire.comm import Link, quantities
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.figure import pipeline_chart
from thinwire.lab.simulate.pipeline import (
    Pipeline,
    amp_seconds,
    one_forward_one_backward,
    pipeline_seconds,
    pipette_seconds,
)

FORMS = {"exact": pipeline_seconds, "Pipette": pipette_seconds, "AMP": amp_seconds}


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate pipeline`."""

    stages: int = 4
    """Number of stages, each on its own machine."""
    micro_batches: int = 16
    """Number of micro-batches in one step."""
    forward_seconds: float = 0.1
    """Seconds of a forward pass of one stage and micro-batch."""
    backward_seconds: float | None = None
    """Seconds of a backward pass. Default: twice the forward pass."""
    hop_seconds: tuple[float, ...] = (0.05,)
    """Seconds from one stage to the next, and back: one value for all hops, or one for each (the list is repeated)."""
    links: tuple[str, ...] = ()
    """Instead of --hop-seconds: links between the stages, such as 1gbit,20ms; the list is repeated."""
    activation: str = "16MB"
    """With --links: bytes of one hop: micro-batch x sequence x width x bytes per value."""
    slower: tuple[float, ...] = (1.0,)
    """Factors by which each stage takes longer; the list is repeated."""
    plot: Path | None = None
    """Draw utilization against the hop's time, equal stages: FILE.svg, FILE.html, or FILE.png (which needs thinwire[png]). Default: no picture."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "One step of a pipeline (1F1B) over slow hops (simulated), beside closed forms (predicted)."
    asked = options.read(Options, "simulate pipeline", arguments, description)
    figures.check(asked.plot)
    backward = 2 * asked.forward_seconds if asked.backward_seconds is None else asked.backward_seconds
    pipeline = Pipeline.of(
        asked.stages, asked.micro_batches, asked.forward_seconds, backward, _hops(asked), asked.slower
    )
    found = _facts(pipeline, one_forward_one_backward(pipeline))
    console = options.console(asked.json)
    console.print(_table(pipeline, found))
    if asked.plot is not None:
        title = f"1F1B: {pipeline.stages} stages, {pipeline.micro_batches} micro-batches"
        chart = pipeline_chart(asked.stages, asked.micro_batches, asked.forward_seconds, backward)
        figures.draw(chart, title, asked.plot, "simulated", options.teller(console))
    return options.answer(asked.json, found)


def _hops(asked: Options) -> Sequence[float]:
    nbytes = quantities.nbytes(asked.activation)
    if asked.links and asked.hop_seconds != Options.hop_seconds:
        raise ConfigurationError("--hop-seconds and --links: both give the time of a hop; leave one out.")
    return [Link.parse(link).seconds(nbytes) for link in asked.links] or asked.hop_seconds


def _facts(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """The results as JSON, for programs; closed forms only for equal stages and equal hops."""
    computing = pipeline.forward_seconds[0] + pipeline.backward_seconds[0]
    hop = pipeline.hop_seconds[0] if pipeline.hop_seconds else 0.0
    asked = (pipeline.stages, pipeline.micro_batches, computing, hop)
    return {
        "study": "pipeline",
        "provenance": "simulated",
        "stages": pipeline.stages,
        "micro_batches": pipeline.micro_batches,
        "hop_seconds": pipeline.hop_seconds,
        "step_seconds": seconds,
        "compute_utilization": sum(pipeline.work_seconds) / pipeline.stages / seconds,
        "busiest_utilization": max(pipeline.work_seconds) / seconds,
        "predicted": {name: form(*asked) for name, form in FORMS.items()} if pipeline.even else None,
    }


_SAYS = {"exact": "where the stages divide the micro-batches", "Pipette": "one term less", "AMP": "hops are paid once"}


def _table(pipeline: Pipeline, found: dict[str, Any]) -> Table:
    seconds = found["step_seconds"]
    hops = sorted(set(pipeline.hop_seconds)) or [0.0]
    shown = " to ".join(text_of_seconds(hop) for hop in dict.fromkeys((hops[0], hops[-1])))
    table = options.table(f"1F1B: {pipeline.stages} stages, {pipeline.micro_batches} micro-batches, {shown} a hop")
    table.add_column("a step")
    for head in ("takes", "off by"):
        table.add_column(head, justify="right")
    table.add_column("")
    table.add_row(
        "simulated", text_of_seconds(seconds), "", f"{text_of_share(found['compute_utilization'])} of it computing"
    )
    for name, predicted in (found["predicted"] or {}).items():
        off = f"{100 * (predicted / seconds - 1):+.1f} %" if abs(predicted / seconds - 1) > 1e-9 else "0"
        table.add_row(f"{name} (predicted)", text_of_seconds(predicted), off, _SAYS[name])
    unlike = "" if pipeline.even else "stages or hops differ, so there is no closed form; "
    table.caption = f"{unlike}the busiest stage computes {text_of_share(found['busiest_utilization'])} of the time"
    return table
