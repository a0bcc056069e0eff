"""`thinwire compare`: several strategies on the same tokens and seeds, one table."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thinwire.app.cli import options
from thinwire.app.cli.capacity import check_capacity, choose_defaults
from thinwire.app.cli.pages import COMPARISON, write_report
from thinwire.app.cli.summary import exit_code_of, without_result
from thinwire.app.cli.training import train_to_the_end
from thinwire.app.records.losses import for_json, useless
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.summary import Summary
from thinwire.app.records.units import text_of_bits, text_of_loss, text_of_nbytes, text_of_seconds, text_of_share
from thinwire.app.report.terminal import waiting
from thinwire.app.trainer import launch
from thinwire.app.trainer.job import check_and_weigh
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError, DataError, ThinwireError


@dataclass(frozen=True)
class Options:
    """The options of `thinwire compare`, beside every option of a run."""

    MOST_USED: ClassVar[tuple[str, ...]] = ("strategies", "out")

    run_settings: Run
    """The settings of all runs. Settings of a recipe, such as --every, go to the strategies that accept them."""
    strategies: tuple[str, ...] = ("data_parallel", "diloco", "streaming_diloco", "streaming_sign")
    """Recipes, or calls of them such as "streaming_diloco(every=60)", which ignore the options of the command line."""
    seeds: int = 1
    """Number of seeds for every strategy, from --seed on."""
    out: Path | None = None
    """A folder for all runs. Complete runs in it are not trained again. Default: runs/compare-DATE-TIME."""
    run: Path | None = None
    """A run file with settings. Default: the defaults of the options below."""
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
    json: bool = False
    """Progress goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "compare", arguments, "Train with several strategies on the same tokens and seeds.")
    if asked.seeds < 1 or not asked.strategies:
        raise ConfigurationError(
            f"{len(asked.strategies)} strategies and seeds={asked.seeds}: at least 1 of each is needed."
        )
    console = options.console(asked.json)
    say, out = options.teller(console), asked.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    base, failed = asked.run_settings, dict[str, str]()
    settings = {strategy: base.with_strategy(strategy).absolute() for strategy in asked.strategies}
    with waiting(console, "reading the text"):
        for strategy, run in settings.items():  # all, before any trains
            model, run, lines = check_and_weigh(run)
            settings[strategy] = run
            check_capacity(run, model, run.placement.replicas, out, console)
            begun = next(iter(sorted(out.glob(f"{_folder_of(strategy)}-seed-*/run.toml"))), None)
            settings[strategy], chosen = choose_defaults(run, model, Run.load(begun) if begun else None)
            for line in [*lines, *chosen]:
                say(f"{strategy}: {line}")
    out.mkdir(parents=True, exist_ok=True)
    folders: dict[str, list[Path]] = {strategy: [] for strategy in settings}
    stop = launch.Stop()
    stop.heed()  # the results of the runs before are shown
    with launch.stopping(stop):
        for seed in range(asked.run_settings.seed, asked.run_settings.seed + asked.seeds):
            for strategy, run in settings.items():
                folder = out / f"{_folder_of(strategy)}-seed-{seed}"
                try:
                    with suppress(KeyboardInterrupt):  # the second signal; the results so far are shown
                        train_to_the_end(run.changed(seed=seed), folder, console, stop)
                    folders[strategy].append(folder)
                except (ThinwireError, OSError) as error:
                    failed.setdefault(strategy, str(error))
                    console.print(f"{folder} failed: {error}", soft_wrap=True, highlight=False, markup=False)
                except Exception as error:  # a bug in the program; the other strategies still run
                    failed.setdefault(strategy, f"{type(error).__name__}: {error}")
                    traceback.print_exc()
        rows = _told(folders, failed, out, console, asked)
    whole = sum(row["seeds"] for row in rows if row["status"] == "finished") == len(folders) * asked.seeds
    if stop.is_set() and not whole:
        return stop.exit_code
    codes = {exit_code_of(row["status"]) for row in rows}
    return 1 if failed or 1 in codes else max(codes, default=0)


def _told(
    folders: dict[str, list[Path]], failed: dict[str, str], out: Path, console: Console, asked: Options
) -> list[dict[str, Any]]:
    """Show the table, and write the page and the JSON, of the runs that have begun. Returns the table's rows."""
    begun = {strategy: [record for folder in its if (record := _record(folder))] for strategy, its in folders.items()}
    rows = [_row(strategy, records) for strategy, records in begun.items() if records]
    left = [strategy for strategy, records in begun.items() if not records and strategy not in failed]
    failures = [{"strategy": strategy, "failed": why} for strategy, why in failed.items()]
    first = [records[0] for records in begun.values() if records]
    page = write_report(first, out / "report.html") if first else None
    (out / COMPARISON).write_text(json.dumps(for_json(rows + failures), indent=1) + "\n")
    console.print(_table(rows, failed))
    if told := without_result([record for records in begun.values() for record in records]):
        options.advise(f"thinwire compare: {told}")
    if left:
        console.print(f"not begun: {', '.join(left)}", soft_wrap=True, highlight=False)
    if page:
        which = " (the first seed of each strategy)" if asked.seeds > 1 else ""
        console.print(f"report: {page}{which}", soft_wrap=True, highlight=False)
    if asked.json:
        print(json.dumps({"strategies": for_json(rows + failures), "not_begun": left, "report": page and str(page)}))
    return rows


