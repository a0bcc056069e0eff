"""Fill the README's tables from the results that benchmarks wrote: no number is typed by hand.

    python docs/tables.py            # or: make tables

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end -->`; what the JSON's `benchmark` is decides its form.
tests/repo/test_readme.py holds that the README says what the files say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Result = Mapping[str, Any]


def filled(text: str, root: Path = ROOT) -> str:
    """`text` with every table as its file has it."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(root / block[2], block[2])}\n{block[3]}", text)


def table(path: Path, name: str) -> str:
    """Markdown for one result; a sentence where there is no result yet."""
    if not path.exists():
        return f"*Not measured yet: there is no `{name}`.*"
    result: Result = json.loads(path.read_text())
    heads, rows = TABLES[result["benchmark"]](result)
    align = ["---" if head == "method" else "---:" for head in heads]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, align, *rows)]
    return "\n".join([*lines, "", provenance(result, name)])


def provenance(result: Result, name: str) -> str:
    """Where the numbers are from, in one line."""
    machine, versions = result["machine"], result["versions"]
    commit = (result["commit"] or "unknown")[:7] + (" and changes" if result.get("uncommitted") else "")
    where = f"{machine['cpu'].strip()}, {machine['cores']} cores, torch {versions['torch']}"
    return f"*{result['word'].capitalize()}: [{name}]({name}), {result['date'][:10]}, commit {commit}; {where}.*"


def utilization(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of benchmarks/utilization.py: rates from fast to slow, methods in their order."""
    rows = []
    last = None
    for row in result["rows"]:
        rate = row["megabits_per_second"]
        if row["method"] == "bare":
            continue
        shown, last = f"{rate:.3g}" if rate != last else "", rate
        if "problem" in row:
            rows.append([shown, row["method"], "–", "–", row["problem"]])
        else:
            sent = f"{row['wire_nbytes_per_period'] / 1e6:.2f}"
            rows.append([shown, row["method"], _share(row["of_bare"]), _share(row["utilization"]), sent])
    every = result["setting"]["every"]
    return ["Mbit/s", "method", "steps/s of bare", "utilisation", f"MB sent in {every} steps"], rows


def quality(result: Result) -> tuple[list[str], list[list[str]]]:
    """Rows of `thinwire compare`; the first is the control."""
    control = result["rows"][0]
    rows = []
    for row in result["rows"]:
        spread = "" if row["eval_loss_spread"] is None else f" ± {row['eval_loss_spread']:.4f}"
        change = "control" if row is control else f"{row['eval_loss'] / control['eval_loss'] - 1:+.2%}"
        bits = row["bits_per_parameter_per_step"]
        fewer = f"{control['bits_per_parameter_per_step'] / bits:,.0f}×" if bits and row is not control else "–"
        rows.append(
            [row["strategy"], f"{row['eval_loss']:.4f}{spread}", change, f"{bits:.3g}", fewer, str(row["seeds"])]
        )
    return ["method", "evaluation loss", "loss", "bits per parameter and step", "fewer bits", "seeds"], rows


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


TABLES: dict[str, Callable[[Result], tuple[list[str], list[list[str]]]]] = {
    "utilization": utilization,
    "quality": quality,
}


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text()))


if __name__ == "__main__":
    main()
