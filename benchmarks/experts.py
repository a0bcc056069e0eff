"""Experts of unequal steps or size at equal compute, HDEE's three configurations: is their mixture better than equal experts, or one model?

    python benchmarks/experts.py [--seeds 2] [--quick] [--out FOLDER] [--into FILE]

Three domains of unequal difficulty, twice: sources of random letters, and three packages of Python's standard library. A seed model is
trained on all three, then an expert for each, all by `thinwire train` and `branch`. Every configuration has the same compute in all,
counted as operations times tokens: that of three experts of size "tiny". What differs from the paper (arXiv 2502.19385): its sizes are
close (90, 115 and 135 million parameters) with equal steps; ours are "nano" for the easy domain and "tiny" for the others, with equal
operations for each expert. `one model` goes on from the seed on all three texts, for the operations of three experts.
--quick: one seed and few steps, thrown away: whether all run, nothing about their loss.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from provenance import HERE, provenance, save

from thinwire.app.cli import main as thinwire
from thinwire.app.trainer.model import SIZES

DOMAINS = ("easy", "medium", "hard")
PACKAGES = {"easy": "encodings", "medium": "asyncio", "hard": "pydoc_data"}  # tables, code, prose
SHARES = {"easy": 0.75, "medium": 1.0, "hard": 1.25}  # of the steps: the paper's 300, 400 and 500
SEQUENCE = 64
EVALUATE = ["--eval-batches", 8]
SMALL = ["--batch", "8", "--sequence", str(SEQUENCE), "--carrier", "threads", "--checkpoint-every", "0"]


def letters(folder: Path) -> dict[str, Path]:
    """The texts of examples/13_experts.py."""
    spec = importlib.util.spec_from_file_location("thirteen", HERE.parent / "examples" / "13_experts.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        (folder / f"{domain}.txt").write_text(example.text_of(domain, 200_000))
    return {domain: folder / f"{domain}.txt" for domain in DOMAINS}


def packages(folder: Path) -> dict[str, Path]:
    found = {domain: importlib.util.find_spec(name) for domain, name in PACKAGES.items()}
    return {domain: Path(spec.origin).parent for domain, spec in found.items() if spec and spec.origin}


def said(*arguments: object) -> dict:
    """The JSON of a command; what it showed goes nowhere unless it failed."""
    out, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(shown):
        code = thinwire([*map(str, arguments), "--json"])
    if code:
        raise SystemExit(f"{arguments}: {shown.getvalue()[-2000:]}")
    return json.loads(out.getvalue().strip().splitlines()[-1])


def one_seed(texts: dict[str, Path], steps: int, seed: int, out: Path) -> dict[str, dict[str, float]]:
    """Loss on each domain's held-out text, by configuration."""
    each = [str(texts[domain]) for domain in DOMAINS]
    flops = {size: SIZES[size].flops_per_token(SEQUENCE) * 2 * 8 * SEQUENCE for size in ("nano", "tiny")}  # of a step
    more = round(steps * flops["tiny"] / flops["nano"])
    for size, its in (("tiny", steps), ("nano", more)):
        train = ["train", "--model", size, "--steps", its, "--text", *each, "--seed", seed, *SMALL]
        said(*train, "--eval-every", its, "--out", out / size)

    def branch(size: str, domain: str, ensemble: str, budget: float) -> None:
        options = ["--domain", domain, "--text", texts[domain], "--flops", budget, "--eval-every", 10**6]
        said("branch", out / size, *options, "--out", out / ensemble)

    whole = steps * flops["tiny"]
    for domain in DOMAINS:
        branch("tiny", domain, "equal", whole)
        branch("tiny", domain, "unequal steps", whole * SHARES[domain])
        branch("nano" if domain == "easy" else "tiny", domain, "unequal sizes", whole)
    further = ["--text", *each, "--lr", 0.1 * 10.24 / 96**1.5, "--steps", 3 * steps, "--seed", seed, *SMALL]
    model = out / "tiny" / "model.safetensors"
    said("train", "--model", model, *further, "--eval-every", 10**6, "--out", out / "one")

    losses = {}
    for name, folder in {"seed": "tiny", "one model": "one"}.items():
        losses[name] = [
            row["losses"]["loss"] for row in said("evaluate", out / folder, *EVALUATE, "--text", *each)["texts"]
        ]
    for name in ("equal", "unequal steps", "unequal sizes"):
        rows = said("evaluate", out / name, *EVALUATE, "--text", *each)["texts"]
        losses[f"experts, {name}"] = [row["losses"]["mixture"] for row in rows]
        if name == "equal":
            losses["their mean of weights"] = [row["losses"]["mean of weights"] for row in rows]
    return {name: dict(zip(DOMAINS, found)) for name, found in losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, thrown away")
    parser.add_argument("--out", type=Path, help="keep the runs here; without, they are thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/experts.json")
    asked = parser.parse_args()
    seeds, steps, about = (1, 6, provenance()) if asked.quick else (asked.seeds, 80, provenance())
    began, rows = time.monotonic(), list[dict]()
    with tempfile.TemporaryDirectory() as thrown_away:
        out = asked.out or Path(thrown_away) / "runs"
        for kind, make in {"letters": letters, "packages": packages}.items():
            texts = make(out / "texts")
            found = [one_seed(texts, steps, seed, out / kind / str(seed)) for seed in range(seeds)]
            for name in found[0]:
                each = {domain: [one[name][domain] for one in found] for domain in DOMAINS}
                row = {"texts": kind, "model": name, "losses": {d: statistics.fmean(v) for d, v in each.items()}}
                row["spread"] = {d: statistics.stdev(v) if len(v) > 1 else None for d, v in each.items()}
                rows.append(row | {"seeds": seeds})
                print(kind, name, row["losses"], file=sys.stderr, flush=True)
        setting = {"replicas": 2, "carrier": "threads", "strategy": "streaming_sign", "sequence": SEQUENCE, "batch": 8}
        setting |= {
            "steps of an expert": steps,
            "packages": PACKAGES,
            "seconds in all": round(time.monotonic() - began),
        }
        result = about | {"benchmark": "experts", "word": "measured", "setting": setting, "rows": rows}
        into = asked.into or (Path(thrown_away) / "experts.json" if asked.quick else None)
        print(f"written: {save('experts', result, into)}")


if __name__ == "__main__":
    main()
