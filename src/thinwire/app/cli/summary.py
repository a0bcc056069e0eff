"""The summary of a run as JSON, what is wrong with a run without a usable model, and advice about waits and unequal machines."""

from __future__ import annotations

import dataclasses
import inspect
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.app.records.losses import DIVERGED, JUMPED, NO_RESULT, for_json, useless
from thinwire.app.records.printable import quoted
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.settings import recipe_name
from thinwire.catalogue.methods import NAMED

LEAST_STEPS, UNEQUAL_FACTOR = 10, 1.5  # no advice about speeds with fewer steps, or a smaller factor
USELESS_FACTOR = 10.0  # a machine so many times as slow has brought nothing: docs/unequal.md
# Measured with so slow a machine.
WITH_SLOW = ("streaming_sign", "streaming_diloco", "diloco", "local_sgd", "data_parallel", "decoupled_diloco")
WEIGHABLE = (*WITH_SLOW, "async_local_sgd", "halos")


def without_result(records: Sequence[RunRecord]) -> str:
    """What is wrong with finished runs of one model that have no result, have diverged or were mostly jumped over, and what to do; empty for none."""
    lost = {str(record.folder): record for record in records if useless(record.status)}
    if not lost:
        return ""
    each = "; ".join(f"{folder}: {record.status.removeprefix(f'{NO_RESULT}: ')}" for folder, record in lost.items())
    if all(record.status.startswith(JUMPED) for record in lost.values()):
        return f"{each}, because of what a member said about its step. Look who was named (thinwire report), and train again without it."
    look = "evaluate(model), the data and the loss" if records[0].settings.get("job") else "the data"
    return f"{each}, so there is no model that can be used. Check {look}, or train with a lower --lr."


def exit_code_of(status: str) -> int:
    """The exit code for a run that took all its steps: 3 if it has diverged, 1 without a result, else 0."""
    return 3 if status.startswith(DIVERGED) else 1 if useless(status) else 0


def stall_advice(record: RunRecord, folder: Path) -> str:
    """Advice for a run that waited for rounds for over a tenth of its time; empty for others."""
    share = record.summary.stall_seconds / record.summary.wall_seconds if record.summary.wall_seconds else 0.0
    if not share > 0.1:
        return ""
    told = f"replicas waited for rounds for {share:.0%} of the time ({record.summary.provenance})"
    name, text, _ = str(record.settings.get("strategy")).partition("(")
    recipe = NAMED.get(recipe_name(name))
    if recipe is not None and "delay" not in inspect.signature(recipe).parameters:
        return told
    what = "delay" if text else "--delay"  # what is written as text has its delay in the parentheses
    link = "" if record.bits_per_second else " --link RATE,DELAY (of your link)"
    return f"{told}; thinwire doctor {quoted(folder / 'run.toml')}{link} shows the {what} without waits"


def speed_advice(record: RunRecord) -> str:
    """Advice for a fixed group with machines of unequal speed and equal batches; empty for others."""
    asked, replicas = record.settings, record.replicas
    batch, name = asked.get("batch"), recipe_name(str(asked.get("strategy")).partition("(")[0])
    if (
        name not in WEIGHABLE
        or "elastic" in str(asked.get("carrier"))
        or asked.get("job")
        or len(replicas) != asked.get("replicas")
    ):
        return ""
    if not isinstance(batch, int) or batch < 2 or min(len(one.compute_seconds) for one in replicas) < LEAST_STEPS:
        return ""
    seconds = [statistics.median(one.compute_seconds.tolist()) for one in replicas]
    slow = [one / max(min(seconds), 1e-9) for one in seconds]
    slowest = slow.index(max(slow))
    told = f"{replicas[slowest].name}'s steps took {slow[slowest]:.1f} times as long as the fastest ones"
    if slow[slowest] >= USELESS_FACTOR and name in WITH_SLOW:
        follow = "" if name in ("data_parallel", "decoupled_diloco") else ", or let it follow (thinwire follow)"
        return f"{told}; so slow a machine costs a run more than it brings: leave it out{follow}"
    if not UNEQUAL_FACTOR <= slow[slowest] <= 1.25 * batch:  # a batch of one sequence would still be late
        return ""
    several = " ".join(str(max(1, round(batch / one))) for one in slow)
    return f"{told}; with --batch {several} all would take about equally long"


def summary_of(record: RunRecord) -> dict[str, Any]:
    """A run's numbers for JSON, which has no NaN."""
    fields = dataclasses.asdict(record.summary) | {"folder": str(record.folder), "status": record.status}
    fields |= {"score": record.score().facts()}
    fields |= {"privacy": record.privacy} if record.privacy else {}
    fields |= {"made_of": record.start.made_of} if record.start.made_of else {}
    fields |= {
        "ledgers": {replica.name: replica.end.get("ledger") for replica in record.replicas if replica.end is not None}
    }
    return {name: for_json(value) for name, value in fields.items()}
