"""`thinwire resume`: resume a run by its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.cli import train
from thinwire.cli.train import Options as Options
from thinwire.errors import ConfigurationError
from thinwire.lm import run_folder


def main(arguments: Sequence[str]) -> int:
    """`thinwire resume RUN ...` is `thinwire train --resume --out RUN ...`."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: thinwire resume RUN [options], which is thinwire train --resume --out RUN [options]:\n")
        return train.main(arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigurationError(
            "the run folder is needed first; write thinwire resume runs/NAME, then the settings to change."
        )
    if not run_folder.begun(Path(arguments[0])):
        raise ConfigurationError(
            f"{arguments[0]} holds no run to resume: it has no run.toml. Check the path, or start a new run."
        )
    return train.main(["--resume", "--out", *arguments])
