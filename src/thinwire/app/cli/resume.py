"""`thinwire resume`: resume a run by its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from thinwire.app.cli import train
from thinwire.app.cli.train import Options as Options
from thinwire.app.trainer import run_folder
from thinwire.app.trainer.run import OF_A_RUN, PART_OF
from thinwire.errors import ConfigurationError


def main(arguments: Sequence[str]) -> int:
    """`thinwire resume RUN ...` is `thinwire train --resume --out RUN ...`."""
    if arguments and arguments[0] in ("-h", "--help"):
        names = [name for name, part in PART_OF.items() if part not in ("", "method") and name not in OF_A_RUN]
        changes = fill(" ".join(f"--{name.replace('_', '-')}" for name in names), 78, break_on_hyphens=False)
        print("usage: thinwire resume RUN [options], which is thinwire train --resume --out RUN [options].\n")
        print("It continues from the newest checkpoint that all replicas have, with the settings of RUN/run.toml.")
        print(f"Options may change how long, where and how it trains on:\n{changes}")
        print("and --replicas, if the method keeps nothing back from the others. All other settings are of the run;")
        print("another value is refused by name. --text may name another place of the same text.\n")
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
