"""`thinwire plan tp`: the split of a model over the ranks of a site, by names and shapes, with the rule of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from thinwire.app.cli import options
from thinwire.app.plan.compute import skeleton
from thinwire.app.plan.explain import USELESS_UTILIZATION
from thinwire.app.plan.machine import Machine
from thinwire.app.records.units import text_of_count, text_of_seconds, text_of_share
from thinwire.app.trainer.run import Run
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.lab.plan.split import layers_of
from thinwire.lab.plan.tensor_parallel import TensorParallel, derive, waiting

FLOPS_PER_SECOND = 1.5e14  # operations per second of a rank without a machine.toml


@dataclass(frozen=True)
class Options:
    """The options of `thinwire plan tp`."""

    model: tyro.conf.Positional[str]
    """A model size, hf:NAME_OR_FOLDER, or a job file (.py)."""
    ranks: int = 2
    """Number of ranks of a site that share the model."""
    explain: bool = False
    """Print the rule of each parameter, as is done if nothing can be split."""
    link: str | None = None
    """The link between the ranks, such as 400gbit,5us. A link on which training would mostly wait is refused."""
    machine: Path | None = None
    """A machine.toml, for the time of a micro-batch. Default: ranks of 1.5e14 operations per second."""
    batch: int = 1
    """Number of sequences in a micro-batch, for the time of its all-reduces."""
    sequence: int = 2048
    """Tokens per sequence."""
    json: bool = False
    """Tables go to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = "Derive a tensor-parallel plan inside a site from a model's names and shapes (predicted)."
    asked = options.read(Options, "plan tp", arguments, about)
    if asked.batch < 1 or asked.sequence < 1:
        raise ConfigurationError(f"batch={asked.batch}, sequence={asked.sequence}: at least 1 of each is needed.")
    given = [f"--{name}" for name in ("machine", "batch", "sequence") if getattr(asked, name) != getattr(Options, name)]
    if given and asked.link is None:
        raise ConfigurationError(
            f"{' and '.join(given)} without --link: these are for the time over a link; give --link, such as 400gbit,5us, or leave them out."
        )
    which = {"job": asked.model} if asked.model.endswith(".py") else {"model": asked.model}
    plan = derive(layers_of(skeleton(Run.of(**which))), asked.ranks)
    console, say = options.console(asked.json), options.teller(options.console(asked.json))
    if asked.explain or (plan.kept == plan.numel and plan.ranks > 1):  # nothing is split, so show the reasons
        console.print(_table(plan))
    passed = len(plan.all_reduces)
    say(
        f"{asked.model} over {plan.ranks} ranks (predicted): a rank keeps {text_of_count(plan.kept)} of "
        f"{text_of_count(plan.numel)} parameters; {passed} all-reduces in a forward and a backward pass"
    )
    facts = _facts(plan)
    if asked.link is not None:
        facts["utilization"] = _over(asked, plan, say)
    return options.answer(asked.json, facts)


def _over(asked: Options, plan: TensorParallel, say: Any) -> float:
    """The share of the time in training over the link. Raises `ConfigurationError` if the link is thin."""
    assert asked.link is not None
    flops = Machine.load(asked.machine).flops_per_second if asked.machine else FLOPS_PER_SECOND
    found = waiting(plan, Link.parse(asked.link), asked.batch * asked.sequence, flops)
    told = (
        f"{len(plan.all_reduces)} all-reduces over {asked.link} are {text_of_seconds(found.waiting)} of waiting for "
        f"{text_of_seconds(found.work)} of work in every micro-batch: {text_of_share(found.utilization)} of the time would be training "
        "(predicted)"
    )
    if found.utilization < USELESS_UTILIZATION:
        raise ConfigurationError(
            f"tensor parallelism over a thin link: {told}; {text_of_share(USELESS_UTILIZATION)} is needed. Split inside a site, and join sites by "
            "replicas: `thinwire plan`."
        )
    say(told)
    return found.utilization


def _table(plan: TensorParallel) -> Table:
    table = options.table(f"Tensor parallelism over {plan.ranks} ranks of a site (predicted)")
    for head in ("layer", "", "shape", "split", "rule"):
        table.add_column(head)
    for row in plan.rows:
        shape = "×".join(map(str, row.layers[0].shape))
        table.add_row(row.pattern, f"{len(row.layers)}" if len(row.layers) > 1 else "", shape, row.split, row.why)
    table.caption = "shape: inputs × outputs, or rows × width · * counts blocks"
    return table


def _facts(plan: TensorParallel) -> dict[str, Any]:
    return {
        "word": "predicted",
        "ranks": plan.ranks,
        "parameters": plan.numel,
        "kept": plan.kept,
        "all_reduces": len(plan.all_reduces),
        "rows": [
            {
                "layers": row.pattern,
                "count": len(row.layers),
                "shape": row.layers[0].shape,
                "split": row.split,
                "parts": row.parts,
                "why": row.why,
            }
            for row in plan.rows
        ],
    }
