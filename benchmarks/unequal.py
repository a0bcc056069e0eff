"""The cost of unequal machines: time to a given loss and loss at equal tokens, for replicas 1, 2 and 4 times as slow as the fastest.

    python benchmarks/unequal.py [--steps 120] [--seeds 0 1 2] [--into FILE] [--emulated | --simulated | --sites | --time] [--quick]

*Simulated*: replicas are threads in virtual time: an inner step of replica m takes slow[m], messages take none. Every run trains
on the same number of tokens, `steps` inner steps in the mean over its replicas. A step of a fixed group takes as long as on its
slowest machine. "Time to the control's loss" is when a run's agreed weights first reached the control's final loss (linear between
two evaluations); the control is the same fixed group on equal machines. "The fast alone": the replicas of the fastest kind train all
tokens, as a fixed group.

*Emulated*: three processes of `thinwire train --slow 1 2 4` on this machine, `--emulated-steps` each, wall seconds of the training loop:
the fixed group, the elastic mode (whose replicas jump ahead, so slow ones train fewer tokens), the decoupled mode, the fast one alone, and
torchft's DiLoCo in fp32 (unequal_replica.py), which is named as absent if it is not installed.

*Two sites* (--sites, simulated): machines of 1:2:4 at each of two sites, and a link between them that takes 10 inner steps from a
departure to the landing. Rows have the bytes that crossed this link. --quick: 20 steps of one cell, in a separate file.

*The same time* (--time, simulated): the loss at the end of runs that take equally long, by a learning rate schedule that ends then. All
replicas train with decoupled_diloco, or those of the fastest kind alone: one with AdamW and no method, several as a fixed group. Beside
them the fixed group on equal machines, which trains on as many tokens as all replicas. H is 7 for all; decoupled_diloco and the fast alone
average (outer 1 and 0), the equal machines have 0.7 and 0.5. The fast alone read the samples that they have beside the slow ones, so runs
of a seed differ by the slow machines alone. Differences are paired by seed, and have the standard error of their mean.
Saved after each cell of TIMED, with its number of seeds; --cells 0 2 runs these alone. Losses that the file has already, by the same
strategies, are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import HERE, installed, provenance, save

import thinwire as tw
from thinwire.app.jobs.base import Share
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.text_job import TextJob
from thinwire.comm import CountedGroup, Ledger
from thinwire.drivers.unequal.timeline import Timeline

EVERY, OFTEN, LR, MOMENTUM, LINK = 15, 7, 0.7, 0.5, 10
SETTINGS = {"model": "nano", "batch": 4, "sequence": 64, "lr": 1e-2}


def fixed(every: int) -> str:
    return f"diloco(every={every}, outer_lr={LR}, outer_momentum={MOMENTUM}, codec=E3M0())"


FIXED = fixed(EVERY)
AVERAGED = f"diloco(every={OFTEN}, outer_lr=1.0, outer_momentum=0.0, codec=E3M0())"
SPEEDS: dict[str, tuple[float, ...]] = {
    "1:1:1": (1, 1, 1),
    "1:2:4": (1, 2, 4),
    "1:1:10": (1, 1, 10),
    "1:2:4, 8 replicas": (1, 1, 1, 2, 2, 2, 4, 4),
}
SEVERAL: dict[str, tuple[float, ...]] = SPEEDS | {
    "1:2": (1, 2),
    "1:2:4, 16 replicas": (*(1,) * 6, *(2,) * 5, *(4,) * 5),
    "1:2:4, 64 replicas": (*(1,) * 22, *(2,) * 21, *(4,) * 21),
}
TIMED: tuple[tuple[str, int, int], ...] = (  # speeds, inner steps in the mean, number of seeds
    ("1:2:4", 120, 6), ("1:1:10", 120, 6), ("1:2", 120, 3), ("1:2:4", 300, 3), ("1:2:4, 8 replicas", 120, 6),
    ("1:1:10", 300, 3), ("1:2", 300, 3), ("1:2:4, 16 replicas", 120, 3), ("1:2:4, 64 replicas", 60, 1),
)  # fmt: skip


def decoupled(slow: tuple[float, ...], every: int = EVERY) -> str:
    return f"decoupled_diloco(every={every}, outer_lr=1.0, outer_momentum=0.0, slow={slow})"


def asynchronous(slow: tuple[float, ...]) -> str:
    return f"async_local_sgd(every={EVERY}, updates={len(slow)}, outer_lr={LR}, outer_momentum={MOMENTUM}, slow={slow})"


def curve(
    strategy: str, slow: tuple[float, ...], steps: int, seed: int, every: int, ledgers: Sequence[Ledger] = (),
    shares: int = 0, batches: tuple[int, ...] = (),
) -> list[tuple[float, float]]:  # fmt: skip
    """Returns the loss of the agreed weights over virtual time, as replica 0 knows them; the last entry is after the last round.

    `ledgers` count what each replica sends. The data have as many `shares` as replicas, or more, of which the last are not read. `batches`
    are the micro-batches of all replicas, which read equal shares; a step of replica m takes slow[m] with its own one.
    """
    settings = SETTINGS | ({"batch": batches} if batches else {})
    run = Run.of(**settings, strategy=strategy, steps=steps, replicas=len(slow), seed=seed)
    method, cpu = run.make_method(), torch.device("cpu")

    def replica(group: tw.Group) -> list[tuple[float, float]]:
        group = CountedGroup(group, ledgers[group.rank]) if ledgers else group
        job = TextJob(run, None, group.rank)
        job.begin(Share(run.seed, group.rank, shares or group.size))
        model, told = job.make_model(), []
        optimizer = run.plan.inner.make(model, run.lr, run.optimizer.weight_decay)
        tokens = float(batches[group.rank]) if batches else None
        attached: Any = (
            method.attach(model, optimizer, group)
            if method
            else tw.Replica(run.make_strategy(), model, optimizer, group, tokens=tokens)
        )
        if method and tokens:
            attached.tokens = tokens
        pace = slow[group.rank] if method else max(slow)

        def progress() -> int:
            return int(attached.progress if method else attached.step)

        while (now := progress()) < steps:
            for settings in optimizer.param_groups:
                settings["lr"] = learning_rate(run, now + 1)
            optimizer.zero_grad()
            job.loss(model, attached.step, cpu).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
            optimizer.step()
            if group.rank == 0 and progress() // every > now // every:
                with attached.anchored(), torch.no_grad():
                    told.append((attached.step * pace, job.evaluation(model, cpu)["loss"]))
        attached.finish()
        attached.close()
        with torch.no_grad():
            return [*told, (attached.step * pace, job.evaluation(model, cpu)["loss"])] if group.rank == 0 else []

    torch.set_num_threads(1)
    return tw.run_threads(len(slow), replica, timeout=600.0)[0]


def when(told: list[tuple[float, float]], loss: float) -> float:
    """Returns when the curve `told` first reached `loss`; infinity if never."""
    for (before, high), (after, low) in pairwise([(0.0, math.inf), *told]):
        if low <= loss:
            return after if not math.isfinite(high) else before + (after - before) * (high - loss) / (high - low)
    return math.inf


def simulated(steps: int, seeds: list[int], every: int, only: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    equal = cache(lambda seed, count: curve(FIXED, (1.0,) * count, steps, seed, every))
    for speeds in only:
        slow = SPEEDS[speeds]
        count, fast = len(slow), slow.count(min(slow))
        kinds: dict[str, Callable[[int], list[tuple[float, float]]]] = {
            "control": lambda seed, count=count: equal(seed, count),
            "fixed group": lambda seed, slow=slow: curve(FIXED, slow, steps, seed, every),
            "decoupled_diloco": lambda seed, slow=slow: curve(decoupled(slow), slow, steps, seed, every),
            "async_local_sgd": lambda seed, slow=slow: curve(asynchronous(slow), slow, steps, seed, every),
        }
        if fast < count:
            kinds["the fast alone"] = lambda seed, count=count, fast=fast: curve(
                FIXED, (1.0,) * fast, steps * count // fast, seed, every * count // fast
            )
        curves: dict[str, list[list[tuple[float, float]]]] = {}
        for kind, run in kinds.items():
            if kind == "fixed group":  # the control's values, on slower machines
                curves[kind] = [[(at * max(slow), loss) for at, loss in one] for one in curves["control"]]
            else:
                curves[kind] = [run(seed) for seed in seeds]
            due = [one[-1][1] for one in curves["control"]]
            losses = [one[-1][1] for one in curves[kind]]
            reached = [when(one, loss) for one, loss in zip(curves[kind], due)]
            row = {
                "word": "simulated", "speeds": speeds, "kind": kind, "losses": losses, "loss": statistics.fmean(losses),
                "of_control": statistics.fmean(a / b for a, b in zip(losses, due)) - 1,
                "time": statistics.fmean(one[-1][0] for one in curves[kind]),
                "time_to_loss": statistics.fmean(reached) if all(map(math.isfinite, reached)) else None,
            }  # fmt: skip
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def same_time(
    seeds: list[int],
    cells: Sequence[tuple[str, int, int]],
    before: Sequence[dict[str, Any]],
    keep: Callable[[Any], Path],
) -> None:
    """The loss of decoupled_diloco, of the fast alone after the same time, and of equal machines after the same tokens.

    `before` are rows of an earlier run: their losses are taken over where the strategy is the same.
    """
    rows = {(row["speeds"], row["steps"]): row for row in before}
    known: dict[tuple[Any, ...], float] = {}
    for row in before:
        for kind, each in row["losses"].items():
            known |= {(*row["runs"][kind], seed): loss for seed, loss in zip(row["seeds"], each)}
    for speeds, steps, several in cells:
        slow, began = SEVERAL[speeds], time.monotonic()
        all_, fast = len(slow), slow.count(min(slow))
        line, own = Timeline(slow, OFTEN, 1, 1, 0.5, 0), 0
        while line.done(0, own) // len(slow) < steps:
            own += 1
        alone = AVERAGED if fast > 1 else f"local_sgd(every={OFTEN})"  # of one: AdamW alone
        runs: dict[str, tuple[str, int, int, int]] = {  # strategy, replicas, inner steps, shares of the data
            "control": (fixed(OFTEN), all_, steps, all_),
            "decoupled_diloco": (decoupled(slow, OFTEN), all_, steps, all_),
            "the fast alone": (alone, fast, own, all_),
        }
        losses: dict[str, list[float]] = {kind: [] for kind in runs}
        for seed in seeds[:several]:
            for kind, one in runs.items():
                strategy, count, taken, shares = one
                if (*one, seed) not in known:
                    paces = slow if kind == "decoupled_diloco" else (1.0,) * count
                    known[*one, seed] = curve(strategy, paces, taken, seed, taken + 1, shares=shares)[-1][1]
                losses[kind].append(known[*one, seed])
        row = {"word": "simulated", "speeds": speeds, "replicas": all_, "steps": steps, "losses": losses}
        row |= {"runs": runs, "seeds": seeds[:several], "time": own, "seconds": round(time.monotonic() - began)}
        for name, kind in (("of_control", "control"), ("of_fast", "the fast alone")):
            each = [a / b - 1 for a, b in zip(losses["decoupled_diloco"], losses[kind])]
            row[name] = statistics.fmean(each)
            row[f"error_{name}"] = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
        rows[speeds, steps] = row
        print(json.dumps(row), keep(list(rows.values())), flush=True)


def two_sites(steps: int, seeds: list[int], every: int) -> list[dict[str, Any]]:
    """Two sites with machines of 1:2:4 each, and a link between them that takes LINK inner steps; rows have the bytes that crossed it."""
    slow = (1.0, 2.0, 4.0) * 2
    one, all_ = len(slow) // 2, len(slow)
    common = f"every={EVERY}, outer_lr={LR}, outer_momentum={MOMENTUM}"
    real = f"slow={slow}, delay={LINK}"
    kinds = {
        "control": (FIXED, (1.0,) * all_),
        "decoupled_diloco": (f"decoupled_diloco({common}, {real})", slow),
        "async_local_sgd": (f"async_local_sgd({common}, updates={all_}, {real})", slow),
    } | {
        f"halos, K = {apart}": (f"halos({common}, sites=({one}, {one}), apart={apart}, updates={one}, {real})", slow)
        for apart in (2, 4)
    }
    rows: list[dict[str, Any]] = []
    for kind, (strategy, paces) in kinds.items():
        losses, times, between, within = [], [], [], []
        for seed in seeds:
            ledgers = [Ledger() for _ in slow]
            time, loss = curve(strategy, paces, steps, seed, every, ledgers)[-1]
            crossed = sum(
                ledger.sent(None, peer)
                for rank, ledger in enumerate(ledgers)
                for peer in range(all_)
                if (rank < one) != (peer < one)
            )
            losses, times = [*losses, loss], [*times, time]
            between, within = [*between, crossed], [*within, sum(ledger.sent() for ledger in ledgers) - crossed]
        row = {
            "word": "simulated", "kind": kind, "strategy": strategy, "losses": losses, "loss": statistics.fmean(losses),
            "time": statistics.fmean(times), "nbytes_between": statistics.fmean(between),
            "nbytes_within": statistics.fmean(within),
        }  # fmt: skip
        of = rows[0]["losses"] if rows else losses
        rows.append(row | {"of_control": statistics.fmean(a / b for a, b in zip(losses, of)) - 1})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def emulated(steps: int, seed: int) -> list[dict[str, Any]]:
    rows = []
    common = ["--seed", str(seed), "--checkpoint-every", "0", "--json"]
    common += [f"--{name}={value}" for name, value in SETTINGS.items()]
    three, slow = ["--replicas", "3", "--steps", str(steps)], ["--slow", "1", "2", "4"]
    real = f"decoupled_diloco(every={EVERY}, outer_lr=1.0, outer_momentum=0.0)"
    for kind, more in {
        "fixed group, equal": [*three, "--strategy", FIXED],
        "fixed group": [*three, *slow, "--strategy", FIXED],
        "elastic": [*three, *slow, "--strategy", FIXED, "--elastic", "--weigh", "tokens"],
        "decoupled_diloco": [*three, *slow, "--strategy", real],
        "the fast alone": ["--replicas", "1", "--steps", str(3 * steps), "--strategy", FIXED],
    }.items():
        row = {"word": "emulated", "speeds": "1:1:1" if kind.endswith("equal") else "1:2:4", "kind": kind}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "thinwire", "train", *common, *more, "--out", f"{folder}/run"],
                capture_output=True, text=True, timeout=400,
            )  # fmt: skip
        if done.returncode:
            rows.append(row | {"problem": done.stderr.strip()[-200:]})
        else:
            told = json.loads(done.stdout.strip().splitlines()[-1])
            rows.append(row | {"loss": told["eval_loss"], "time": told["wall_seconds"], "tokens": told.get("tokens")})
        print(json.dumps(rows[-1]), flush=True)
    rows.append({"word": "emulated", "speeds": "1:2:4", "kind": "torchft"} | rival((1, 2, 4), steps, seed))
    print(json.dumps(rows[-1]), flush=True)
    return rows


def rival(slow: tuple[float, ...], steps: int, seed: int) -> dict[str, Any]:
    """torchft's DiLoCo in one process for each replica: loss, seconds and tokens of its slowest, or a problem."""
    if installed("torchft") is None:
        return {"problem": "torchft is not installed"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(__file__).with_name("unequal_replica.py"))
    own = {"slow": slow, "steps": steps, "seed": seed, "port": port, "every": EVERY, "lr": LR, "momentum": MOMENTUM}
    with tempfile.TemporaryFile("w+") as errors:
        replicas = [
            subprocess.Popen(
                [sys.executable, program, json.dumps(own | {"rank": rank, "settings": SETTINGS})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )
            for rank in range(len(slow))
        ]  # fmt: skip
        lines = [replica.stdout.readline() if replica.stdout else "" for replica in replicas]
        for replica in replicas:
            replica.communicate()  # closes its input: it may leave
        errors.seek(0)
        if not all(lines):
            return {"problem": errors.read().strip()[-200:]}
    told = [json.loads(line) for line in lines]
    return {
        "loss": told[0]["loss"], "time": max(one["time"] for one in told), "tokens": sum(one["tokens"] for one in told),
        "rounds": told[0]["rounds"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--emulated-steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--sites", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--cells", type=int, nargs="+", choices=range(len(TIMED)))
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    seeds = asked.seeds or [0, 1, 2]
    result = provenance() | {"benchmark": "unequal", "word": "simulated and emulated"}
    steps = 20 if asked.quick else asked.steps
    result |= {"setting": SETTINGS | {"steps": steps, "seeds": seeds, "fixed": FIXED}}
    result["setting"] |= {} if asked.sites else {"steps_emulated": asked.emulated_steps}
    rows: list[dict[str, Any]] = []
    if asked.time:
        result |= {"benchmark": "same_time", "word": "simulated", "setting": SETTINGS}
        cells = (("1:2:4", 20, 1),) if asked.quick else [TIMED[cell] for cell in asked.cells or range(len(TIMED))]
        name = "unequal-time-quick" if asked.quick else "unequal-time"
        into = asked.into or HERE / "results" / f"{name}.json"
        earlier = json.loads(into.read_text()) if into.exists() else {}
        before = earlier["rows"] if earlier.get("setting") == SETTINGS else []
        most = asked.seeds or list(range(max(several for _, _, several in TIMED)))
        same_time(most, cells, before, lambda rows: save(name, result | {"rows": rows}, into))
        return
    if asked.sites:
        result |= {"benchmark": "sites", "word": "simulated"}
        rows = two_sites(steps, seeds, max(1, steps // 15))
        print(save("unequal-sites", result | {"rows": rows}, asked.into))
        return
    if not asked.emulated:
        only = ("1:2:4",) if asked.quick else tuple(SPEEDS)
        rows += simulated(steps, seeds[:1] if asked.quick else seeds, max(1, steps // 15), only)
    if not asked.simulated and not asked.quick:
        rows += emulated(asked.emulated_steps, seeds[0])
    into = asked.into or (HERE / "results" / "unequal-quick.json" if asked.quick else None)
    print(save("unequal", result | {"rows": rows}, into))


if __name__ == "__main__":
    main()
