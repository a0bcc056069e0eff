"""`thinwire train`: one model on several replicas."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from thinwire.app.cli import options
from thinwire.app.cli.capacity import check_capacity, choose_defaults
from thinwire.app.cli.training import finish, resume_command, saying_how_to_resume, train, watched
from thinwire.app.records.printable import quoted
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.progress import Progress
from thinwire.app.report.terminal import waiting
from thinwire.app.report.trackers import following, parse_sinks
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.job import check_and_weigh
from thinwire.app.trainer.meeting import AtLighthouse
from thinwire.app.trainer.resize import resize
from thinwire.app.trainer.resuming import check_resume, complete
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.supervisor import JoiningReplica
from thinwire.app.trainer.watch import watching
from thinwire.comm import parse_link
from thinwire.errors import ConfigurationError
from thinwire.membership.view import Presence


@dataclass(frozen=True)
class Options:
    """The options of `thinwire train`."""

    MOST_USED: ClassVar[tuple[str, ...]] = ("out", "resume")

    run_settings: Run
    """The settings of the run; the folder's run.toml keeps all of them."""
    out: Path | None = None
    """The run folder. Default: runs/STRATEGY-DATE-TIME."""
    resume: bool = False
    """Resume the run in --out from the newest checkpoint that all replicas have, or begin it if --out has none: one command for both."""
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
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
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
        asked = Options(run_settings=Run.of(link="5mbit,30ms"))
    else:
        asked = options.read(Options, "train", arguments, DESCRIPTION).elastically()
    run, console = asked.run_settings.absolute(), options.console(asked.json)
    say = options.teller(console)
    if place and asked.out and launch.began_here(place[0], asked.out):
        asked = dataclasses.replace(asked, resume=True)
    _check(asked, run, place)
    folder = asked.out or Path("runs") / f"{_label(run)}-{time.strftime('%Y%m%d-%H%M%S')}"
    if demo:
        say(
            f"The demo: {run.placement.replicas} processes train one model over an emulated link of {run.placement.link}, the same as"
        )
        say(f"  thinwire train --link {run.placement.link}")
    sharded = place is not None and place[1] > run.placement.replicas
    here = 0 if sharded else 1 if place or asked.joining else run.placement.replicas
    chosen: list[str] = []
    begun = asked.resume and run_folder.begun(folder)
    with waiting(console, "looking at data and model"):
        model, run, lines = check_and_weigh(run, folder if begun else None, not asked.from_start)
        check_capacity(run, model, here, folder, Console(quiet=True) if place and place[0] else console)
        # one process decides, and writes the file that all replicas read
        if not (asked.joining or place):
            run, chosen = choose_defaults(run, model, Run.load(folder / "run.toml") if begun else None)
    if place is not None:
        return _as_rank(*place, run, asked, folder, console, lines)
    with run_folder.claimed(folder, begun):
        ended = begun and asked.resume and not asked.from_start and complete(run, folder)
        resized = begun and not asked.from_start and not asked.joining and other_number(run, folder)
        asked_for = run.placement.replicas
        if resized and ended:
            run = run.changed(replicas=Run.load(folder / "run.toml").placement.replicas)
        elif resized:
            say(resize(run, folder, model))
        del model
        run_folder.new_folder(run, folder, begun, asked.name or "*")
        say(f"run folder: {folder}")
        for line in [*chosen, *lines]:
            say(line)
        if asked.from_start:
            run_folder.set_aside(folder, asked.name or "*")
        resume, stop = asked.resume and not asked.from_start, launch.Stop()
        with launch.stopping(stop):
            if ended:
                trained = RunRecord.load(folder).summary.steps
                without = f", and --replicas {asked_for} has no effect" if resized else ""
                say(f"finished already, with {trained} steps{without}; to train longer give more --steps")
            else:
                command = resume_command(folder, options=_membership_options(asked))
                with _told(asked, run, folder, console), saying_how_to_resume(folder, command):
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
    parse_sinks(asked.log)
    if asked.resume and asked.out is None:
        raise ConfigurationError("--resume: the folder of the run to resume is needed; add --out FOLDER.")
    if asked.from_start and not asked.resume:
        raise ConfigurationError(
            "--from-start without --resume: a new run begins at the first step anyway; leave it out."
        )
    if place is not None:
        launch.check_world(place[1], run.placement.replicas)
    if asked.out and asked.resume and not asked.from_start and run_folder.begun(asked.out):
        check_resume(run, asked.out)


def other_number(run: Run, folder: Path) -> bool:
    """Whether the run in `folder` has another number of replicas."""
    begun = folder / "run.toml"
    return begun.exists() and Run.load(begun).placement.replicas != run.placement.replicas


def _as_rank(
    rank: int, world: int, run: Run, asked: Options, folder: Path, console: Console, lines: Sequence[str]
) -> int:
    """Train as one rank under torchrun; rank 0 writes, shows and reports."""
    if asked.out is None:
        raise ConfigurationError("under torchrun all ranks need one name for the run folder; add --out FOLDER.")
    shards = max(1, world // run.placement.replicas)
    own = f"replica-{rank // shards}" + (f".shard-{rank % shards}" if shards > 1 else "")
    run_folder.new_folder(run, folder, asked.resume and run_folder.begun(folder), own)
    launch.began_here(rank, folder, now=True)
    if asked.from_start:
        run_folder.set_aside(folder, own)
    # A batch system signals all processes of a job, and torchrun its ranks again.
    resume, stop = asked.resume and not asked.from_start, launch.Stop(launched=True)
    if rank != 0:
        return stop.exit_code if launch.train_as_rank(run, folder, resume, stop)["stopped"] else 0
    for line in lines:
        options.teller(console)(line)
    with launch.stopping(stop):
        with (
            _told(asked, run, folder, console),
            Progress(folder, run.optimizer.steps, 1, console, sharded=shards > 1) as progress,
        ):
            progress.pass_over()
            again = saying_how_to_resume(folder, resume_command(folder))
            with again, watched(folder, progress, stop) as tick, watching(tick, 0.2, "thinwire-progress"):
                launch.train_as_rank(run, folder, resume, stop, progress.say_start)
        return finish(folder, console, asked.json, stop)


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


def _label(run: Run) -> str:
    name = run.method.strategy.strip().split("(")[0].replace("-", "_")
    return name if name.isidentifier() else "run"
