"""Slow machines with smaller batches instead of fewer steps: the loss after the same time.

    python benchmarks/unequal_batches.py [--cells 4 0 1] [--seeds 0 1 2] [--into FILE]

*Simulated*: the cells of `python benchmarks/unequal.py --time`, and others. Replica m has micro-batches of B / slow[m] sequences, at least 1,
and trains with decoupled_diloco. A step takes as long as it has sequences, which is an assumption: a real machine also has a fixed cost a
step. The losses beside it, of decoupled_diloco with equal batches and of the fast alone, are those of unequal-time.json with the same seed.
If that file has none, the fast alone are trained here, with batches of B, and equal batches are left out. The data are cut into equal shares,
so that the fast machines read the same samples in all. Differences are paired by seed. Saved after each seed; what the file has is not run
again. --quick: 20 steps of one cell, printed only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from provenance import HERE, provenance, save
from unequal import AVERAGED, OFTEN, SETTINGS, SEVERAL, curve, decoupled

from thinwire.drivers.unequal.timeline import Timeline

BATCH = 4  # of a fast machine in unequal.py
CELLS = (  # speeds, B, inner steps of unequal.py in the mean, steps of a fast machine
    ("1:2:4, 8 replicas", BATCH, 120, 192), ("1:2:4", BATCH, 120, 206), ("1:1:10", BATCH, 120, 172),
    ("1:2:4, 16 replicas", BATCH, 120, 198), ("1:1:10", 2 * BATCH, 120, 172), ("1:2:4, 64 replicas", BATCH, 60, 102),
)  # fmt: skip


def smaller(slow: tuple[float, ...], most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The batch of each machine, if the fastest has `most`, and how long its step takes."""
    batches = tuple(max(1, round(most / one)) for one in slow)
    return batches, tuple(one * batch / most for one, batch in zip(slow, batches))


def trained(speeds: str, most: int, time: int, seed: int) -> float:
    """The loss after `time` steps of a fast machine."""
    batches, paces = smaller(SEVERAL[speeds], most)
    mean = Timeline(paces, OFTEN, 1, 1, 0.5, 0).done(0, time) // len(paces)
    return curve(decoupled(paces, OFTEN), paces, mean, seed, mean + 1, batches=batches)[-1][1]


def alone(speeds: str, most: int, time: int, seed: int) -> float:
    """The loss of the fast machines alone, several of them, which average, after `time` steps."""
    slow = SEVERAL[speeds]
    fast = slow.count(min(slow))
    batches = (most,) * fast
    return curve(AVERAGED, (1.0,) * fast, time, seed, time + 1, shares=len(slow), batches=batches)[-1][1]


def with_differences(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the differences to both others, in the mean over its seeds."""
    for place, name in ((1, "of_default"), (2, "of_fast")):
        each = [one[0] / one[place] - 1 for one in row["losses"].values() if one[place] is not None]
        row[name] = statistics.fmean(each) if each else None
        row[f"error_{name}"] = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--into", type=Path)
    parser.add_argument("--cells", type=int, nargs="+", choices=range(len(CELLS)), default=range(len(CELLS)))
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        print(json.dumps({"word": "simulated", "speeds": "1:2:4", "loss": trained("1:2:4", BATCH, 20, 0)}))
        return
    result = provenance() | {"benchmark": "smaller_batches", "word": "simulated", "setting": SETTINGS}
    into = asked.into or HERE / "results" / "unequal-batches.json"
    before = json.loads(into.read_text())["rows"] if into.exists() else []
    rows = {(row["speeds"], max(row["batches"])): row for row in before}
    timed = json.loads((HERE / "results" / "unequal-time.json").read_text())["rows"]
    others = {(row["speeds"], row["steps"]): row for row in timed}
    for speeds, most, steps, time in (CELLS[cell] for cell in asked.cells):
        other = others.get((speeds, steps), {"seeds": []}) if most == BATCH else {"seeds": []}
        for seed in asked.seeds:
            new = {"word": "simulated", "speeds": speeds, "steps": steps, "time": time, "losses": {}}
            row = rows.setdefault((speeds, most), new | {"batches": smaller(SEVERAL[speeds], most)[0]})
            if str(seed) in row["losses"]:
                continue
            own = trained(speeds, most, time, seed)
            if seed in other["seeds"]:
                at, kinds = other["seeds"].index(seed), ("decoupled_diloco", "the fast alone")
                beside = [other["losses"][kind][at] for kind in kinds]
            else:
                beside = [None, alone(speeds, most, time, seed)]
            row["losses"][str(seed)] = [own, *beside]
            print(
                json.dumps(with_differences(row)),
                save("unequal-batches", result | {"rows": [*rows.values()]}, into),
                flush=True,
            )


if __name__ == "__main__":
    main()
