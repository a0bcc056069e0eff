"""Training in which two of eight replicas lie: every attack against every rule, beside honest training.

    python benchmarks/robust.py [--steps 100] [--into FILE] [--quick]

Eight replicas are threads of one process with one thread of torch. They train the nano model on Python's standard library by DiLoCo
with a round every 10 inner steps. Loss is that of the agreed anchors on held-out text. There is one seed, so differences below about
0.02 are noise. Rules that use single coordinates or inner products get the deltas in fp32. Each rule knows how many replicas lie.
Costs are of the aggregate alone, without liars: the median CPU time on the deltas of a million values.
An interrupted run continues with the same --into. `make tables` writes docs/robust.md from the result.
--quick: 20 steps of two cells, in a separate file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from provenance import HERE, provenance, save

import thinwire as tw
from thinwire.app.jobs.base import Share
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.text_job import TextJob
from thinwire.codecs import Identity
from thinwire.exchange.products import inner_products
from thinwire.pieces.aggregate import Aggregate, Values
from thinwire.rng import Key

REPLICAS, LIARS, EVERY = 8, 2, 10
SETTINGS = {"model": "nano", "batch": 4, "sequence": 32, "lr": 6e-3, "strategy": "diloco", "every": EVERY}
RULES = (
    *("Mean()", "Median()", "TrimmedMean(2)", "GeometricMedian()", "CenteredClipping()", "MultiKrum(2)"),
    *("NearestNeighbourMixing(TrimmedMean(2), 2)", "Krum(2)", "FlagAggregator()", "FoolsGold()"),
)
ATTACKS = (
    *("none", "SignFlip()", "IPM(2.0)", "ALIE(1.5)", "NotFinite('nan')", "Gaussian(0.1)", "LabelFlip()", "IPM(0.1)"),
)


def loss(rule: str, attack: str, steps: int) -> tuple[float, int]:
    """Returns the loss of the anchors on held-out text at the end (infinite if training broke), and the number of refused rounds."""
    lies = {} if attack == "none" else {"attack": attack, "liars": LIARS}
    run = Run.of(**SETTINGS, **lies, aggregate=rule, steps=steps, replicas=REPLICAS)
    refused: list[int] = []

    def replica(group: tw.Group) -> float:
        job, cpu = TextJob(run, None), torch.device("cpu")
        job.begin(Share(run.seed, group.rank, group.size))
        model = job.make_model()
        optimizer = run.plan.inner.make(model, run.lr, run.optimizer.weight_decay)

        def observe(event: str, step: int, **fields: object) -> None:
            if event == "refused" and group.rank == 0:
                refused.append(step)

        with tw.Replica(run.make_strategy(), model, optimizer, group, observer=observe):
            for step in range(1, steps + 1):
                for settings in optimizer.param_groups:
                    settings["lr"] = learning_rate(run, step)
                optimizer.zero_grad()
                job.loss(model, step, cpu).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
                optimizer.step()
        with torch.no_grad():
            return job.evaluation(model, cpu)["loss"] if group.rank == 0 else 0.0

    return tw.run_threads(REPLICAS, replica, timeout=600.0)[0], len(refused)


def seconds(rule: str, repeats: int = 5, numel: int = 1 << 20) -> float:
    """Returns the median CPU time in which the deltas of eight replicas are aggregated, range by range, as `Direct` does."""
    aggregate: Aggregate = tw.catalogue.parsing.parse(rule)
    x = torch.randn(REPLICAS, numel, generator=torch.Generator().manual_seed(0))
    span, taken = 1 << 17, []
    values = [
        [
            Values(Identity(), row[at : at + span].contiguous().view(torch.uint8), Key(sender=i), span)
            for i, row in enumerate(x)
        ]
        for at in range(0, numel, span)
    ]
    memory = aggregate.init(span, REPLICAS)
    for _ in range(repeats):
        began, chosen = time.process_time(), aggregate
        if aggregate.needs_products:
            products = torch.zeros(REPLICAS, REPLICAS, dtype=torch.float64)
            for part in values:
                after = {name: torch.empty_like(kept) for name, kept in memory.items()}
                products += inner_products(
                    aggregate.measured(torch.stack([one.decoded() for one in part]), memory, after)
                )
            chosen = aggregate.given(products, Key())
        for part in values:
            chosen.into(torch.zeros(span), part)
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="20 steps of two cells, into a folder that is thrown away")
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/robust.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.quick:
        asked.steps, asked.into = 20, Path(tempfile.mkdtemp()) / "robust.json"
    rules, attacks = (RULES[:2], ATTACKS[:1]) if asked.quick else (RULES, ATTACKS)
    into = asked.into or HERE / "results" / "robust.json"
    setting = SETTINGS | {"steps": asked.steps, "replicas": REPLICAS, "liars": LIARS, "seeds": 1}
    found = json.loads(into.read_text()) if into.exists() else {}
    if found.get("setting") != setting:
        found = provenance() | {"benchmark": "robust", "word": "measured", "setting": setting, "rows": [], "costs": {}}
    done = {(row["rule"], row["attack"]) for row in found["rows"]}
    for rule in rules:
        if rule not in found["costs"]:
            found["costs"][rule] = seconds(rule)
    for attack in attacks:
        for rule in rules:
            if (rule, attack) not in done:
                began = time.process_time()
                end, refused = loss(rule, attack, asked.steps)
                spent = time.process_time() - began
                found["rows"].append(
                    {"rule": rule, "attack": attack, "loss": end, "refused": refused, "cpu_seconds": spent}
                )
                print(f"{attack:<22} {rule:<48} {end:8.4f}  {refused} refused  {spent:.1f} s", flush=True)
                save("robust", found, into)


if __name__ == "__main__":
    main()
