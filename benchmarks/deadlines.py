"""The gain of a replica that sends late rounds at a coarser level, or skips them. Some 20 s for each row and seed on one core.

    python benchmarks/deadlines.py [--trace NAME=FILE ...] [--seeds 3] [--into FILE]

On uplinks whose rate changes, with `streaming_sign` on the model nano, two replicas and steps of half a second, it compares each
level alone, `Levelled`, which knows how long its rounds took, and an oracle, which knows the trace; both also with skipped rounds.
*Stalls and utilization are simulated*, in virtual time. A step down and up and two drawn traces are always there (a mobile uplink
whose rate changes every second, and a cable in the evening, every ten seconds); recorded ones are given as files
(`RateTrace.load`). The model's bytes are scaled so that the finest level alone is busy for 60 % of the time on each trace.
*Losses are measured*: each run is trained with the levels that its rounds had in virtual time, equal on all replicas.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from provenance import provenance, save

import thinwire as tw
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate, make_model
from thinwire.app.trainer.tokenizer import open_corpus
from thinwire.codecs import E3M0, Int, Sign
from thinwire.comm.rates import RateTrace
from thinwire.drivers.flight import Flight
from thinwire.lab.codecs.deadlines import Deadlines
from thinwire.lab.codecs.levelled import Levelled
from thinwire.lab.codecs.pacer import DeadlinePacer
from thinwire.lab.simulate.deadlines import Choose, Played, fixed, observed, oracle, play
from thinwire.packet import HEADER_NBYTES
from thinwire.pieces.schedule import Staggered

SKIPS = 2
LEVELS = Levelled((Int(8), E3M0(32), Sign(block=512)), skips=SKIPS)
STEPS, STEP_SECONDS, BUSY = 300, 0.5, 0.6
RUN = Run.of(model="nano", batch=4, sequence=64, replicas=2, steps=STEPS)
STRATEGY = tw.streaming_sign(every=7, delay=5, codec=LEVELS)
SCHEDULE = cast(Staggered, STRATEGY.schedule)
Levels = dict[tuple[int, int], int]


def walk(seed: int, every: float, middle: float, step: float, least: float, delay: float) -> RateTrace:
    """Returns a random walk of a rate by factors, which returns to `middle`."""
    drawn, at, rates = random.Random(seed), 0.0, list[float]()
    for _ in range(int(3 * STEPS * STEP_SECONDS / every)):
        at = 0.9 * at + drawn.gauss(0.0, step)
        rates.append(max(least, middle * math.exp(at)))
    return RateTrace(tuple(every * k for k in range(len(rates))), tuple(rates), delay)


def traces() -> dict[str, RateTrace]:
    """Returns the traces that are not recorded."""
    return {
        "falls to a sixth": RateTrace((0.0, 40.0, 150.0), (2e6, 1e6 / 6, 2e6), 0.03),
        "mobile (drawn)": walk(1, 1.0, 1e6, 0.4, 1e6 / 3, 0.05),
        "evening (drawn)": walk(2, 10.0, 1e6, 0.5, 1e6 / 3, 0.02),
    }


def scaled(trace: RateTrace, payloads: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Returns a factor, and the bytes of rounds (a skipped one last) if the model were so many times as large: the finest level alone
    trains for the share BUSY of the time."""

    def packets(factor: float) -> list[list[int]]:
        return [[*(HEADER_NBYTES + int(factor * one) for one in of), HEADER_NBYTES + 1] for of in payloads]

    low, high = 1e-4, 1e6
    for _ in range(50):
        middle = math.sqrt(low * high)
        played = play(trace, SCHEDULE, packets(middle), STEPS, STEP_SECONDS, fixed(0), Deadlines())
        low, high = (middle, high) if played.utilization > BUSY else (low, middle)
    return low, packets(low)


def trained(levels: Levels, seed: int) -> float:
    """Returns the held-out loss of a run whose rounds have these levels."""

    def set_level(self: DeadlinePacer, update: Flight, now: float, seconds: float) -> None:
        update.codec = replace(LEVELS, level=levels.get((update.fragment.index, update.round.number), 0))

    run = RUN.changed(seed=seed)
    corpus = open_corpus(run.data, run.model.model)

    def replica(group: tw.Group) -> float:
        model = make_model(run.model, run.data.sequence, run.seed, corpus.vocabulary)
        optimizer = tw.pieces.inner_optimizers.AdamW().make(model, run.lr, run.optimizer.weight_decay)
        with tw.Replica(STRATEGY, model, optimizer, group) as attached:
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = learning_rate(run, step + 1)
                model(
                    *corpus.batch(seed, group.rank, 2, step, run.data.largest_batch, run.data.sequence)
                ).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
            attached.finish()
        with torch.no_grad():
            held = corpus.held_out(32 * run.data.largest_batch, run.data.sequence, run.data.largest_batch)
            return statistics.fmean(float(model(*batch).loss) for batch in held)

    kept, DeadlinePacer.before_send = DeadlinePacer.before_send, set_level  # type: ignore[method-assign]
    try:
        return tw.run_threads(2, replica, timeout=600.0)[0]
    finally:
        DeadlinePacer.before_send = kept  # type: ignore[method-assign]


