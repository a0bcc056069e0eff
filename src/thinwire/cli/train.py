"""`thinwire train`: one model on several replicas. Other verbs that train use its functions, too."""

from __future__ import annotations

import dataclasses
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from thinwire.cli import doctor, options
from thinwire.cli.pages import write_report
from thinwire.comm import parse_link
from thinwire.errors import ConfigurationError, DataError
from thinwire.lm import launch, run_folder
from thinwire.lm.job import check_and_weigh
from thinwire.lm.meeting import PATHS, AtLighthouse
from thinwire.lm.resize import resize
from thinwire.lm.resuming import cannot_resume, check_resume, complete
from thinwire.lm.run import Run
from thinwire.lm.settings import NAMED, recipe_name
from thinwire.lm.supervisor import JoiningReplica, train_elastic
from thinwire.lm.watch import watching
from thinwire.membership.view import Presence
from thinwire.records.files import write_whole
from thinwire.records.losses import NO_RESULT, for_json
from thinwire.records.membership import explained_steps
from thinwire.records.printable import quoted, reason
from thinwire.records.run_record import RunRecord, text_of_privacy
from thinwire.report.progress import Progress, final_table
from thinwire.report.terminal import waiting
from thinwire.report.trackers.follow import following
from thinwire.report.trackers.sinks import named

DEMO = Run.of(link="5mbit,30ms")
FEW_STEPS, UNEQUAL = 10, 1.5  # no advice about speeds with fewer steps, or a smaller factor
USELESS = 10.0  # a machine so many times as slow has brought nothing: docs/methods/decoupled_diloco.md
WEIGH = ("streaming_sign", "streaming_diloco", "diloco", "local_sgd", "data_parallel", "decoupled_diloco")


@dataclass(frozen=True)
class Options:
    """The options of `thinwire train`."""

    MOST_USED: ClassVar[tuple[str, ...]] = ("out", "resume")

    run_settings: Run
    """The settings of the run; the folder's run.toml keeps all of them."""
    out: Path | None = None
    """The run folder. Default: runs/STRATEGY-DATE-TIME."""
    resume: bool = False
    """Resume the run in --out from the newest checkpoint that all replicas have."""
    from_start: bool = False
    """With --resume: begin again at the first step; the present checkpoints are moved to checkpoints-1."""
    run: Path | None = None
    """A run file with settings; options on the command line replace them. Default: the defaults of the options below."""
    elastic: bool = False
    """Start an elastic run with all replicas on this machine (--carrier elastic): replicas may die, return and join late."""
    lighthouse: str | None = None
    """Start one replica of an elastic run on several machines, whose `thinwire lighthouse` listens at HOST:PORT. Default: all replicas start on
    this machine."""
    name: str | None = None
    """Needed with --lighthouse: this replica's own name; keep it when the replica returns. replica-0 to replica-N each read one share of the text."""
    secret: Path | None = None
    """With --lighthouse: the file with the run secret that `thinwire lighthouse --secret FILE` wrote. --elastic without it makes its own."""
    log: str | None = None
    """Send the metrics of the run to trackers: some of wandb,mlflow,tensorboard,prometheus,jsonl (thinwire docs metrics). Default: to none."""
    json: bool = False
    """Progress goes to stderr; stdout ends with one JSON object."""

    def elastically(self) -> Options:
        """The options with the carrier that --elastic and --lighthouse set."""
        if (self.lighthouse is None) != (self.name is None):
            given, needed = ("--lighthouse", "--name") if self.name is None else ("--name", "--lighthouse")
            raise ConfigurationError(
                f"{given} without {needed}: to join a run on another machine, give --lighthouse HOST:PORT --name NAME; "
                "to start all replicas here, give --elastic alone."
            )
        if self.secret and self.lighthouse is None:
            raise ConfigurationError("--secret without --lighthouse: a run on one machine makes its own; leave it out.")
        if not (self.elastic or self.lighthouse is not None):
            return self
        if self.run_settings.placement.carrier == "threads":
            given = "--elastic" if self.lighthouse is None else "--lighthouse"
            raise ConfigurationError(f"--carrier threads with {given}: threads die together; choose one of them.")
        secure = self.run_settings.placement.carrier in ("secure", "secure-elastic")
        if secure and self.lighthouse is not None:
            raise ConfigurationError(
                "--lighthouse with --carrier secure: with this carrier replicas on several machines meet at a hub; start it with "
                "thinwire hub --elastic, and each replica with thinwire join."
            )
        carrier = "secure-elastic" if secure else "elastic"
        return dataclasses.replace(self, run_settings=self.run_settings.changed(carrier=carrier))

    @property
    def joining(self) -> JoiningReplica | None:
        if self.lighthouse is None or self.name is None:
            return None
        return JoiningReplica(AtLighthouse(self.lighthouse, self.secret), self.name)


