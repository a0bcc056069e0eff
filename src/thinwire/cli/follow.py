"""`thinwire follow`: the newest agreed weights of a run, as a model folder that is replaced at each version."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinwire.cli import options
from thinwire.errors import ConfigurationError, DataError, PacketError
from thinwire.lm.follow import Followed, WeightsFollower
from thinwire.records.published import PublishedFolder
from thinwire.records.units import text_of_nbytes


@dataclass(frozen=True)
class Options:
    """What `thinwire follow` takes."""

    run: tyro.conf.Positional[Path]
    """The folder of a run that was started with --publish, here or on a disk that machines share."""
    out: Path = Path("live")
    """The model folder to keep: a link to the newest version, which is replaced at once and as a whole."""
    once: bool = False
    """Bring the newest version and end. Without: go on until the run ends."""
    every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 1.0
    """Seconds between two looks."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "follow", arguments, "Keep a model folder at a run's newest agreed weights.")
    if not (asked.run / "run.toml").exists():
        raise ConfigurationError(
            f"{asked.run} holds no run: there is no run.toml in it. Give the folder that `thinwire train --publish` wrote."
        )
    console = options.console(asked.json)
    say = options.teller(console)
    follower, total, versions, newest = WeightsFollower(PublishedFolder(asked.run), asked.out), 0, 0, None
    failures, waits = 0, False
    while newest is None or not newest.over:
        try:
            found = follower.update()
            failures = 0
        except (DataError, PacketError):
            failures += 1  # the list was replaced meanwhile, or a file was cut
            if failures > 2:
                raise
            continue
        if found:
            newest, total, versions = found, total + found.nbytes, versions + 1
            say(told(found))
        if asked.once:
            break
        if found is None and newest is None and not waits:
            say(f"{asked.run} has no published version yet (thinwire train --publish); waiting")
            waits = True
        if newest is None or not newest.over:
            time.sleep(asked.every)
    if asked.once and newest is None:
        raise ConfigurationError(f"{asked.run} has published nothing; train with --publish, or follow without --once.")
    if asked.json and newest:
        print(json.dumps({"out": str(asked.out), "versions": versions, "nbytes": total, "newest": asdict(newest)}))
    return 0


def told(found: Followed) -> str:
    """One version, in a line."""
    line = f"version {found.version}, step {found.step}: {text_of_nbytes(found.nbytes)}"
    share = f"{found.nbytes / max(1, found.full_nbytes):.1%} of a full copy of the weights"
    if found.first and found.copied == found.fragments:
        return f"{line}, a full copy: none was here"
    if found.copied:
        copied = "all" if found.copied == found.fragments else f"{found.copied} of {found.fragments}"
        return f"{line}, {share}; full copies of {copied} fragments, whose changes are not kept any more or are longer"
    return f"{line}, {share}"