def sizes() -> list[list[int]]:
    """Returns the bytes of the payload of each fragment at each level."""
    model = make_model(RUN.model, RUN.data.sequence, RUN.seed, open_corpus(RUN.data, RUN.model.model).vocabulary)
    every = [replace(LEVELS, level=level) for level in range(len(LEVELS.codecs))]
    return [
        [sum(part.nbytes for part in one.layout(fragment.numel)) for one in every]
        for fragment in STRATEGY.partition.fragments(model)
    ]


def rows(seeds: int, given: dict[str, RateTrace]) -> list[dict[str, Any]]:
    payloads, losses, made = (
        sizes(),
        dict[tuple[tuple[tuple[int, int], int], ...], list[float]](),
        list[dict[str, Any]](),
    )
    for name, trace in (given | traces()).items():
        factor, nbytes = scaled(trace, payloads)
        known = [Deadlines(), Deadlines()]
        ways: dict[str, tuple[Choose, Deadlines, int]] = {
            str(codec): (fixed(level), Deadlines(), 0) for level, codec in enumerate(LEVELS.codecs)
        }
        ways |= {
            "Levelled": (observed(known[0]), known[0], 0),
            f"Levelled, skips={SKIPS}": (observed(known[1]), known[1], SKIPS),
            "oracle": (oracle(trace), Deadlines(), 0),
            f"oracle, skips={SKIPS}": (oracle(trace), Deadlines(), SKIPS),
        }
        for way, (choose, hears, skips) in ways.items():
            packets = nbytes if skips else [of[:-1] for of in nbytes]
            played: Played = play(trace, SCHEDULE, packets, STEPS, STEP_SECONDS, choose, hears, skips)
            key = tuple(sorted(played.levels.items()))
            if way == "oracle":  # only its stalls
                losses[key] = []
            elif not losses.get(key):
                losses[key] = [trained(played.levels, seed) for seed in range(seeds)]
            made.append(
                {
                    "trace": name, "way": way, "late": len(played.stalls), "rounds": len(played.levels), "factor": factor,
                    "stall_seconds": played.stall_seconds, "utilization": played.utilization, "nbytes": played.nbytes,
                    "longest_stall_seconds": max(played.stalls, default=0.0), "losses": losses[key],
                    "levels": [list(played.levels.values()).count(k) for k in range(len(LEVELS.codecs) + 1)],
                }
            )  # fmt: skip
            print(
                f"{name:24} {way:60} {played.stall_seconds:6.2f} s stalled, {played.utilization:.1%}, loss {losses[key]}",
                flush=True,
            )
    return made


def recorded(texts: list[str]) -> tuple[dict[str, RateTrace], list[dict[str, Any]]]:
    """Returns the traces of NAME=FILE, and what identifies them."""
    found, facts = dict[str, RateTrace](), list[dict[str, Any]]()
    for text in texts:
        name, _, path = text.partition("=")
        found[name] = trace = RateTrace.load(Path(path), delay_seconds=0.05)
        rates = [trace.rates[k] for k in range(len(trace.rates)) if trace.begins[k] < STEPS * STEP_SECONDS]
        low, _, high = statistics.quantiles(rates, n=4)
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        facts.append(
            {
                "trace": name, "file": Path(path).name, "sha256": digest, "seconds": trace.period, "mean_bits_per_second": trace.mean,
                "quartiles_bits_per_second": [low, high], "without_a_bit": rates.count(0.0) / len(rates),
            }
        )  # fmt: skip
    return found, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--trace", action="append", default=[], metavar="NAME=FILE", help="a recorded trace; may be repeated"
    )
    parser.add_argument("--into", type=Path, help="where the result goes; without, benchmarks/results/deadlines.json")
    asked = parser.parse_args()
    about, (given, facts) = provenance(), recorded(asked.trace)
    setting = {
        "strategy": repr(STRATEGY),
        "model": "nano",
        "steps": STEPS,
        "step_seconds": STEP_SECONDS,
        "seeds": asked.seeds,
        "traces": facts,
    }
    result = about | {
        "benchmark": "deadlines",
        "word": "simulated, losses measured",
        "setting": setting,
        "rows": rows(asked.seeds, given),
    }
    print(f"written: {save('deadlines', result, asked.into)}")


if __name__ == "__main__":
    main()
