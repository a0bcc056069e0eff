"""`thinwire plan pack`: packs sequences of mixed lengths onto ranks, balanced by cost, and shows the imbalance before and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.table import Table

from thinwire.app.cli import options
from thinwire.app.jobs.packs import attention_cost
from thinwire.app.plan.links import store
from thinwire.app.records.printable import reason
from thinwire.app.records.units import text_of_count
from thinwire.app.trainer.model import SIZES
from thinwire.errors import ConfigurationError, DataError, MissingError
from thinwire.files import check_place
from thinwire.lab.plan.packing import Packing, in_order, pack


@dataclass(frozen=True)
class Options:
    """The options of `thinwire plan pack`."""

    file: tyro.conf.Positional[Path]
    """Lengths in tokens of the sequences of one optimizer step: whole numbers, one per line."""
    ranks: int = 8
    """Number of ranks that share them."""
    capacity: int = 8192
    """Tokens that a rank can hold at once."""
    model: str = "1b"
    """The model size; its width gives the cost of a token in a long sequence compared with a short one."""
    out: Path | None = None
    """Write the packing here: JSON, for each rank its micro-batches in order, each the numbers of its sequences (from 0). Default: no file."""
    json: bool = False
    """The table goes to stderr; stdout ends with one JSON object."""


def main(arguments: Sequence[str]) -> int:
    about = "Pack sequences of mixed lengths onto ranks so that all finish together (predicted, by operations)."
    asked = options.read(Options, "plan pack", arguments, about)
    if asked.model not in SIZES:
        raise ConfigurationError(f"model={asked.model!r}: one of {', '.join(SIZES)} is needed.")
    if asked.out:
        check_place(asked.out)
    lengths, cost = _lengths(asked.file), attention_cost(SIZES[asked.model].width)
    before, after = (way(lengths, asked.ranks, asked.capacity, cost) for way in (in_order, pack))
    title = f"{len(lengths)} sequences, {text_of_count(sum(lengths))} tokens, on {asked.ranks} ranks of {asked.capacity} (predicted)"
    table = Table("", title=title)
    for head in ("micro-batches of a rank", "busiest rank / mean", "time / packed"):
        table.add_column(head, justify="right")
    for name, packing in (("in order", before), ("packed", after)):
        table.add_row(
            name, f"at most {_most(packing)}", f"{packing.imbalance:.3f}", f"{packing.makespan / after.makespan:.2f}"
        )
    console = options.console(asked.json)
    console.print(table)
    if asked.out:
        store(asked.out, json.dumps(after.ranks) + "\n")
        console.print(f"written: {asked.out}", soft_wrap=True, highlight=False)
    facts = {"word": "predicted", "sequences": len(lengths), "before": _facts(before), "after": _facts(after)}
    return options.answer(asked.json, facts)


def _lengths(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError) as error:
        kind = MissingError if isinstance(error, FileNotFoundError) else DataError
        raise kind(f"{path}: {reason(error)}; whole numbers of tokens, one per line, are needed.") from None


def _most(packing: Packing) -> int:
    """The largest number of micro-batches of a rank."""
    return max(len(batches) for batches in packing.ranks)


def _facts(packing: Packing) -> dict[str, float]:
    return {"micro_batches": _most(packing), "imbalance": packing.imbalance, "cost": packing.makespan}
