"""The loss and the bits of every method that trains a model from the start, at equal tokens, over several seeds.

    python benchmarks/family.py [--seeds 3] [--steps 2000] [--only NAME ...] [--quick] [--out FOLDER] [--into FILE]

Two replicas are processes. Model, text (Python's standard library) and batches are equal for all methods.
The inner optimizer is AdamW unless a method has its own. Every method has the defaults of its paper or of Thinwire, including the
learning rate; docs/family.md names what was chosen by trial. Control variates and FedAvg use plain SGD at its rate, like recipes
with SGD.
--only: these recipes alone, the control first: `--only data_parallel streaming_sign --steps 500 --into benchmarks/results/defaults.json`.
`just_one_byte` and `flasc` are not compared, because they tune a trained model. An interrupted run continues with the same --out.
`make tables` writes docs/family.md and its picture from the result.
--quick: one seed and 100 steps, in a separate file. It shows that all methods run, and nothing about their loss.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from provenance import provenance, save
from quality import compared, shown

from thinwire.app.trainer.run import LR, Run
from thinwire.catalogue.methods import NAMED, RECIPES
from thinwire.lab.gradients.recipes import SGD_RATE

SETTINGS = {"model": "nano", "batch": 16, "sequence": 128, "checkpoint_every": 0}
FEDERATED = ("fedavg", "scaffold", "scallion", "scafcom")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=RECIPES, metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="one seed and 100 steps; the result goes to OUT/family.json"
    )
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/family.json")
    asked = parser.parse_args()
    seeds, steps = (1, 100) if asked.quick else (asked.seeds, asked.steps)
    about = provenance()  # before this benchmark adds to the load
    settings = SETTINGS | {"steps": steps}
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        into = asked.into or (out / "family.json" if asked.quick else None)
        rows = compared(asked.only or tuple(RECIPES), out / "recipes", seeds, settings)
        if not asked.only:
            rows += compared(FEDERATED, out / "federated", seeds, settings | {"lr": LR * SGD_RATE})
        for row in rows:
            row["composition"] = repr(NAMED[row["strategy"]]())
            print(shown(row, rows[0]))
        given = dict.fromkeys(FEDERATED, LR * SGD_RATE)
        rates = {
            name: given.get(name, Run.of(model=SETTINGS["model"], strategy=name).lr)
            for name in (row["strategy"] for row in rows)
        }
        setting = settings | {"replicas": 2, "every method": "its defaults", "lr": rates}
        result = about | {"benchmark": "family", "word": "measured", "setting": setting, "rows": rows}
        print(f"written: {save('family', result, into)}")


if __name__ == "__main__":
    main()
