"""`thinwire join`: train as one replica of a run that meets at a hub."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from thinwire.app.cli import options
from thinwire.app.cli.capacity import check_capacity
from thinwire.app.cli.token import token_of
from thinwire.app.cli.training import finish, resume_command, saying_how_to_resume, train
from thinwire.app.records.printable import printable, quoted
from thinwire.app.report.progress import Progress
from thinwire.app.report.terminal import waiting
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.job import check_and_weigh
from thinwire.app.trainer.meeting import AtHub
from thinwire.app.trainer.resuming import check_resume
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.secure import join_for, run_of_hub, train_member
from thinwire.app.trainer.supervisor import JoiningReplica
from thinwire.app.trainer.watch import watching
from thinwire.errors import ConfigurationError
from thinwire.net import SecureGroup, Token, admit
from thinwire.net.keys import check_name, private_folder, write_private
from thinwire.net.link import CONNECTED

A_DAY = 86_400.0


@dataclass(frozen=True)
class Options:
    """The options of `thinwire join`."""

    token: tyro.conf.Positional[str]
    """The join token that thinwire hub printed; or @FILE, a file that holds it, or -, to read it from standard input. Other users of this
    machine can see a token that is an argument."""
    run: tyro.conf.Positional[Path | None] = None
    """A run file; the same settings are needed on every replica. Default: with --resume the run folder's, otherwise the hub's."""
    name: str = tyro.MISSING
    """This replica's own name: small letters, digits and hyphens. The order of the names is the order of the replicas."""
    out: Path | None = None
    """The run folder. Default: runs/NAME."""
    resume: bool = False
    """Resume from the newest checkpoint that all replicas have, or begin if --out has no run: one command for both."""
    keys: Path = Path(".thinwire")
    """The folder that keeps this replica's key and its certificate."""
    group: str = ""
    """Replicas with the same word train together; needed if several runs use one hub. At a hub of elastic runs it is the
    name of the run, which thinwire hub list shows. Default: the hub's run without a name."""
    publish: bool = False
    """Publish each version of the agreed weights into the run folder and, if the hub's owner names this replica, to the hub, for thinwire
    follow."""
    timeout: float | None = None
    """Seconds to wait until all replicas have joined; in an elastic run, until its first round. Default: a day; in an elastic run, its own
    timeout."""
    trust: bool = False
    """Run the code that the run file names, with which you have not trained on this machine before. Read it first."""
    json: bool = False
    """Progress goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.ask(
        Options,
        "thinwire join",
        arguments,
        "Dial the hub of TOKEN and train as one replica. It opens no port.",
    )
    console, stop = options.console(asked.json), launch.Stop()
    folder = asked.out or Path("runs") / asked.name
    kept = folder / "run.toml" if asked.resume else None
    path = asked.run or (kept if kept and kept.exists() else None)
    own = None if path is None else Run.load(path)  # before the token is used
    asked = dataclasses.replace(asked, token=token_of(asked.token))
    console.print(f"dialling {Token.read(asked.token).where}", soft_wrap=True, highlight=False)
    told = admit(asked.token, asked.name, asked.keys)
    if told.elastic and asked.group:
        check_name(asked.group)
    console.print(f"the hub has admitted {asked.name}", highlight=False)
    carrier = "secure-elastic" if told.elastic else "secure"
    run = (own.changed(carrier=carrier) if own else _of_hub(asked, told.run, told.elastic)).absolute()
    if asked.publish:
        run = run.changed(publish=True)
    if asked.timeout is not None and told.elastic:
        run = run.changed(timeout=asked.timeout)
    begun = asked.resume and run_folder.begun(folder)
    if begun:
        check_resume(run, folder)
    with waiting(console, "looking at data and model"):
        model, run, lines = check_and_weigh(run, folder if begun else None, begun)
        check_capacity(run, model, 1, folder, console)
        del model
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    with run_folder.claimed(folder, begun):
        run_folder.check_folder(run, folder, begun, asked.name if told.elastic else "*")
        console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
        group = None if told.elastic else _joined(asked, run, console)  # a signal ends the wait at once
        more, verb = repeated(asked)
        with launch.stopping(stop):
            with saying_how_to_resume(folder, resume_command(folder, verb, more)):
                if group is None:
                    _train_elastic(asked, run, folder, console, stop)
                else:
                    _train(asked, run, folder, group, console, stop)
            return finish(folder, console, asked.json, stop, more, verb)


def repeated(asked: Options) -> tuple[str, str]:
    """The options and the verb that join the same run again."""
    given = {"keys": asked.keys, "group": asked.group}
    more = "".join(f" --{option} {quoted(str(value))}" for option, value in given.items() if value)
    more += " --publish" if asked.publish else ""
    return f" --name {asked.name}{more}", f"join TOKEN{f' {quoted(asked.run)}' if asked.run else ''}"


def _of_hub(asked: Options, told: str, elastic: bool) -> Run:
    if not told:
        raise ConfigurationError("the hub keeps no run file; give one: thinwire join TOKEN run.toml --name NAME.")
    path = private_folder(asked.keys / asked.name) / "run.toml"
    write_private(path, told.encode())
    return run_of_hub(path, elastic)


def _train_elastic(asked: Options, run: Run, folder: Path, console: Console, stop: launch.Stop) -> None:
    run_folder.new_folder(run, folder, asked.resume and run_folder.begun(folder), asked.name)
    token = private_folder(asked.keys / asked.name) / "token"
    write_private(token, f"{asked.token}\n".encode())
    place = AtHub(token, asked.keys, asked.group)
    train(run, folder, asked.resume, console, stop, JoiningReplica(place, asked.name))


def _joined(asked: Options, run: Run, console: Console) -> SecureGroup:
    reducing = f"--reduce {run.placement.replicas}{f' --group {asked.group}' * bool(asked.group)}"
    more = f" and the reducer of a hub with {reducing}" if run.needs_hub else ""
    console.print(f"waiting until all {run.placement.replicas} replicas{more} have joined", highlight=False)
    seconds = A_DAY if asked.timeout is None else asked.timeout

    def say(state: str) -> None:
        console.print(printable(f"{asked.name} {state}"), soft_wrap=True, highlight=False, markup=False)

    group = join_for(run, asked.token, asked.name, asked.keys, asked.group, seconds, say)
    named = f"replica {group.rank} of {run.placement.replicas}: {', '.join(group.names)}"
    console.print(named, soft_wrap=True, highlight=False)
    return group


def _train(asked: Options, run: Run, folder: Path, group: SecureGroup, console: Console, stop: launch.Stop) -> None:
    """Raises `ConfigurationError` if the folder belongs to another replica."""
    with group:
        held = sorted(path.stem for path in folder.glob("events/*.jsonl"))
        if asked.resume and held and f"replica-{group.rank}" not in held:
            raise ConfigurationError(
                f"{folder} is the folder of {', '.join(held)}, and {asked.name} is replica-{group.rank} of {', '.join(group.names)}; give the "
                "--out and the --name of one replica, and have the same names meet as before."
            )
        run_folder.new_folder(run, folder, asked.resume and run_folder.begun(folder))
        with Progress(folder, run.optimizer.steps, [f"replica-{group.rank}"], console) as progress:
            progress.pass_over()
            look = outages(group, asked.name, progress.say)
            with watching(progress.update, 0.2, "thinwire-progress"), watching(look, 0.2, "thinwire-hub"):
                train_member(run, folder, group, asked.resume, stop)
            progress.update()


def outages(group: SecureGroup, name: str, say: Callable[[str], object]) -> Callable[[], None]:
    """A function that says which members have been without the hub for ten of its calls in a row, `name` first, and when they are back."""
    away = Counter[str]()

    def look() -> None:
        state = group.state
        others = [one for one in group.names if one not in group.here and one not in group.gone]
        if state == CONNECTED:
            lost = dict.fromkeys(others, "is not connected to the hub; after a minute it counts as lost")
        else:  # then it does not know of the others
            lost = {name: f"{state}; it dials again"}
        for one, what in lost.items():
            away[one] += 1
            if away[one] == 10:
                say(f"{one} {what}")
        for one in [one for one in away if one not in lost and state == CONNECTED]:
            if away.pop(one) >= 10 and one not in group.gone:
                say(f"{one} {CONNECTED} again")

    return look