DESCRIPTION = """Train one model on several replicas: a language model, or a job of your own.

thinwire train                          the demo: two processes, an emulated link

thinwire train --text FOLDER            a language model on your own text

thinwire train --job my_job.py          your own model and data (thinwire docs jobs)

thinwire train --elastic --replicas 3   replicas that may die and return, here

Replicas on several machines: thinwire docs machines, elastic or secure."""


def main(arguments: Sequence[str]) -> int:
    place = launch.torchrun_place()
    demo = not arguments and place is None
    if demo:
        asked = Options(run_settings=DEMO)
    else:
        asked = options.read(Options, "train", arguments, DESCRIPTION).elastically()
    run, console = asked.run_settings.absolute(), options.console(asked.json)
    _check(asked, run, place)
    folder = asked.out or Path("runs") / f"{_label(run)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if demo:
        console.print(
            f"The demo: {run.placement.replicas} processes train one model over an emulated link of {run.placement.link}, the same as"
        )
        console.print(f"  thinwire train --link {run.placement.link}", soft_wrap=True, highlight=False)
    sharded = place is not None and place[1] > run.placement.replicas
    here = 0 if sharded else 1 if place or asked.joining else run.placement.replicas
    chosen: list[str] = []
    with waiting(console, "looking at data and model"):
        model, run, weights = check_and_weigh(run, asked.out if asked.resume else None, not asked.from_start)
        doctor.ready(run, model, here, folder, Console(quiet=True) if place and place[0] else console)
        # one process decides, and writes the file that all replicas read
        if not (asked.resume or asked.joining or place):
            run, chosen = doctor.fitted(run, model)
    if place is not None:
        return _as_rank(*place, run, asked, folder, console)
    with run_folder.claimed(folder, asked.resume):
        if asked.resume and not asked.from_start and not asked.joining and other_number(run, folder):
            console.print(resize(run, folder, model), soft_wrap=True, highlight=False)
        del model
        run_folder.new_folder(run, folder, asked.resume, asked.name or "*")
        console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
        for line in [*chosen, *([weights] if weights else [])]:
            console.print(line, soft_wrap=True, highlight=False)
        console.print(f"learning rate: {run.rates}", soft_wrap=True, highlight=False)
        if asked.from_start:
            run_folder.set_aside(folder, asked.name or "*")
        resume, stop = asked.resume and not asked.from_start, launch.Stop()
        with launch.stopping(stop):
            if resume and complete(run, folder):
                trained = RunRecord.load(folder).summary.steps
                told = f"finished already, with {trained} steps; to train longer give more --steps"
                console.print(told, highlight=False)
            else:
                with _told(asked, run, folder, console):
                    train(run, folder, resume, console, stop, asked.joining)
            return finish(folder, console, asked.json, stop, _membership_options(asked))


def _check(asked: Options, run: Run, place: tuple[int, int] | None) -> None:
    """Raise `ConfigurationError` if options contradict each other, or the link's file cannot be read."""
    parse_link(run.placement.link)
    if run.placement.elastic:
        if place is not None:
            raise ConfigurationError(
                f"carrier={run.placement.carrier!r} under torchrun, which starts a fixed group; start it with thinwire train alone."
            )
        if asked.joining:
            Presence(asked.joining.name, "", 0)  # raises an error for an invalid name, address or secret
            asked.joining.meeting.member(run, asked.joining.name)
    if run.placement.carrier == "secure" and place is not None:
        raise ConfigurationError(
            "carrier='secure' under torchrun, which joins the replicas itself; start it with thinwire train or thinwire join."
        )
    named(asked.log)
    if asked.resume and asked.out is None:
        raise ConfigurationError("--resume: the folder of the run to resume is needed; add --out FOLDER.")
    if asked.from_start and not asked.resume:
        raise ConfigurationError(
            "--from-start without --resume: a new run begins at the first step anyway; leave it out."
        )
    if asked.out and asked.resume and not asked.from_start:
        check_resume(run, asked.out)


def other_number(run: Run, folder: Path) -> bool:
    """Whether the run in `folder` has another number of replicas."""
    begun = folder / "run.toml"
    return begun.exists() and Run.load(begun).placement.replicas != run.placement.replicas