def _folder_of(strategy: str) -> str:
    """The name of the folder of a strategy's runs."""
    return re.sub(r"[^a-zA-Z0-9_.]+", "-", strategy).strip("-")


def _record(folder: Path) -> RunRecord | None:
    """The record of a run; None if it was stopped before it began."""
    try:
        return RunRecord.load(folder)
    except DataError:
        return None


def _row(strategy: str, records: list[RunRecord]) -> dict[str, Any]:
    """One strategy over its seeds: the mean, and for the loss the standard deviation if there are several."""
    summaries = [record.summary for record in records]
    losses = [s.eval_loss for s in summaries if s.eval_loss is not None]
    if len(losses) < len(summaries):  # one was stopped before it evaluated
        losses = []

    def mean(name: str) -> float:
        return statistics.fmean(getattr(summary, name) for summary in summaries)

    return {
        "strategy": strategy,
        "seeds": len(records),
        "eval_loss": statistics.fmean(losses) if losses else None,
        "eval_loss_spread": statistics.stdev(losses) if len(losses) > 1 and math.isfinite(sum(losses)) else None,
        "eval_losses": losses,
        "losses": {name: statistics.fmean(s.losses[name] for s in summaries) for name in _named(summaries)},
        **{
            name: mean(name)
            for name in ("wire_bytes_sent", "bits_per_parameter_per_step", "compute_utilization", "wall_seconds")
        },
        "provenance": summaries[0].provenance,
        "status": min((record.status for record in records), key=lambda told: (not useless(told), told == "finished")),
        "steps": min(summary.steps for summary in summaries),
    }


def _named(summaries: Sequence[Summary]) -> list[str]:
    """The names of the losses in all evaluations, if there are several."""
    first = summaries[0].losses
    return [name for name in first if all(name in s.losses for s in summaries)] if len(first) > 1 else []


def _led(rows: list[dict[str, Any]], named: list[str]) -> bool:
    """Whether the first of `named` is the evaluation loss of all rows: so of a job's losses, and not of those of unlike models."""
    evaluated = [row for row in rows if row["eval_loss"] is not None]
    return bool(named) and all(
        list(row["losses"])[:1] == named[:1] and text_of_loss(row["losses"][named[0]]) == text_of_loss(row["eval_loss"])
        for row in evaluated
    )


def _table(rows: list[dict[str, Any]], failed: Iterable[str]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    heads = (
        "evaluation loss",
        "sent per replica",
        "bits per parameter and step",
        "compute utilization",
        "training loop",
    )
    table.add_column("strategy", overflow="fold", min_width=16)
    named = list(dict.fromkeys(name for row in rows for name in row["losses"]))
    first = named if _led(rows, named) else [heads[0], *named]
    for head in (*first, *heads[1:]):
        table.add_column(head, justify="right")
    table.add_column("numbers are")
    for row in rows:
        mean, spread = row["eval_loss"], row["eval_loss_spread"]
        told = "" if spread is None else f" ± {spread:.4f}" if abs(mean) >= 0.01 else f" ± {text_of_loss(spread)}"
        table.add_row(
            Text(
                row["strategy"]
                + (f" ({row['status'].split(':')[0]} at step {row['steps']})" if row["status"] != "finished" else ""),
                style="red" if useless(row["status"]) else "",
            ),
            f"{text_of_loss(mean)}{told}",
            *(text_of_loss(row["losses"].get(name)) for name in first[1:]),
            text_of_nbytes(row["wire_bytes_sent"]),
            text_of_bits(row["bits_per_parameter_per_step"]),
            text_of_share(row["compute_utilization"]),
            text_of_seconds(row["wall_seconds"]),
            row["provenance"],
        )
    for strategy in failed:
        table.add_row(Text(strategy), Text("failed", style="red"))
    seeds = [row["seeds"] for row in rows]
    if max(seeds, default=0) > 1:
        each = ", ".join(f"{row['seeds']} of {row['strategy']}" for row in rows)
        over = f"{seeds[0]} seeds" if len(set(seeds)) == 1 else f"the seeds of each: {each}"
        table.caption = escape(f"loss: mean ± standard deviation over {over}")
    return table
