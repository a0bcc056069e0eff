"""`thinwire follow`: the newest agreed weights of a run, as a model folder that is replaced at each version."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.app.cli import options
from thinwire.app.cli.token import set_up_grpc, takes_token, token_of
from thinwire.app.records.printable import reason
from thinwire.app.records.published import Origin, PublishedFolder
from thinwire.app.records.run_file import read_run_file
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.follow import Followed, WeightsFollower
from thinwire.errors import ConfigurationError, DataError, LinkError, PacketError
from thinwire.net.token import Token


@dataclass(frozen=True)
class Options:
    """The options of `thinwire follow`."""

    run: tyro.conf.Positional[str]
    """The folder of a run that was started with --publish, on this machine or a shared disk; or a token of the run's hub: the word, @FILE,
    or - to read it from standard input."""
    out: Path = Path("live")
    """The model folder to keep: a link to the newest version, which is replaced atomically."""
    once: bool = False
    """Fetch the newest version and end. Without it: continue until the run ends."""
    every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1.0
    """Seconds between two checks."""
    name: str | None = None
    """With a token: this follower's name. One that begins with follower- can only receive. Needed with a token."""
    keys: Path = Path(".thinwire")
    """With a token: the folder that keeps this follower's key and its certificate."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "follow", arguments, "Keep a model folder at a run's newest agreed weights.")
    say = options.teller(options.console(asked.json))
    if not 0 <= asked.every < math.inf:
        raise ConfigurationError(f"--every {asked.every}: seconds between two looks are needed, 0 or more.")
    with _origin(asked, say) as (origin, final):
        newest, total, versions = _follow(asked, WeightsFollower(origin, asked.out), final, say)
    if newest is None:
        raise ConfigurationError("nothing is published there; train with --publish, or follow without --once.")
    return options.answer(
        asked.json, {"out": str(asked.out), "versions": versions, "nbytes": total, "newest": asdict(newest)}
    )


@contextmanager
def _origin(asked: Options, say: Callable[[str], object]) -> Iterator[tuple[Origin, type[Exception]]]:
    """The source of versions, and the errors that it raises."""
    if takes_token(asked.run) or Token.is_one(asked.run):
        if asked.name is None:
            raise ConfigurationError(
                "a token needs --name; write --name follower-oslo, or the name that the token is for."
            )
        set_up_grpc()
        from thinwire.net import PublishedAtHub
        from thinwire.net.calls import Refused

        word = token_of(asked.run)
        with PublishedAtHub(word, asked.name, asked.keys) as at_hub:
            say(f"dialling {Token.read(word).where}")
            yield at_hub, Refused
        return
    folder = Path(asked.run)
    if not (folder / "run.toml").exists():
        raise ConfigurationError(
            f"{folder} holds no run: there is no run.toml in it. Give the folder that `thinwire train --publish` wrote, or a hub's token."
        )
    if not (folder / "published").exists() and not _publishes(folder / "run.toml"):
        raise ConfigurationError(f"the run in {folder} publishes nothing: {_why_not(folder)}")
    yield PublishedFolder(folder), ConfigurationError


def _publishes(run_file: Path) -> bool:
    try:
        return bool(read_run_file(run_file)[0].get("publish"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{run_file} cannot be read as a run file ({reason(error)}); restore it.") from None


def _why_not(folder: Path) -> str:
    """Why a run that was started without --publish publishes nothing, and what to do."""
    from thinwire.app.trainer.resuming import complete  # it needs all of a trainer
    from thinwire.app.trainer.run import Run

    run = Run.load(folder / "run.toml")
    if complete(run, folder):
        return f"it was started without --publish, and has ended. Its model is in {folder}."
    if not run.has_versions:
        given = f"strategy={run.method.label}, lora={run.model.lora}"
        return f"{given}, and only recipes with rounds of deltas, without LoRA, can. Wait for the end of the run."
    return "it was started without --publish. Resume it with --publish."


def _follow(
    asked: Options, follower: WeightsFollower, final: type[Exception], say: Callable[[str], object]
) -> tuple[Followed | None, int, int]:
    """Follow the versions. Returns the newest one, and the bytes and the number of all."""
    newest, total, versions, failures, waits = None, 0, 0, 0, False
    while newest is None or not newest.over:
        found = None
        try:
            found = follower.update()
            failures = 0
        except (DataError, PacketError, LinkError) as error:  # the list was replaced meanwhile, a file was cut, a link
            failures += 1
            if isinstance(error, final) or (failures > 2 and (asked.once or not isinstance(error, LinkError))):
                raise
            if failures == 3:
                say(f"{error}; trying again")
        except OSError as error:
            failures += 1
            if asked.once or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if failures == 1:
                say(f"{asked.out} stays as it is: {error.strerror}; make room there, it is tried again until then")
        if found:
            newest, total, versions = found, total + found.nbytes, versions + 1
            say(told(found))
        if asked.once and not failures:
            break
        if found is None and newest is None and not (waits or failures):
            say("nothing is published yet (thinwire train --publish); waiting")
            waits = True
        if newest is None or not newest.over:
            time.sleep(asked.every)
    return newest, total, versions


def told(found: Followed) -> str:
    """A line about one version."""
    line = f"version {found.version}, step {found.step}: {text_of_nbytes(found.nbytes)}"
    share = f"{found.nbytes / max(1, found.full_nbytes):.1%} of a full copy of the weights"
    if found.first and found.copied == found.fragments:
        return f"{line}, a full copy: none was here"
    if found.copied:
        copied = "all" if found.copied == found.fragments else f"{found.copied} of {found.fragments}"
        return f"{line}, {share}; full copies of {copied} fragments, whose changes are not kept any more or are longer"
    return f"{line}, {share}"
