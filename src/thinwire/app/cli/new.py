"""`thinwire new`: writes a template of a job file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from thinwire.app.cli import options
from thinwire.errors import ConfigurationError

TEMPLATE = Path(__file__).parents[1] / "jobs" / "template.py"


@dataclass(frozen=True)
class Options:
    """The options of `thinwire new`."""

    file: tyro.conf.Positional[Path]
    """The file to write, such as my_job.py."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "new", arguments, "Write a template of your own job, which runs without changes.")
    if asked.file.suffix != ".py":
        raise ConfigurationError(f"{asked.file}: a name that ends in .py is needed; write thinwire new my_job.py.")
    name = shlex.quote(str(asked.file))
    try:
        with asked.file.open("x") as file:
            file.write(TEMPLATE.read_text().replace("my_job.py", name))
    except FileExistsError:
        raise ConfigurationError(f"{asked.file} is there already, and is not overwritten; give another name.") from None
    command = f"thinwire train --job {name} --steps 200"
    options.console(asked.json).print(f"written: {asked.file}\nnext: {command}", soft_wrap=True, highlight=False)
    return options.answer(asked.json, {"file": str(asked.file), "next": command})
