"""`thinwire report`: one page for one or more runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from thinwire.app.cli import options
from thinwire.app.cli.pages import COMPARISON, write_report
from thinwire.app.cli.summary import summary_of
from thinwire.app.records.run_record import RunRecord, best_loss
from thinwire.app.report.diagnosis import delay_table, diagnose
from thinwire.app.report.progress import compare_table
from thinwire.app.report.terminal import reading
from thinwire.app.report.trackers import SINKS, following, parse_sinks
from thinwire.errors import ConfigurationError
from thinwire.files import check_place


@dataclass(frozen=True)
class Options:
    """The options of `thinwire report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or the folder of a comparison, which stands for all its runs. Several are drawn side by side."""
    diagnose: bool = False
    """Name the replica or link that hangs or is slow in one run. Writes no page. Works during the run, too."""
    out: Path | None = None
    """The page. Default: report.html in the run's folder; of several, comparison.html in the first one's."""
    log: str | None = None
    """Also send each run's metrics to trackers: some of wandb,mlflow,tensorboard,jsonl (thinwire docs metrics). Default: to none."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "report", arguments, "Draw one self-contained page for one or more runs.")
    if not asked.runs:
        raise ConfigurationError("no run folder was given; write thinwire report runs/NAME, with as many as you like.")
    console = options.console(asked.json)
    if live := [name for name in parse_sinks(asked.log) if SINKS[name].live]:
        raise ConfigurationError(f"log={asked.log!r}: {live[0]} reads metrics during a run; give it to thinwire train.")
    if asked.diagnose:
        return _diagnose(asked, console)
    folders = [one for folder in asked.runs for one in _runs_of(folder)]
    name = "report.html" if len(asked.runs) == 1 else "comparison.html"  # a run keeps its own page
    out = asked.out or asked.runs[0] / name
    if asked.out or asked.runs[0].is_dir():
        check_place(out)  # before logs of weeks are read
    with reading(console, folders):
        records = [RunRecord.load(folder) for folder in folders]
        page = write_report(records, out)
    console.print(compare_table(records, console.width))
    for record in records if asked.log else ():
        with following(asked.log, record.folder, record.settings, options.teller(console)) as follower:
            if follower:  # the run has ended, so all is sent at once
                follower.start_over()
    console.print(f"report: {page}", soft_wrap=True, highlight=False)
    if asked.json:
        best = best_loss(records)
        runs = [summary_of(record) | {"score": record.score(best).facts()} for record in records]
        print(json.dumps({"report": str(page), "runs": runs}))
    return 0


def _runs_of(folder: Path) -> list[Path]:
    """The run folders of a comparison; any other folder is a run itself."""
    if not (folder / COMPARISON).exists():
        return [folder]
    return sorted(events.parent for events in folder.glob("*/events") if any(events.glob("*.jsonl"))) or [folder]


def _diagnose(asked: Options, console: Console) -> int:
    if len(asked.runs) > 1:
        raise ConfigurationError(f"--diagnose with {len(asked.runs)} runs: one is needed; diagnose them one by one.")
    with reading(console, asked.runs):
        diagnosis = diagnose(RunRecord.load(asked.runs[0]))
    if diagnosis.ways:
        console.print(delay_table(diagnosis))
        console.print()
    for line in diagnosis.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return options.answer(asked.json, diagnosis.facts())
