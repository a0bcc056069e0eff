"""What pages say of each recipe and method beside their own words: what it sends, what it keeps, what was measured of it.

`make tables` fills these blocks, each up to its `<!-- end -->`:

    <!-- numbers NAME ... -->   bytes in a period, bits a parameter and step, bytes kept, by the strategy's own prediction; and
                                the row in benchmarks/results/family.json or defaults.json, if there is one
    <!-- recipes -->            every recipe and method, with what its docstring says first
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from thinwire import Strategy
from thinwire.app.plan.memory import kept_nbytes
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.catalogue.methods import NAMED, RECIPES
from thinwire.drivers.unequal.method import Decoupled
from thinwire.lab.methods import Averaged, Codistill, ControlVariates, Flasc
from thinwire.lab.pairs.method import AcceleratedPairs, Pairs
from thinwire.lab.samples.method import Plexus
from thinwire.lab.sites.method import Halos
from thinwire.pieces.partition import Fragment
from thinwire.pieces.policy import Deciding
from thinwire.pieces.schedule import Adaptive
from thinwire.strategy import Gradients

ROOT = Path(__file__).parents[1]
FAMILY, DEFAULTS = "benchmarks/results/family.json", "benchmarks/results/defaults.json"
MODEL, REPLICAS = "tiny", 2  # those of `thinwire train` when nothing is said
BLOCK = re.compile(r"(<!-- (numbers|recipes)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTROL = "data_parallel"


def filled(text: str, root: Path, up: str) -> str:
    """`text` with all of these blocks as they are due. `up` leads from its page to the root."""
    make: dict[str, Callable[[list[str]], str]] = {
        "numbers": lambda names: numbers(names, root, up),
        "recipes": lambda _: recipes(),
    }
    return BLOCK.sub(lambda b: f"{b[1]}{make[b[2]](b[3].split())}\n{b[4]}", text)


def homes() -> dict[str, Path]:
    """The page of each name: names stand in the page's title, as in `# dgc, outer_dgc`."""
    pages = sorted((ROOT / "docs/methods").glob("*.md"))
    return {name: page for page in pages for name in title(page)}


def title(page: Path) -> list[str]:
    return page.read_text().split("\n", 1)[0].removeprefix("# ").split(", ")


# ---- on the wire, and measured


@cache
def fragments(name: str) -> list[Fragment]:
    """Of a strategy, on the model of which its bytes are told."""
    with torch.device("meta"):  # shapes alone
        model = Transformer(SIZES[MODEL])
    made = NAMED[name]()
    return (made.partition if isinstance(made, Strategy) else RECIPES[CONTROL]().partition).fragments(model)


def sent(name: str) -> Iterator[tuple[str, int, int]]:
    """What is sent in a period: in which rounds, how many bytes, and in how many steps. In the long run first."""
    made, shapes = NAMED[name](), [fragment.shapes for fragment in fragments(name)]
    numel = sum(fragment.numel for fragment in fragments(name))
    if not isinstance(made, Strategy):
        yield "", made.nbytes_per_period(numel, REPLICAS), made.every
        return
    every = made.schedule.every
    full = max((one.full for one in made.filters), default=0)
    late = made.nbytes_per_period(shapes, REPLICAS)
    yield "", late, every
    for first, end in pairwise(sorted({0, full, *made.policy.changes})):
        early = made.nbytes_per_period(shapes, REPLICAS, first)
        if early != late:
            yield f"round {first:,}" if end == first + 1 else f"rounds {first:,} to {end - 1:,}", early, every


def bits(name: str, nbytes: int, every: int) -> str:
    """A parameter and step; with ≤ where learning rate, data or the drawn replicas may ask for less."""
    made = NAMED[name]()
    less = isinstance(made, Strategy) and (isinstance(made.schedule, Adaptive) or isinstance(made.policy, Deciding))
    less = less or isinstance(made, Codistill | Plexus)
    share = 8 * nbytes / sum(fragment.numel for fragment in fragments(name)) / every
    return ("≤ " if less else "") + f"{share:.3g}"


