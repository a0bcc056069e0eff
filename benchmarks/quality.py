"""What does it cost in loss? Streaming DiLoCo in 4 bits beside data-parallel training at equal tokens, several seeds.

    python benchmarks/quality.py [--seeds 3] [--steps 4800] [--out FOLDER] [--into FILE]

Two replicas as processes, real text (Python's standard library), the same batches for all methods. The goal: evaluation loss
within 1 % of data-parallel's, with at least 100 times fewer bits on the wire. Broken off, it goes on where it was with the same --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import provenance, save

METHODS = ("data_parallel", "streaming_diloco(every=15, outer_lr=0.7)", "streaming_diloco(every=30, outer_lr=0.7)")
SETTINGS = {"model": "nano", "batch": 16, "sequence": 128, "lr": 6e-3, "checkpoint_every": 0}
GOAL = {"loss_above": 0.01, "times_fewer_bits": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/quality.json")
    asked = parser.parse_args()
    about = provenance()  # before the load is our own
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in (SETTINGS | {"steps": asked.steps}).items()]
        command = [sys.executable, "-m", "thinwire", "compare", "--strategies", *METHODS, "--seeds", str(asked.seeds)]
        done = subprocess.run(
            [*command, *options, "--out", str(out), "--json"], stdout=subprocess.PIPE, text=True, check=True
        )
    rows = json.loads(done.stdout.strip().splitlines()[-1])["strategies"]
    control = rows[0]
    for row in rows:
        row["loss_above_control"] = row["eval_loss"] / control["eval_loss"] - 1
        row["times_fewer_bits"] = control["bits_per_parameter_per_step"] / row["bits_per_parameter_per_step"]
        print(
            f"{row['strategy']:<46} {row['eval_loss']:.4f} ± {row['eval_loss_spread'] or 0:.4f}  {row['loss_above_control']:+.2%}"
            f"  {row['bits_per_parameter_per_step']:8.4f} bits per parameter and step  {row['times_fewer_bits']:.0f}× fewer"
        )
    settings = SETTINGS | {"steps": asked.steps, "replicas": 2}
    path = save(
        "quality",
        about | {"benchmark": "quality", "word": "measured", "setting": settings, "goal": GOAL, "rows": rows},
        asked.into,
    )
    print(f"written: {path}")


if __name__ == "__main__":
    main()
