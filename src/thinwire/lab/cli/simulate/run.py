"""`thinwire simulate run`: simulates a run on given machines and links."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.table import Table
from torch import nn

from thinwire.app.cli import options
from thinwire.app.cli.pages import write_report
from thinwire.app.jobs.own import counted_in, functions
from thinwire.app.plan import compute
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import UNITS, text_of_bits, text_of_nbytes, text_of_rate, text_of_seconds, text_of_share
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.run_folder import check_run_file
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.tokenizer import make_tokenizer
from thinwire.comm import Link, quantities
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.record import Recorder
from thinwire.lab.simulate.replicas import SimulationResult, simulate
from thinwire.lab.simulate.scenario import Failures, Outages, Scenario, Stragglers, Wire, spread
from thinwire.rng import derive
from thinwire.version import __version__

_GOSSIP = (
    "gossip is timed as if each round waited for all replicas, not for neighbours alone: stalls are an upper bound. The mean of all at the end "
    "is not in these numbers"
)
MOST_STEPS = 10_000_000  # some minutes, if each step has a round
SHOWN = 8  # most replicas in the table


@dataclass(frozen=True)
class Options:
    """The options of `thinwire simulate run`, beside every option of a run."""

    MOST_USED: ClassVar[tuple[str, ...]] = ("step_seconds", "out")

    run_settings: Run
    """The settings of the run; --link is every replica's uplink, at most --uplink fast; --slow are further factors of --slower."""
    step_seconds: float | None = None
    """Seconds of an inner step; a report shows it, and `thinwire doctor` measures it."""
    slower: tuple[float, ...] = (1.0,)
    """Factors by which a step takes longer on each replica; the list is repeated."""
    step_variation: float = 0.0
    """Coefficient of variation of the replicas' speeds, in addition (drawn by the seed)."""
    links: tuple[str, ...] = ()
    """Uplinks, if they differ, such as 50mbit,30ms 10mbit; the list is repeated. Default: --link for all."""
    link_variation: float = 0.0
    """Coefficient of variation of the uplinks' rates, in addition (drawn by the seed)."""
    sharing: int = 1
    """Number of replicas that share one uplink: the machines of a site."""
    loss: float = 0.0
    """Share of the bytes that is lost and sent again."""
    jitter: float = 0.0
    """Coefficient of variation of the steps of one replica."""
    stragglers: str | None = None
    """Random pauses of a replica, as LENGTH/EVERY: 10s/1h. Default: none."""
    outages: str | None = None
    """Random outages of an uplink, as LENGTH/EVERY: 20s/2h. Default: none."""
    failures: str | None = None
    """Random deaths of replicas in an elastic run, as REPAIR/EVERY or REPAIR/EVERY/NOTICED: 10min/7d/30s. Default: none."""
    encode_seconds: float = 0.0
    """Seconds per parameter that the exchange thread needs to encode: 2e-9 is half a billion per second."""
    decode_seconds: float = 0.0
    """Seconds per parameter of each replica's packet that the exchange thread needs to decode."""
    out: Path | None = None
    """Also write a run folder with event logs, run file and report page. Default: no folder."""
    run: Path | None = None
    """A run file with settings. Default: the defaults of the options below."""
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    description = "Simulate a run on given machines and links, in virtual time and without training (simulated)."
    asked = options.read(Options, "simulate run", arguments, description)
    asked = dataclasses.replace(asked, run_settings=asked.run_settings.counted_in_samples())
    run, console = asked.run_settings, options.console(asked.json)
    if run.optimizer.steps > MOST_STEPS:
        raise ConfigurationError(f"--steps {run.optimizer.steps}: at most {MOST_STEPS:,} are simulated.")
    scenario = make_scenario(asked)
    strategy = run.make_strategy()
    cut = strategy.partition.fragments(skeleton(run))
    fragments, shapes = [(f.name, f.numel) for f in cut], [f.shapes for f in cut]
    with ExitStack() as stack:
        recorder = stack.enter_context(_recorder(asked, asked.out, scenario, fragments)) if asked.out else None
        outcome = simulate(
            strategy, shapes, scenario, run.optimizer.steps, recorder, lambda step: learning_rate(run, step)
        )
        floor = scenario.floor_bits_per_second(strategy, shapes)
        summary = summary_of(run, fragments, outcome) | {"floor_bits_per_second": floor, "scenario": described(asked)}
        if recorder is not None:
            recorder.end(outcome, run.optimizer.steps, summary)
    console.print(_table(scenario, outcome, summary, _unit(run)))
    if strategy.bound:
        console.print(strategy.bound, soft_wrap=True, highlight=False)
    if not strategy.exchange.traits.agrees:
        console.print(_GOSSIP, soft_wrap=True, highlight=False)
    if asked.out is not None:
        (asked.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        page = write_report([RunRecord.load(asked.out)], asked.out / "report.html")
        console.print(f"report: {page}", soft_wrap=True, highlight=False)
    return options.answer(asked.json, summary)


def make_scenario(asked: Options) -> Scenario:
    """The machines and links that the options describe. Raises `ConfigurationError`."""
    run, seconds = asked.run_settings, asked.step_seconds
    if seconds is None:
        raise ConfigurationError(
            "the time of an inner step is needed: --step-seconds 0.2; `thinwire doctor` measures it."
        )
    if not (asked.slower and all(factor > 0 for factor in asked.slower)):
        raise ConfigurationError(f"slower={asked.slower}: positive factors are needed, such as --slower 1 1 2.5.")
    for name in ("step_variation", "link_variation"):
        if not 0 <= getattr(asked, name) < 10:
            raise ConfigurationError(f"{name}={getattr(asked, name)}: zero or more is needed; 0.3 is a lot.")
    if not 1 <= asked.sharing <= run.placement.replicas:
        raise ConfigurationError(
            f"sharing={asked.sharing} with {run.placement.replicas} replicas: between 1 and {run.placement.replicas} replicas share an uplink."
        )
    count = -(-run.placement.replicas // asked.sharing)
    factors = spread(1.0, asked.step_variation, run.placement.replicas, run.seed, "steps")
    waits = run.placement.slow or (1.0,) * run.placement.replicas
    steps = tuple(seconds * slow * wait * own for slow, wait, own in zip(cycle(asked.slower), waits, factors))
    rates = spread(1.0, asked.link_variation, count, run.seed, "links")
    links = [
        Link(link.bits_per_second * factor, link.delay_seconds)
        for link, factor in zip(islice(cycle(_uplinks(asked)), count), rates)
    ]
    down = _times("outages", asked.outages, 2)
    return Scenario(
        step_seconds=steps,
        wires=tuple(
            Wire(link, asked.loss, Outages(down[1], down[0], derive(run.seed, "outages", number)) if down else ())
            for number, link in enumerate(links)
        ),
        shares=tuple(rank // asked.sharing for rank in range(run.placement.replicas)),
        jitter=asked.jitter,
        stragglers=Stragglers(pause[1], pause[0]) if (pause := _times("stragglers", asked.stragglers, 2)) else None,
        failures=Failures(dead[1], *dead[:1], *dead[2:])
        if (dead := _times("failures", asked.failures, 2, 3))
        else None,
        encode_seconds=asked.encode_seconds,
        decode_seconds=asked.decode_seconds,
        seed=run.seed,
    )


def _uplinks(asked: Options) -> list[Link]:
    """The uplinks by --links or --link, none of them faster than --uplink; that alone has no delay. Raises `ConfigurationError`."""
    placement = asked.run_settings.placement
    link, uplink = (() if text == "none" else (text,) for text in (placement.link, placement.uplink))
    given = asked.links or link or uplink
    if not given:
        raise ConfigurationError("a link is needed: --link 50mbit,30ms for all replicas, or --links with one for each.")
    if uplink and asked.sharing > 1:
        raise ConfigurationError(
            f"uplink={placement.uplink!r} with sharing={asked.sharing}: --uplink is of one replica; write --uplink none, and give the rate "
            "of a shared uplink by --link."
        )
    most = min((Link.parse(text).bits_per_second for text in uplink), default=inf)
    return [Link(min(one.bits_per_second, most), one.delay_seconds) for one in map(Link.parse, given)]


def skeleton(run: Run) -> nn.Module:
    """The run's model without storage, and without reading its text."""
    return compute.skeleton(run, make_tokenizer(run.data, run.model.model).vocabulary)


def described(asked: Options) -> dict[str, Any]:
    """The options that make the scenario, beside the run's own."""
    elsewhere = ("run_settings", "out", "run", "json")
    fields = [field.name for field in dataclasses.fields(asked) if field.name not in elsewhere]
    return {name: getattr(asked, name) for name in fields}


def summary_of(run: Run, fragments: Sequence[tuple[str, int]], outcome: SimulationResult) -> dict[str, Any]:
    """The numbers of `thinwire train --json`, and those that only a simulation has."""
    parameters = sum(numel for _, numel in fragments)
    sent, wall = float(outcome.nbytes_sent.mean()), float(outcome.wall_seconds.max())
    tokens = int(outcome.steps.sum()) * run.data.tokens
    return {
        "strategy": run.method.label,
        "replicas": run.placement.replicas,
        "steps": run.optimizer.steps,
        "tokens": tokens,
        "parameters": parameters,
        "eval_loss": None,
        "wire_bytes_sent": round(sent),
        "bits_per_parameter_per_step": 8 * sent / parameters / run.optimizer.steps,
        "compute_utilization": outcome.compute_utilization,
        "wall_seconds": wall,
        "stall_seconds": float(outcome.stall_seconds.mean()),
        "provenance": "simulated",
        "tokens_per_second": tokens / wall,
        "link_use": float((outcome.busy_seconds / wall).max()),
        "rounds": outcome.rounds,
        "failures": outcome.failures,
        "events": outcome.events,
    }


def _recorder(asked: Options, out: Path, scenario: Scenario, fragments: Sequence[tuple[str, int]]) -> Recorder:
    run = asked.run_settings
    if (out / "events").exists():
        raise ConfigurationError(f"{out} holds a run already; choose another --out.")
    check_run_file(out)
    recorder = Recorder(
        out,
        scenario,
        {
            "run": run.settings() | {"unit": _unit(run)},
            "strategy": run.method.label,
            "parameters": sum(numel for _, numel in fragments),
            "fragments": [{"name": name, "numel": numel} for name, numel in fragments],
            "machine": {"thinwire": __version__, **described(asked)},
        },
        run.data.tokens,
    )
    run.save(out / "run.toml")
    return recorder


def _times(name: str, text: str | None, *counts: int) -> list[float]:
    """`10s/1h` as seconds; empty without."""
    if text is None:
        return []
    parts = text.split("/")
    if len(parts) not in counts:
        like = "10min/7d or 10min/7d/30s" if 3 in counts else "10s/1h"
        raise ConfigurationError(f"{name}={text!r}: times with units between slashes are needed, such as {like}.")
    return [quantities.seconds(part) for part in parts]


def _unit(run: Run) -> str:
    """What the run counts its data in."""
    return counted_in(functions(run.model.job)) if run.model.job else UNITS[0]


def _table(scenario: Scenario, outcome: SimulationResult, summary: dict[str, Any], unit: str) -> Table:
    """The run's numbers, and those of the replicas that wait most and least."""
    title = f"{summary['strategy']}, {summary['replicas']} replicas, {summary['steps']:,} inner steps (simulated)"
    table = options.table(title)
    table.add_column("replica", no_wrap=True)
    for head in ("step", "uplink", "utilization", "stalled", "sent", "training loop", "link in use"):
        table.add_column(head, justify="right")
    shares = range(scenario.replicas) if scenario.shares is None else scenario.shares
    order = np.argsort(outcome.stall_seconds, kind="stable")[::-1]
    most = order if len(order) <= SHOWN else np.concatenate([order[: SHOWN // 2], order[-(SHOWN // 2) :]])
    for rank in sorted(most.tolist()) if len(order) <= SHOWN else most.tolist():
        wire, wall = shares[rank], float(outcome.wall_seconds[rank])
        table.add_row(
            str(rank), text_of_seconds(scenario.step_seconds[rank]),
            text_of_rate(scenario.wires[wire].link.bits_per_second),
            text_of_share(float(outcome.compute_seconds[rank]) / wall), text_of_seconds(float(outcome.stall_seconds[rank])),
            text_of_nbytes(float(outcome.nbytes_sent[rank])), text_of_seconds(wall),
            text_of_share(float(outcome.busy_seconds[wire]) / wall),
        )  # fmt: skip
    table.add_section()
    table.add_row(
        "all", "", "", text_of_share(summary["compute_utilization"]), text_of_seconds(summary["stall_seconds"]),
        text_of_nbytes(summary["wire_bytes_sent"]), text_of_seconds(summary["wall_seconds"]), text_of_share(summary["link_use"]),
    )  # fmt: skip
    shown = "" if len(order) <= SHOWN else f"the {SHOWN // 2} that wait most and the {SHOWN // 2} that wait least; "
    failed = f"{summary['failures']} failures; " if scenario.failures else ""
    floor = summary["floor_bits_per_second"]  # 0: one replica alone
    waits = f"\non an uplink below {text_of_rate(floor)} every schedule must wait (predicted)" if floor else ""
    table.caption = (
        f"{shown}{failed}{summary['tokens_per_second']:,.0f} {unit}/s, {summary['rounds']:,} rounds, "
        f"{text_of_bits(summary['bits_per_parameter_per_step'])} bits a parameter and step, {summary['events']:,} events{waits}"
    )
    return table
