"""The frontier: how much loss do fewer bits cost? Compositions from 15 to 2,000 times fewer bits, beside data-parallel training.

    python benchmarks/frontier.py [--seeds 3] [--steps 2000] [--out FOLDER] [--into FILE]

The setting is that of quality.py: two replicas as processes, equal tokens, default rates; with the same --out its runs are not trained
again. A composition is in the list because it was the best of its bits among those that docs/experiments.md names (one seed); the others are not
here. The goal: a loss within 2 % of the control's at 2,000 times fewer bits. An interrupted run continues with the same --out.
`make tables` writes the table and the picture of docs/measured.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from provenance import provenance, save
from quality import SETTINGS, compared, shown

from thinwire.app.trainer.run import Run

COMPOSITIONS = {
    "data_parallel": "data_parallel",
    "streaming_sign(every=2, codec=E3M0())": "4 bits, H = 2",
    "streaming_sign": "10 %, H = 4",
    "streaming_sparse(every=4, codec=TopK(0.01, Sign(block=1024)))": "1 %, H = 4",
    "streaming_sparse": "0.62 %, H = 5",
}  # and the names of their dots; the control first
GOAL = {"loss_above": 0.02, "times_fewer_bits": 2000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/frontier.json")
    asked = parser.parse_args()
    about = provenance()  # before this benchmark adds to the load
    settings = SETTINGS | {"steps": asked.steps}
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        rows = compared(tuple(COMPOSITIONS), out / "default", asked.seeds, settings)
    for row in rows:
        row["label"] = COMPOSITIONS[row["strategy"]]
        print(shown(row, rows[0]))
    run = Run.of(model="nano", steps=asked.steps)
    setting = settings | {"replicas": 2, "batch": run.data.batch, "sequence": run.data.sequence, "lr": run.lr}
    result = about | {"benchmark": "frontier", "word": "measured", "setting": setting, "goal": GOAL, "rows": rows}
    print(f"written: {save('frontier', result, asked.into)}")


if __name__ == "__main__":
    main()
