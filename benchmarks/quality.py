"""What does the default cost in loss? `streaming_sign` beside data-parallel training at equal tokens, several seeds.

    python benchmarks/quality.py [--seeds 3] [--steps 2000] [--out FOLDER] [--into FILE]

Two replicas are processes. They train on real text (Python's standard library), with the same batches for both methods. Nothing is given
but the model and the steps, so the learning rate is the default. The control runs once more at a lower rate, with the first seed, because
its best rate may be lower after so many steps. The goal: evaluation loss within 1 % of data-parallel's, at 200 times fewer bits.
An interrupted run continues with the same --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from provenance import provenance, save

from thinwire.app.trainer.run import Run

METHODS = ("data_parallel", "streaming_sign")
SETTINGS = {"model": "nano", "checkpoint_every": 0}
LOWER = 1.4e-2  # the other rate of the control; the default of this model is 2e-2
GOAL = {"loss_above": 0.01, "times_fewer_bits": 200}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/quality.json")
    asked = parser.parse_args()
    about = provenance()  # before this benchmark adds to the load
    settings = SETTINGS | {"steps": asked.steps}
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        rows = compared(METHODS, out / "default", asked.seeds, settings)
        lower = compared(METHODS[:1], out / "lower", 1, settings | {"lr": LOWER})[0]
    rows.append(lower | {"strategy": f"data_parallel at {LOWER:g}"})
    for row in rows:
        print(shown(row, rows[0]))
    run = Run.of(model="nano", steps=asked.steps)
    setting = settings | {"replicas": 2, "batch": run.data.batch, "sequence": run.data.sequence, "lr": run.lr}
    result = about | {"benchmark": "quality", "word": "measured", "setting": setting, "goal": GOAL, "rows": rows}
    print(f"written: {save('quality', result, asked.into)}")


def compared(names: Sequence[str], out: Path, seeds: int, settings: Mapping[str, Any]) -> list[dict]:
    """Returns the rows of `thinwire compare` for `names`; an interrupted comparison continues."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "thinwire", "compare", "--strategies", *names, "--seeds", str(seeds)]
    done = subprocess.run(
        [*command, *options, "--out", str(out), "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["strategies"]


def shown(row: dict, control: dict) -> str:
    above = row["eval_loss"] / control["eval_loss"] - 1
    return (
        f"{row['strategy']:<18} {row['eval_loss']:.4f} ± {row['eval_loss_spread'] or 0:.4f}  {above:+.2%}"
        f"  {row['bits_per_parameter_per_step']:8.4f} bits per parameter and step"
    )


if __name__ == "__main__":
    main()
