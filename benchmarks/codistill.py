"""Codistillation of three replicas of different size, beside each of them alone, at equal steps.

    python benchmarks/codistill.py [--seeds 3] [--steps 120] [--quick] [--out FOLDER] [--into FILE]

Replicas of 0.5, 2 and 7 million parameters train on shares of Python's standard library, as threads of one process, with the
defaults of `codistill` except probe and warm-up, which are set for so short a run. There are three arms at equal steps; each
replica has the same text, order and first weights in all of them:

- alone: λ = 0, which equals each model by itself, bit for bit (tests/lab/methods/test_codistill.py holds that)
- talking: codistill
- alone, larger batch: λ = 0, and as many more sequences as codistillation costs: its probe set is run forward twice and backward
  once, so two windows cost 2.67 sequences. Compute is equal, text is not.

An interrupted run continues with the same --out.
--quick: one seed and few steps, whose results are deleted. It shows that all arms run, and nothing about their loss.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from provenance import provenance, save

from thinwire.app.cli import main as thinwire
from thinwire.app.records.run_record import RunRecord
from thinwire.lab.methods import codistill

MODELS = ("tiny", "2m", "mini")
SEQUENCE, BATCH, PROBE = 64, 4, 128
LARGER = BATCH + round(PROBE / SEQUENCE * 4 / 3)


def arms(steps: int) -> dict[str, tuple[str, int]]:
    """Returns the strategy and the batch of each arm."""
    settings = f"probe={PROBE}, warmup={steps // 5}"
    return {
        "alone": (f"codistill({settings}, weight=0)", BATCH),
        "talking": (f"codistill({settings})", BATCH),
        "alone, larger batch": (f"codistill({settings}, weight=0)", LARGER),
    }


class Run(NamedTuple):
    """The evaluation loss of each replica, the bytes that one replica sent, and the commit."""

    losses: list[float]
    nbytes: int
    commit: str


def one_run(strategy: str, batch: int, steps: int, seed: int, out: Path) -> Run:
    """Trains, unless `out` holds this run already."""
    command = ["train", "--strategy", strategy, "--models", *MODELS, "--replicas", len(MODELS), "--carrier", "threads"]
    command += ["--batch", batch, "--sequence", SEQUENCE, "--steps", steps, "--eval-every", steps, "--eval-batches", 32]
    if not (out / "summary.json").exists():
        shutil.rmtree(out, ignore_errors=True)  # the rest of an interrupted run
        train(command, seed, out)
    record = RunRecord.load(out)
    commit = str(record.replicas[0].start.machine["commit"])
    return Run(list(record.summary.losses.values()), record.summary.wire_bytes_sent, commit)


def train(command: list, seed: int, out: Path) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = thinwire([*map(str, command), "--seed", str(seed), "--checkpoint-every", "0", "--out", str(out)])
    if code:
        raise SystemExit(f"{command}: {shown.getvalue()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, thrown away")
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/codistill.json")
    asked = parser.parse_args()
    seeds, steps, about = (1, 20, provenance()) if asked.quick else (asked.seeds, asked.steps, provenance())
    began, found = time.monotonic(), {arm: list[Run]() for arm in arms(steps)}
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        into = asked.into or (Path(thrown_away) / "codistill.json" if asked.quick else None)
        for seed, arm in sorted(product(range(seeds), found), key=lambda each: each[1] == "alone, larger batch"):
            strategy, batch = arms(steps)[arm]
            found[arm].append(one_run(strategy, batch, steps, seed, out / f"{arm}-{seed}"))
            print(f"seed {seed}, {arm}: {found[arm][-1]}", file=sys.stderr, flush=True)
            rows = [
                row
                for arm, runs in found.items()
                for row in (rows_of(arm, runs, found["alone"], steps) if runs else [])
            ]
            setting = {"models": MODELS, "carrier": "threads", "steps": steps, "sequence": SEQUENCE, "batch": BATCH}
            setting |= {"larger batch": LARGER, "strategy": arms(steps)["talking"][0]}
            setting |= {"most bytes in a round": codistill(probe=PROBE).nbytes_per_period(0, len(MODELS))}
            setting |= {"trained at": sorted({run.commit for runs in found.values() for run in runs})}
            setting |= {"seconds of this process": round(time.monotonic() - began)}
            result = about | {"benchmark": "codistill", "word": "measured", "setting": setting, "rows": rows}
            written = save("codistill", result, into)  # after every run, so that an interruption keeps its results
        for row in rows:
            print(f"{row['model']:<6} {row['arm']:<20} {row['eval_loss']:.4f} ± {row['eval_loss_spread'] or 0:.4f}")
        print(f"written: {written}")


def rows_of(arm: str, runs: list[Run], alone: list[Run], steps: int) -> list[dict]:
    """Returns a row for each model: its losses, and the differences from the same model alone, seed by seed."""
    rows = list[dict]()
    for number, model in enumerate(MODELS):
        losses = [run.losses[number] for run in runs]
        change = [loss / run.losses[number] - 1 for loss, run in zip(losses, alone)]
        rows.append(
            {
                "model": model, "arm": arm, "seeds": len(runs), "eval_losses": losses, "eval_loss": statistics.fmean(losses),
                "eval_loss_spread": statistics.stdev(losses) if len(losses) > 1 else None,
                "against alone": statistics.fmean(change),
                "against alone, spread": statistics.stdev(change) if len(change) > 1 else None,
                "bytes sent a step": statistics.fmean(run.nbytes for run in runs) / steps,
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
