"""`thinwire checkpoints`: the checkpoints from which a run can resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from thinwire.app.cli import options
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.checkpoints import CheckpointSet, list_checkpoints, prune_checkpoints, replicas_of
from thinwire.app.trainer.resuming import cannot_resume
from thinwire.app.trainer.run import Run


@dataclass(frozen=True)
class Options:
    """The options of `thinwire checkpoints`."""

    run: tyro.conf.Positional[Path]
    """The run folder. The run may be active."""
    verify: bool = False
    """Hash every file. Default: only compare sizes."""
    prune: int | None = None
    """Hash every file, and delete all but the newest N whole ones. Default: nothing is deleted."""
    json: bool = False
    """Stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    asked = options.read(Options, "checkpoints", arguments, "List, verify and prune the checkpoints of a run.")
    console = options.console(asked.json)
    sets, gone = list_checkpoints(asked.run, asked.verify), []
    run = Run.load(asked.run / "run.toml").outlined()
    each = run.own_steps
    if asked.prune is not None:
        gone = prune_checkpoints(asked.run, asked.prune, each)
        sets = list_checkpoints(asked.run, hashes=True)
    here = replicas_of(asked.run)
    table = options.table("")
    for name in ("step", "when", "size", "replicas", "state"):
        table.add_column(name, justify="right" if name in ("step", "size") else "left", overflow="fold")
    for one in reversed(sets):
        table.add_row(*_row(one, len(here), each))
    if sets:
        console.print(table)
    console.print(_told(asked.run, sets, len(here), run, each), soft_wrap=True, highlight=False)
    held = [saved for one in sets for saved in one.saved]
    hashed = asked.verify or asked.prune is not None
    how = "every file was hashed" if hashed else "sizes were compared; --verify hashes every file"
    damaged = sum(bool(saved.problem) for saved in held)
    nbytes = text_of_nbytes(sum(saved.nbytes for saved in held))
    checked = f"checked {len(held)} checkpoints of {len(here)} replicas, {nbytes}: {damaged} damaged ({how})"
    console.print(checked, soft_wrap=True, highlight=False)
    if asked.prune is not None:
        freed = text_of_nbytes(sum(one.nbytes for one in gone)) if gone else "no byte"
        steps = ", ".join(map(str, sorted({one.step for one in gone})))
        console.print(
            f"deleted {len(gone)} checkpoints{f' of step {steps}' * bool(gone)}: {freed} freed",
            soft_wrap=True,
            highlight=False,
        )
    facts = {"checkpoints": [_facts(one, each) for one in sets], "deleted": [str(one.path) for one in gone]}
    return options.answer(asked.json, facts)


def _row(one: CheckpointSet, here: int, each: bool) -> tuple[str, ...]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.when))
    problems = _problems(one, each)
    return (
        str(one.step),
        when,
        text_of_nbytes(one.nbytes),
        f"{len(one.saved)} of {here}",
        "; ".join(problems) or "whole",
    )


def _problems(one: CheckpointSet, each: bool) -> list[str]:
    """If each replica resumes from its own checkpoint, none is missing."""
    return [f"{saved.replica}: {saved.problem}" for saved in one.saved if saved.problem] if each else one.problems


def _facts(one: CheckpointSet, each: bool) -> dict[str, object]:
    problems = _problems(one, each)
    return {
        "step": one.step, "when": one.when, "nbytes": one.nbytes, "replicas": [saved.replica for saved in one.saved],
        "whole": not problems, "problems": problems,
    }  # fmt: skip


def _told(folder: Path, sets: Sequence[CheckpointSet], here: int, run: Run, each: bool) -> str:
    """The step at which a resume starts, in words."""
    if why := cannot_resume(run):
        return why
    whole = [one.step for one in sets if not _problems(one, each)]
    if not whole:
        return "no whole checkpoint: the run cannot resume"
    if each:
        found = {saved.replica for one in sets for saved in one.saved if not saved.problem}
        if not run.placement.elastic and (without := [name for name in replicas_of(folder) if name not in found]):
            return f"{', '.join(without)}: no whole checkpoint, and each replica needs one: the run cannot resume"
        return "each replica resumes from its own newest whole one"
    elsewhere = run.placement.replicas - len({name.split(".")[0] for name in replicas_of(folder)})
    there = f", if the replicas of other machines have it too: {elsewhere}" if here and elsewhere > 0 else ""
    return f"a resume starts at step {whole[-1]}{there}"
