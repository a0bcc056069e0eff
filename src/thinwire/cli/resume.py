"""`thinwire resume`: resume a run by its folder."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cli import train
from thinwire.cli.train import Options as Options
from thinwire.errors import ConfigurationError


def main(arguments: Sequence[str]) -> int:
    """`thinwire resume RUN ...` is `thinwire train --resume --out RUN ...`."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: thinwire resume RUN [options], which is thinwire train --resume --out RUN [options]:\n")
        return train.main(arguments)
    if not arguments or arguments[0].startswith("-"):
        raise ConfigurationError(
            "the run folder is needed first; write thinwire resume runs/NAME, then the settings to change."
        )
    return train.main(["--resume", "--out", *arguments])