def numbers(names: list[str], root: Path, up: str) -> str:
    """What each name sends and keeps, as predicted, and its row of benchmarks/family.py beside the control of the same run."""
    results = [json.loads(path.read_text()) for name in (FAMILY, DEFAULTS) if (path := root / name).exists()]
    rows_of = [{row["strategy"]: row for row in result["rows"]} for result in results]
    result, found = next((pair for pair in zip(results, rows_of) if pair[1].keys() & set(names)), (None, {}))
    rows = [["", "bytes sent", "bits per parameter and step", "bytes kept per parameter"], ["---", *["---:"] * 3]]
    if result is not None:
        rows[0] += ["loss", f"against {CONTROL}", "seeds"]
        rows[1] += ["---:"] * 3
    changed = False
    for name in names:
        losses = ["not measured yet", "", ""]
        if name in found:
            row, old = found[name], repr(NAMED[name]()) != found[name].get("composition", repr(NAMED[name]()))
            changed |= old
            spread = "" if row["eval_loss_spread"] is None else f" ± {row['eval_loss_spread']:.4f}"
            loss = f"{row['eval_loss']:.4f}{spread}" + (" †" if old else "")
            losses = [loss, _against(row, found.get(CONTROL)), str(row["seeds"])]
        for when, nbytes, every in sent(name):
            steps = "a step" if every == 1 else f"{every} steps"
            row = [f"`{name}`" + (f", {when}" if when else ""), f"{nbytes:,} in {steps}", bits(name, nbytes, every)]
            ends = ["", "", "", ""] if when else [f"{kept(name):.3g}", *losses]
            rows.append([*row, *ends[: len(rows[0]) - 3]])
    model = f"`{MODEL}` ({sum(fragment.numel for fragment in fragments(names[0])):,} parameters)"
    remark = f"Predicted: bytes of each of two replicas, model {model}, defaults, with headers; kept beside weights and inner optimizer."
    if result is None:
        remark += " Loss: not measured yet."
    else:
        remark += f" {_said(result | {'rows': [found[name] for name in names if name in found]})} [All methods]({up}docs/family.md)."
    if changed:
        remark += " †: before its defaults became what they are today."
    return f"{_table(rows)}\n\n*{remark}*"


def _against(row: Mapping[str, Any], control: Mapping[str, Any] | None) -> str:
    if control is None or not math.isfinite(row["eval_loss"]):
        return "–"
    return "control" if row is control else f"{row['eval_loss'] / control['eval_loss'] - 1:+.2%}"


def commits(result: Mapping[str, Any]) -> str:
    """The commit of a result, and those of rows that were recorded later."""
    own: dict[str, list[str]] = {}
    for row in result.get("rows", ()):
        if "commit" in row:
            own.setdefault(row["commit"][:7], []).append(row.get("label", row["strategy"]))
    said = "commit " + (result["commit"] or "unknown")[:7] + (" and changes" if result.get("uncommitted") else "")
    later = [f"{', '.join(names)} at {commit}" for commit, names in own.items()]
    return said + (f" ({'; '.join(later)})" if later else "")


def _said(result: Mapping[str, Any]) -> str:
    """How and where it was measured."""
    setting, machine = result["setting"], result["machine"]
    how = f"model `{setting['model']}`, {setting['steps']} steps, {setting['replicas']} replicas, defaults; mean ± standard deviation over seeds"
    return f"{result['word'].capitalize()}, {result['date'][:10]}: {how}; {commits(result)}, {machine['cpu'].strip()}, {machine['cores']} cores."


# ---- all of them


def recipes() -> str:
    """A table of all recipes and methods for docs/strategies.md, in four parts."""
    parts: dict[str, list[str]] = {
        "Deltas, every H steps": [],
        "Gradients, at every step": [],
        "Weights, among neighbours": [],
        "With a loop of their own": [],
    }
    for name, make in NAMED.items():
        made = make()
        of = 3
        if isinstance(made, Strategy):
            of = 2 if not made.exchange.traits.agrees else 1 if isinstance(made.signal, Gradients) else 0
        list(parts.values())[of].append(name)
    at = homes()
    rows = [["", "what it does", "bits per parameter and step", "bytes kept"], ["---", "---", "---:", "---:"]]
    for part, names in parts.items():
        rows.append([f"*{part}*", "", "", ""])
        for name in names:
            _, nbytes, every = next(sent(name))
            rows.append(
                [f"[{name}](methods/{at[name].name})", summary(name), bits(name, nbytes, every), f"{kept(name):.3g}"]
            )
    return _table(rows)


def summary(name: str) -> str:
    """The first line of the docstring, without who and where: that is on the page."""
    first = inspect.cleandoc(NAMED[name].__doc__ or "").split("\n\n")[0].replace("\n", " ")
    said = re.sub(r" \([^()]*(?:arXiv|20\d\d|ICLR)[^()]*\)", "", first).split(": ", 1)[-1]
    return said[0].upper() + said[1:].rstrip(".")


def kept(name: str) -> float:
    """Bytes a parameter that a replica of two keeps between steps, beside weights and inner optimizer."""
    made = NAMED[name]()
    if isinstance(made, ControlVariates):  # x, c and c_i; and v
        return 16 if isinstance(made.rule, Averaged) else 12
    if isinstance(made, Flasc):  # of the hub: s, p and Adam's moments
        return 16
    if isinstance(made, Decoupled | Halos):  # beside the syncer: anchor, residual, outer state; and what is in the air
        return 16 + 4 * sum(value.numel() == 2 for value in made.outer.init(torch.zeros(2)).values())
    if isinstance(made, Pairs):  # x at the last event, and its momentum
        return 8 if isinstance(made, AcceleratedPairs) else 4
    if isinstance(made, Plexus):  # the model of the round, and its momentum
        return 4 + 4 * len(made.outer.init(torch.zeros(1)))
    if not isinstance(made, Strategy):  # a log, a byte a value
        return 0
    numels = [fragment.numel for fragment in fragments(name)]
    every = kept_nbytes(sum(numels), made, numels, REPLICAS)
    return sum(nbytes for what, nbytes in every.items() if what not in ("parameters", "AdamW")) / sum(numels)


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
