"""Slow machines with smaller batches instead of fewer steps: the loss after the same time.

    python benchmarks/unequal_batches.py [--cells 4 0 1] [--seeds 0 1 2] [--into FILE]

*Simulated*: the cells of `python benchmarks/unequal.py --time`. Replica m has micro-batches of 4 / slow[m] sequences, at least 1, and trains
with decoupled_diloco. A step takes as long as it has sequences, which is an assumption: a real machine also has a fixed cost a step. The
losses beside it, of decoupled_diloco with equal batches and of the fast alone, are those of unequal-time.json with the same seed. The data are
cut into equal shares here, so that the fast machines read the same samples in all three. Differences are paired by seed. Saved after each
seed; what the file has is not run again. --quick: 20 steps of one cell, printed only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from provenance import HERE, provenance, save
from unequal import OFTEN, SETTINGS, SEVERAL, TIMED, curve, decoupled

from thinwire.decoupled.timeline import Timeline

BATCH = 4  # of a fast machine, as in unequal.py
CELLS = (4, 0, 1, 7)  # of TIMED


def smaller(slow: tuple[float, ...]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The batch of each machine, and how long its step takes."""
    batches = tuple(max(1, round(BATCH / one)) for one in slow)
    return batches, tuple(one * batch / BATCH for one, batch in zip(slow, batches))


def trained(speeds: str, time: int, seed: int) -> float:
    """The loss after `time` steps of a fast machine."""
    batches, paces = smaller(SEVERAL[speeds])
    mean = Timeline(paces, OFTEN, 1, 1, 0.5, 0).done(0, time) // len(paces)
    return curve(decoupled(paces, OFTEN), paces, mean, seed, mean + 1, batches=batches)[-1][1]


def with_differences(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the differences to both others, in the mean over its seeds."""
    for place, name in ((1, "of_default"), (2, "of_fast")):
        each = [one[0] / one[place] - 1 for one in row["losses"].values()]
        row[name] = statistics.fmean(each)
        row[f"error_{name}"] = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", choices=range(len(TIMED)), default=CELLS)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        print(json.dumps({"word": "simulated", "speeds": "1:2:4", "loss": trained("1:2:4", 20, 0)}))
        return
    result = provenance() | {"benchmark": "smaller_batches", "word": "simulated", "setting": SETTINGS}
    into = asked.into or HERE / "results" / "unequal-batches.json"
    rows = {
        (row["speeds"], row["steps"]): row for row in (json.loads(into.read_text())["rows"] if into.exists() else ())
    }
    timed = json.loads((HERE / "results" / "unequal-time.json").read_text())["rows"]
    others = {(row["speeds"], row["steps"]): row for row in timed}
    for speeds, steps, _ in (TIMED[cell] for cell in asked.cells):
        other, losses = others[speeds, steps], others[speeds, steps]["losses"]
        for seed in asked.seeds:
            if seed not in other["seeds"]:
                continue
            new = {"word": "simulated", "speeds": speeds, "steps": steps, "time": other["time"], "losses": {}}
            row = rows.setdefault((speeds, steps), new | {"batches": smaller(SEVERAL[speeds])[0]})
            if str(seed) not in row["losses"]:
                at = other["seeds"].index(seed)
                own = trained(speeds, other["time"], seed)
                row["losses"][str(seed)] = [own, losses["decoupled_diloco"][at], losses["the fast alone"][at]]
                print(
                    json.dumps(with_differences(row)),
                    save("unequal-batches", result | {"rows": [*rows.values()]}, into),
                    flush=True,
                )


if __name__ == "__main__":
    main()
