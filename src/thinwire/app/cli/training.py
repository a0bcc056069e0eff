"""Training with live progress, for the verbs that train, and the summary, table and page at its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from thinwire.app import cli
from thinwire.app.cli.options import teller
from thinwire.app.cli.pages import write_report
from thinwire.app.cli.summary import exit_code_of, speed_advice, stall_advice, summary_of, without_result
from thinwire.app.records.participation import explained_steps
from thinwire.app.records.printable import quoted, reason
from thinwire.app.records.run_record import RunRecord, text_of_privacy
from thinwire.app.records.units import text_of_seconds
from thinwire.app.report.progress import Progress, final_table
from thinwire.app.report.terminal import reading
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.final import of_full_disk
from thinwire.app.trainer.resuming import cannot_resume, complete
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.supervisor import JoiningReplica, train_processes
from thinwire.app.trainer.watch import FolderWatch
from thinwire.errors import CheckpointError, ConfigurationError, DataError, LinkError, ThinwireError
from thinwire.files import write_whole


def train(
    run: Run, folder: Path, resume: bool, console: Console, stop: launch.Stop, joining: JoiningReplica | None = None
) -> None:
    """Train with live progress on `console`, until `stop`."""
    with Progress(
        folder, run.optimizer.steps, [joining.name] if joining else run.placement.replicas, console
    ) as progress:
        progress.pass_over()
        with watched(folder, progress, stop) as tick:
            if run.placement.carrier == "threads":
                launch.train_threads(run, folder, resume, tick, stop)
            else:
                train_processes(run, folder, resume, tick, stop, progress.say, joining)


@contextmanager
def watched(folder: Path, progress: Progress, stop: launch.Stop) -> Iterator[Callable[[], None]]:
    """A context with a function that shows progress and looks after the run folder. Raises `CheckpointError` at its end if that was renamed
    or deleted.
    """
    watch = FolderWatch(folder, progress.say, stop)

    def tick() -> None:
        progress.update()
        watch.look()

    try:
        yield tick
    except (ThinwireError, OSError, KeyboardInterrupt):
        if not watch.problem:
            raise
    finally:
        watch.close()
    if watch.problem:
        raise CheckpointError(watch.problem)


def resume_command(folder: Path, verb: str = "train", options: str = "") -> str:
    """The whole command that resumes the run in `folder`, which `verb` started with `options` that its run file does not hold."""
    if launch.torchrun_place() is not None:
        return "the same torchrun command on each machine, with --resume"
    begin = f"resume {quoted(folder)}" if verb == "train" else f"{verb} --resume --out {quoted(folder)}"
    return f"thinwire {begin}{options}"


@contextmanager
def saying_how_to_resume(folder: Path, command: str) -> Iterator[None]:
    """A context in which the error of replicas that were lost, or of a model that could be written nowhere, ends with the `command` that resumes
    the run, if it has a checkpoint."""
    try:
        yield
    except (LinkError, CheckpointError) as error:
        if not (folder / "run.toml").exists():  # it was renamed or deleted meanwhile, and the error says so
            raise
        run = run_folder.run_in(folder)
        over = complete(run, folder) or cannot_resume(run) or of_full_disk(folder)[1]
        over = over or any(end in str(error) for end in ("EndedError", " is revoked", "To resume: "))
        over = over or (isinstance(error, CheckpointError) and "then resume: " not in str(error))
        if any(folder.glob("checkpoints/*/step-*")) and not over:
            error.args = (f"{error}\nTo resume: {command}",)
        raise


def train_to_the_end(run: Run, folder: Path, console: Console, stop: launch.Stop) -> None:
    """Train, unless `folder` has this run complete or `stop` is set. An interrupted run resumes from its checkpoint."""
    begun, say = (folder / "events").exists(), teller(console)
    if begun and Run.load(folder / "run.toml").absolute() != run:
        raise ConfigurationError(
            f"{folder} holds a run with other settings; choose another --out, or the same settings."
        )
    if complete(run, folder):
        say(f"{folder}: complete")
        return
    if stop.is_set():
        return
    say(f"{folder}")
    run_folder.new_folder(run, folder, resume=begun)
    if cannot_resume(run):
        run_folder.set_aside(folder)
    train(run, folder, any(folder.glob("checkpoints/*/step-*")), console, stop)


def finish(
    folder: Path, console: Console, as_json: bool, stop: launch.Stop, options: str = "", verb: str = "train"
) -> int:
    """The summary as a table, a file and a page; returns the exit code. `verb` and `options` resume a run that was stopped."""
    try:
        with reading(console, [folder]):
            record = RunRecord.load(folder)
            record = record.of_command(cli.began(), time.time() - cli.began())
    except DataError:
        if stop.is_set():  # before training began
            raise KeyboardInterrupt(stop.number) from None
        raise
    summary, say = summary_of(record), teller(console)
    write_whole(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    console.print(final_table(record))
    if told := explained_steps(record.steps):
        say(told)
    if skipped := sum(replica.skipped for replica in record.replicas):
        say(f"warning: {skipped} steps of all replicas changed no weights, because their gradients were not finite")
    if told := text_of_privacy(record.privacy):
        say(f"{told} (predicted)")
    try:
        drawing = time.monotonic()
        with reading(console, [folder]):
            drawn = f"report: {write_report([record], folder / 'report.html')}"
        drawn += f" (drawn in {text_of_seconds(time.monotonic() - drawing)})"
    except DataError as error:  # the run is complete without it
        drawn = f"no report: {reason(error)}"
    say(drawn)
    for told in filter(None, (stall_advice(record, folder), speed_advice(record))):
        say(told)
    stopped = record.status.startswith("stopped")
    if stopped:
        why = cannot_resume(Run.load(folder / "run.toml"))
        say(why or f"to resume: {resume_command(folder, verb, options)}")
    if as_json:
        print(json.dumps(summary))
    if told := without_result([record]):
        print(f"thinwire {verb.split()[0]}: {told}", file=sys.stderr)
        return exit_code_of(record.status)
    return stop.exit_code if stopped or (stop.is_set() and record.status != "finished") else 0