def train(
    run: Run, folder: Path, resume: bool, console: Console, stop: launch.Stop, joining: JoiningReplica | None = None
) -> None:
    """Train with live progress on `console`, until `stop`."""
    with Progress(
        folder, run.optimizer.steps, [joining.name] if joining else run.placement.replicas, console
    ) as progress:
        progress.pass_over()
        if run.placement.elastic:
            train_elastic(run, folder, resume, progress.update, progress.say, joining, stop)
        elif run.placement.carrier == "threads":
            launch.train_threads(run, folder, resume, progress.update, stop)
        elif run.placement.carrier == "secure":
            from thinwire.lm.secure import train_secure  # it needs the extra `secure`

            train_secure(run, folder, resume, progress.update, stop)
        else:
            launch.train_processes(run, folder, resume, progress.update, stop)


def _as_rank(rank: int, world: int, run: Run, asked: Options, folder: Path, console: Console) -> int:
    """Train as one rank under torchrun; rank 0 writes, shows and reports."""
    if asked.out is None:
        raise ConfigurationError("under torchrun all ranks need one name for the run folder; add --out FOLDER.")
    shards = max(1, world // run.placement.replicas)
    own = f"replica-{rank // shards}" + (f".shard-{rank % shards}" if shards > 1 else "")
    run_folder.new_folder(run, folder, asked.resume, own)
    if asked.from_start:
        run_folder.set_aside(folder, own)
    resume, stop = asked.resume and not asked.from_start, launch.Stop()
    if rank != 0:
        return stop.exit_code if launch.train_as_rank(run, folder, resume, stop)["stopped"] else 0
    with launch.stopping(stop):
        with (
            _told(asked, run, folder, console),
            Progress(folder, run.optimizer.steps, 1, console, sharded=shards > 1) as progress,
        ):
            progress.pass_over()
            with watching(progress.update, 0.2, "thinwire-progress"):
                launch.train_as_rank(run, folder, resume, stop)
        return finish(folder, console, asked.json, stop)


def train_to_the_end(run: Run, folder: Path, console: Console, stop: launch.Stop) -> None:
    """Train, unless `folder` has this run complete or `stop` is set. An interrupted run resumes from its checkpoint."""
    begun = (folder / "events").exists()
    if begun and Run.load(folder / "run.toml").absolute() != run:
        raise ConfigurationError(
            f"{folder} holds a run with other settings; choose another --out, or the same settings."
        )
    if complete(run, folder):
        console.print(f"{folder}: complete", soft_wrap=True, highlight=False)
        return
    if stop.is_set():
        return
    console.print(f"{folder}", soft_wrap=True, highlight=False)
    run_folder.new_folder(run, folder, resume=begun)
    if cannot_resume(run):
        run_folder.set_aside(folder)
    train(run, folder, any(folder.glob("checkpoints/*/step-*")), console, stop)


@contextmanager
def _told(asked: Options, run: Run, folder: Path, console: Console) -> Iterator[None]:
    """A context in which a thread sends new metrics to the trackers of --log, about once a second."""
    with following(asked.log, folder, run.settings(), options.teller(console)) as follower:
        if follower is None:
            yield
            return
        follower.pass_over()
        with watching(follower.update, 1.0, "thinwire-log"):
            yield


def _membership_options(asked: Options) -> str:
    """The options of a replica whose lighthouse is on another machine."""
    if asked.joining is None:
        return ""
    held = f" --secret {quoted(asked.secret)}" if asked.secret else ""
    return f" --lighthouse {asked.lighthouse} --name {asked.name}{held}"


def finish(
    folder: Path, console: Console, as_json: bool, stop: launch.Stop, options: str = "", verb: str = "train"
) -> int:
    """The summary as a table, a file and a page; returns the exit code. `verb` and `options` resume a run that was stopped."""
    try:
        record = RunRecord.load(folder)
    except DataError:
        if stop.is_set():  # before training began
            raise KeyboardInterrupt(stop.number) from None
        raise
    summary = summary_of(record)
    write_whole(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    console.print(final_table(record))
    if told := explained_steps(record.steps):
        console.print(told, soft_wrap=True, highlight=False)
    if skipped := sum(replica.skipped for replica in record.replicas):
        console.print(
            f"warning: {skipped} steps of all replicas changed no weights, because their gradients were not finite"
        )
    if told := text_of_privacy(record.privacy):
        console.print(f"{told} (predicted)", highlight=False)
    try:
        drawn = f"report: {write_report([record], folder / 'report.html')}"
    except DataError as error:  # the run is complete without it
        drawn = f"no report: {reason(error)}"
    console.print(drawn, soft_wrap=True, highlight=False)
    if paths := summary.get("paths"):
        console.print(paths, soft_wrap=True, highlight=False)
    if told := of_stalls(record, folder):
        console.print(told, soft_wrap=True, highlight=False)
    if told := of_speeds(record):
        console.print(told, soft_wrap=True, highlight=False)
    stopped = record.status.startswith("stopped")
    if stopped:
        again = f"thinwire {verb} --resume --out {quoted(folder)}{options}"
        if launch.torchrun_place() is not None:
            again = "the same torchrun command on each machine, with --resume"
        why = cannot_resume(Run.load(folder / "run.toml"))
        console.print(why or f"to resume: {again}", soft_wrap=True, highlight=False)
    if as_json:
        print(json.dumps(summary))
    if told := without_result([record]):
        print(f"thinwire {verb.split()[0]}: {told}", file=sys.stderr)
        return 1
    return stop.exit_code if stopped or (stop.is_set() and record.status != "finished") else 0


def without_result(records: Sequence[RunRecord]) -> str:
    """What is wrong with finished runs of one model whose evaluation loss is not finite, and what to do; empty for none."""
    lost = {str(record.folder): record for record in records if record.status.startswith(NO_RESULT)}
    if not lost:
        return ""
    each = "; ".join(f"{folder}: {record.status.removeprefix(f'{NO_RESULT}: ')}" for folder, record in lost.items())
    look = "evaluate(model), the data and the loss" if records[0].settings.get("job") else "the data"
    return f"{each}, so there is no model that can be used. Check {look}, or train with a lower --lr."


def of_stalls(record: RunRecord, folder: Path) -> str:
    """Advice for a run that waited for rounds for over a tenth of its time; empty for others."""
    share = record.summary.stall_seconds / record.summary.wall_seconds if record.summary.wall_seconds else 0.0
    if not share > 0.1:
        return ""
    told = f"replicas waited for rounds for {share:.0%} of the time ({record.summary.provenance})"
    name, text, _ = str(record.settings.get("strategy")).partition("(")
    recipe = NAMED.get(recipe_name(name))
    if recipe is not None and "delay" not in inspect.signature(recipe).parameters:
        return told
    what = "delay" if text else "--delay"  # what is written as text has its delay in the parentheses
    link = "" if record.bits_per_second else " --link RATE,DELAY (of your link)"
    return f"{told}; thinwire doctor {quoted(folder / 'run.toml')}{link} shows the {what} without waits"


def of_speeds(record: RunRecord) -> str:
    """Advice for a fixed group with machines of unequal speed and equal batches; empty for others."""
    asked, replicas = record.settings, record.replicas
    batch, name = asked.get("batch"), recipe_name(str(asked.get("strategy")).partition("(")[0])
    if (
        name not in WEIGH
        or "elastic" in str(asked.get("carrier"))
        or asked.get("job")
        or len(replicas) != asked.get("replicas")
    ):
        return ""
    if not isinstance(batch, int) or batch < 2 or min(len(one.compute_seconds) for one in replicas) < FEW_STEPS:
        return ""
    seconds = [statistics.median(one.compute_seconds.tolist()) for one in replicas]
    slow = [one / max(min(seconds), 1e-9) for one in seconds]
    slowest = slow.index(max(slow))
    told = f"{replicas[slowest].name}'s steps took {slow[slowest]:.1f} times as long as the fastest ones"
    if slow[slowest] >= USELESS:
        follow = "" if name in ("data_parallel", "decoupled_diloco") else ", or let it follow (thinwire follow)"
        return f"{told}; so slow a machine costs a run more than it brings: leave it out{follow}"
    if not UNEQUAL <= slow[slowest] <= 1.25 * batch:  # a batch of one sequence would still be late
        return ""
    several = " ".join(str(max(1, round(batch / one))) for one in slow)
    return f"{told}; with --batch {several} all would take about equally long"


def summary_of(record: RunRecord) -> dict[str, Any]:
    """A run's numbers for JSON, which has no NaN."""
    fields = dataclasses.asdict(record.summary) | {"folder": str(record.folder), "status": record.status}
    fields |= {"score": record.score().facts()}
    fields |= {"privacy": record.privacy} if record.privacy else {}
    fields |= {"made_of": record.made_of} if record.made_of else {}
    paths = record.folder / PATHS
    fields |= {"paths": paths.read_text().strip()} if paths.exists() else {}
    fields |= {
        "ledgers": {replica.name: replica.end["summary"].get("ledger") for replica in record.replicas if replica.end}
    }
    return {name: for_json(value) for name, value in fields.items()}


def _label(run: Run) -> str:
    name = run.method.strategy.strip().split("(")[0].replace("-", "_")
    return name if name.isidentifier() else "run"
