"""The gain of a replica that sends late rounds at a coarser level. Five minutes on one core.

    python benchmarks/deadlines.py [--seeds 2] [--into FILE]

On uplinks whose rate changes, with `streaming_sign` on the model nano, two replicas and steps of 0.1 s, it compares each level
alone, `Levelled`, which knows how long its rounds took, and an oracle, which knows the trace. *Stalls and utilisation are
simulated*, in virtual time. No trace is recorded: one is a step down and up, two are drawn (a mobile uplink whose rate changes
every second, and a cable in the evening, every ten seconds). *Losses are measured*: each run is trained with the levels that its
rounds had in virtual time, equal on all replicas.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save

import thinwire as tw
from thinwire.codecs import E3M0, Int, Levelled, Sign
from thinwire.lm.run import Run
from thinwire.lm.setup import learning_rate, make_model
from thinwire.lm.tokenizer import open_corpus
from thinwire.packet import HEADER_NBYTES
from thinwire.runtime.deadlines import Deadlines
from thinwire.runtime.fragment_state import RoundUpdate
from thinwire.runtime.pipeline import RoundPipeline
from thinwire.simulate.deadlines import Choose, Played, RateTrace, fixed, observed, oracle, play

LEVELS = Levelled((Int(8), E3M0(32), Sign(block=512)))
STEPS, STEP_SECONDS = 300, 0.1
RUN = Run.of(model="nano", batch=4, sequence=128, replicas=2, steps=STEPS)
STRATEGY = tw.streaming_sign(codec=LEVELS)
Levels = dict[tuple[int, int], int]


def walk(seed: int, every: float, middle: float, step: float, least: float, delay: float) -> RateTrace:
    """Returns a random walk of a rate by factors, which returns to `middle`."""
    drawn, at, rates = random.Random(seed), 0.0, list[float]()
    for _ in range(int(2 * STEPS * STEP_SECONDS / every)):
        at = 0.9 * at + drawn.gauss(0.0, step)
        rates.append(max(least, middle * math.exp(at)))
    return RateTrace(tuple(every * k for k in range(len(rates))), tuple(rates), delay)


def traces(full: int) -> dict[str, RateTrace]:
    """Returns traces around the rate at which the finest level, `full` bytes in a round, just arrives in time."""
    needed = 8 * full / (STRATEGY.schedule.delay * STEP_SECONDS)
    return {
        "falls to a sixth": RateTrace((0.0, 8.0, 30.0), (2 * needed, needed / 6, 2 * needed), 0.03),
        "mobile": walk(1, 1.0, needed / 2, 0.4, needed / 6, 0.05),
        "evening": walk(2, 10.0, needed / 4, 0.5, needed / 6, 0.02),
    }


def trained(levels: Levels, seed: int) -> float:
    """Returns the held-out loss of a run whose rounds have these levels."""

    def set_level(self: RoundPipeline, update: RoundUpdate, now: float, seconds: float) -> None:
        update.codec = replace(LEVELS, level=levels.get((update.of.index, update.number), 0))

    run = RUN.changed(seed=seed)
    corpus = open_corpus(run.data, run.model.model)

    def replica(group: tw.Group) -> float:
        model = make_model(run.model, run.data.sequence, run.seed, corpus.vocabulary)
        optimizer = tw.pieces.inner_optimizers.AdamW().make(model, run.lr, run.optimizer.weight_decay)
        with tw.Replica(STRATEGY, model, optimizer, group) as attached:
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = learning_rate(run, step + 1)
                model(*corpus.batch(seed, group.rank, 2, step, run.data.batch, run.data.sequence)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
            attached.finish()
        with torch.no_grad():
            held = corpus.held_out(run.data.batch, run.data.sequence, 32)
            return statistics.fmean(float(model(*batch).loss) for batch in held)

    kept, RoundPipeline._set_level = RoundPipeline._set_level, set_level  # type: ignore[method-assign]
    try:
        return tw.run_threads(2, replica, timeout=600.0)[0]
    finally:
        RoundPipeline._set_level = kept  # type: ignore[method-assign]


def sizes() -> list[list[int]]:
    """Returns the bytes of a round of each fragment at each level."""
    model = make_model(RUN.model, RUN.data.sequence, RUN.seed, open_corpus(RUN.data, RUN.model.model).vocabulary)
    every = [replace(LEVELS, level=level) for level in range(len(LEVELS.codecs))]
    return [
        [HEADER_NBYTES + sum(part.nbytes for part in one.layout(fragment.numel)) for one in every]
        for fragment in STRATEGY.partition.fragments(model)
    ]


def rows(seeds: int) -> list[dict[str, Any]]:
    nbytes, losses, made = sizes(), dict[tuple[tuple[tuple[int, int], int], ...], list[float]](), list[dict[str, Any]]()
    for name, trace in traces(max(one[0] for one in nbytes)).items():
        ways: dict[str, tuple[Choose, Deadlines]] = {
            str(codec): (fixed(level), Deadlines()) for level, codec in enumerate(LEVELS.codecs)
        }
        known = Deadlines()
        ways |= {"Levelled": (observed(known), known), "oracle": (oracle(trace), Deadlines())}
        for way, (choose, hears) in ways.items():
            played: Played = play(trace, STRATEGY.schedule, nbytes, STEPS, STEP_SECONDS, choose, hears)
            key = tuple(sorted(played.levels.items()))
            if key not in losses:
                losses[key] = [trained(played.levels, seed) for seed in range(seeds)]
            made.append(
                {
                    "trace": name, "way": way, "late": len(played.stalls), "rounds": len(played.levels),
                    "stall_seconds": played.stall_seconds, "utilization": played.utilization, "nbytes": played.nbytes,
                    "losses": losses[key], "levels": [list(played.levels.values()).count(k) for k in range(len(LEVELS.codecs))],
                }
            )  # fmt: skip
            print(
                f"{name:28} {way:60} {played.stall_seconds:6.2f} s stalled, {played.utilization:.1%}, loss {losses[key]}",
                flush=True,
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/deadlines.json")
    asked = parser.parse_args()
    about = provenance()
    setting = {
        "strategy": repr(STRATEGY),
        "model": "nano",
        "steps": STEPS,
        "step_seconds": STEP_SECONDS,
        "seeds": asked.seeds,
    }
    result = about | {
        "benchmark": "deadlines",
        "word": "simulated, losses measured",
        "setting": setting,
        "rows": rows(asked.seeds),
    }
    print(f"written: {save('deadlines', result, asked.into)}")


if __name__ == "__main__":
    main()
