"""Does any model train under Thinwire? Every job in examples/workloads with data-parallel training, streaming deltas and compressed gradients.

    python benchmarks/zoo.py [--seeds 2] [--link 20mbit,40ms] [--quick] [--only digits speech] [--out FOLDER] [--into FILE]

Equal samples for all methods: two replicas as threads of one process, the job's own optimizer and its own `evaluate`, whose losses stand
side by side. Each method has its defaults: nobody tuned them to these models. Figures are of the agreed weights at the end. No time of a
network is in them; --link trains seed 0 again over an emulated link, for the share of time in inner steps. `make zoo` runs this without
--link; docs/zoo.md says what was found. An interrupted run continues with the same --out.
--quick: one seed and a tenth of the steps, thrown away: whether all run, nothing about their loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from provenance import HERE, provenance, save

from thinwire.app.cli import main as thinwire

JOBS = HERE.parent / "examples" / "workloads"
STEPS = {"digits": 240, "speech": 120, "onsets": 240, "experts": 300, "graph": 120, "behaviour": 200, "agents": 60}
FINER = "streaming_sign(codec=Sign(block=64))"
METHODS = ("data_parallel", "streaming_sign", FINER, "streaming_diloco", "qsgd")
LINKED = ("compute_utilization", "wall_seconds", "eval_losses")
VARIANTS = {"digits": ("streaming_sign", ("--buffers", "local"))}  # a method with options, beside the others


def compared(job: str, methods: Sequence[str], options: Sequence[str], steps: int, seeds: int, out: Path) -> list[dict]:
    """The rows of `thinwire compare`; raises `SystemExit` with what it said where a method failed."""
    command = ["compare", "--job", str(JOBS / f"{job}.py"), "--strategies", *methods, "--seeds", str(seeds), *options]
    command += ["--steps", str(steps), "--eval-every", str(steps), "--checkpoint-every", "0", "--carrier", "threads"]
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        code = thinwire([*command, "--out", str(out), "--json"])
    rows = json.loads(told.getvalue().strip().splitlines()[-1])["strategies"]
    if code:
        raise SystemExit(f"{job}: {rows}")
    return [{"workload": job, **row, "strategy": " ".join([row["strategy"], *options])} for row in rows]


def shown(row: dict) -> str:
    named = row["losses"] or {"loss": row["eval_loss"]}
    spread = f" ± {row['eval_loss_spread']:.4f}" if row["eval_loss_spread"] is not None else ""
    first, *rest = (f"{name} {value:.4f}" for name, value in named.items())
    return (
        f"{row['workload']:<10} {row['strategy']:<40} {row['bits_per_parameter_per_step']:8.3f} bits  "
        f"{row['wall_seconds']:6.1f} s  {', '.join([first + spread, *rest])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--link", help="train seed 0 of each again over this emulated link, such as 20mbit,40ms")
    parser.add_argument("--quick", action="store_true", help="one seed and a tenth of the steps, thrown away")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="these workloads alone")
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/zoo.json")
    asked = parser.parse_args()
    seeds, share, about = (1, 10, provenance()) if asked.quick else (asked.seeds, 1, provenance())
    began, rows = time.monotonic(), list[dict]()
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        for job in asked.only:
            found = compared(job, METHODS, (), STEPS[job] // share, seeds, out / job)
            if job in VARIANTS:
                method, options = VARIANTS[job]
                found += compared(job, [method], options, STEPS[job] // share, seeds, out / f"{job}-variant")
            if asked.link:
                over = compared(job, METHODS, ("--link", asked.link), STEPS[job] // share, 1, out / f"{job}-link")
                for row, linked in zip(found, over):
                    row["over link"] = {"link": asked.link, "word": linked["provenance"]} | {
                        name: linked[name] for name in LINKED
                    }
            print("\n".join(map(shown, found)), flush=True)
            rows += found
        setting = {
            "link": asked.link,
            "replicas": 2,
            "carrier": "threads",
            "seeds": seeds,
            "methods": "their defaults",
            "steps": STEPS,
        }
        setting["seconds in all"] = round(time.monotonic() - began)
        result = about | {"benchmark": "zoo", "word": "measured", "setting": setting, "rows": rows}
        into = asked.into or (Path(thrown_away) / "zoo.json" if asked.quick or len(asked.only) < len(STEPS) else None)
        print(f"written: {save('zoo', result, into)}")


if __name__ == "__main__":
    main()
