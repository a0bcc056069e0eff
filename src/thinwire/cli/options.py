"""How verbs read their arguments: a dataclass and, where there is one, a run file underneath."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tyro
from rich.table import Table

from thinwire.errors import ConfigurationError
from thinwire.report.terminal import Terminal

if TYPE_CHECKING:
    from thinwire.lm.run import Run  # which needs torch

T = TypeVar("T")


def read(kind: type[T], verb: str, arguments: Sequence[str], description: str) -> T:
    """The options of `verb`. Where it takes a `Run`, a run file (the first argument), or the one in `--out` when
    resuming, gives the defaults."""
    takes_a_run = "run_settings" in {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    default: Any = kind(run_settings=_base(arguments)) if takes_a_run else None  # type: ignore[call-arg]
    asked: T = tyro.cli(kind, prog=f"thinwire {verb}", args=list(arguments), description=description, default=default)
    file = getattr(asked, "run", None)
    if takes_a_run and file is not None and str(file) != arguments[0]:
        raise ConfigurationError(f"{file} after options: a run file is needed first; write thinwire {verb} {file} --…")
    return asked


def _base(arguments: Sequence[str]) -> Run:
    from thinwire.lm.run import Run

    file = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if file is None and "--resume" in arguments and (folder := _value(arguments, "--out")):
        begun = Path(folder) / "run.toml"
        return Run.load(begun) if begun.exists() else Run()  # a folder without a run is refused later
    return Run.load(Path(file)) if file else Run()


def _value(arguments: Sequence[str], flag: str) -> str | None:
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(flag + "="):
            return argument.split("=", 1)[1]
    return None


def console(json: bool) -> Terminal:
    """Where people read: stdout, or stderr where stdout is for a machine. A file has no width: tables get room there."""
    stream = sys.stderr if json else sys.stdout
    return Terminal(file=stream, width=None if stream.isatty() else 120)


def table(title: str) -> Table:
    """Without lines, its title and caption on the left."""
    return Table(
        title=title, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", caption_justify="left"
    )  # fmt: skip
