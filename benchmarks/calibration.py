"""Compares training on a link with probing and simulating it, for two and four replicas; goal: utilization within 10 %.

    python benchmarks/calibration.py            # about four minutes
    python benchmarks/calibration.py --quick    # one rate for each method, about a minute

Every replica is a process, joined by gloo on this machine. Its uplink is emulated (a token bucket in the group, 20 ms one way).
For every number of replicas, method and rate, the same processes do these one after the other:

* probe     `probe_links` measures the link's rate (to one replica alone, and while all send to all) and delay; a bare loop
            measures the inner step before and after training; `codec_speed` measures encoding and decoding
* train     a Replica over the same link (emulated)
* simulate  `simulate` gets what was probed, and nothing else (simulated)

An inner step sleeps for 40 ms and then really updates a model of 1.2 million parameters, so four replicas have equal steps on
two cores. `train` rows are `thinwire train` itself with two replicas of the model nano that compute; their inner step is the
median of a run without a link. Utilization: steps × inner step / seconds from the first step to the last landing, including the
exchange at the end (in `train` rows as the run reports it). Error: simulated / emulated − 1. Rates are multiples of the floor,
below which no schedule computes all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import Replica, Strategy, diloco, streaming_diloco
from thinwire.app.plan.compute import codec_speed, skeleton
from thinwire.app.plan.probe import probe_links
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer import launch
from thinwire.app.trainer.run import Run
from thinwire.codecs import Identity
from thinwire.comm import Group, Link, LinkedGroup
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Scenario, Wire

STEP, STEPS, EVERY, DELAY = 0.04, 120, 30, 5
LAYERS, WIDTH = 12, 316  # 1.2 million parameters
WAY = 0.02  # seconds
FACTORS, QUICK = (0.6, 1.2, 4.0), (1.2,)  # of the floor
METHODS: dict[str, Strategy] = {
    "streaming_diloco": streaming_diloco(every=EVERY, delay=DELAY),
    "diloco": diloco(every=EVERY, codec=Identity()),
}
GOAL = 0.1


class Unclosed:
    """A group whose carrier stays open when the emulated link on it is closed."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.post = group.rank, group.size, group.post

    def close(self) -> None:
        pass


class Stack(nn.Module):
    """Layers that are never called; only their size matters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = Stack()
    for parameter in made.parameters():
        parameter.grad = torch.randn_like(parameter)
    return made, torch.optim.SGD(made.parameters(), lr=1e-3)


def loop(optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Runs `steps` steps and returns the seconds of the loop."""
    began = time.perf_counter()
    for _ in range(steps):
        time.sleep(STEP)
        optimizer.step()
    return time.perf_counter() - began


def floor(strategy: Strategy, numels: Sequence[int], size: int) -> float:
    return 8 * strategy.nbytes_per_period(numels, size) / (EVERY * STEP)


def case(group: Group, strategy: Strategy, factor: float) -> dict[str, Any]:
    """Returns one row of the table. All replicas must call it."""
    numels = [fragment.numel for fragment in strategy.partition.fragments(Stack())]
    link = Link(factor * floor(strategy, numels, group.size), WAY)
    linked = LinkedGroup(Unclosed(group), link)
    probe = probe_links(linked, f"replica-{group.rank}", 0.25, 10)
    _, optimizer = model()
    step_seconds = loop(optimizer, 25) / 25
    speed = codec_speed(strategy.codec, 0.02)
    module, optimizer = model()
    began = time.perf_counter()
    with Replica(strategy, module, optimizer, linked) as replica:
        attached = time.perf_counter() - began
        loop(optimizer, STEPS)
        replica.finish()
        seconds = time.perf_counter() - began - attached
    linked.close()
    step_seconds = (step_seconds + loop(model()[1], 25) / 25) / 2  # mean of before and after
    found = probe.links.alone.items()
    # an uplink's rate while all send to all, as in an exchange, is at most its rate to one alone
    together = [sum(rate for (a, _), rate in probe.links.together.items() if a == own) for own in range(group.size)]
    alone = [min(way.bits_per_second for (a, _), way in found if a == own) for own in range(group.size)]
    rates = [min(pair) for pair in zip(alone, together, strict=True)]
    ways = [max(way.delay_seconds for (a, _), way in found if a == own) for own in range(group.size)]
    scenario = Scenario(
        (step_seconds,) * group.size, tuple(Wire(Link(rate, way)) for rate, way in zip(rates, ways, strict=True)),
        encode_seconds=1 / speed.encode, decode_seconds=1 / speed.decode,
    )  # fmt: skip
    simulated = simulate(strategy, numels, scenario, STEPS)
    return {
        "bits_per_second": link.bits_per_second, "probed_bits_per_second": statistics.median(rates),
        "probed_delay_seconds": statistics.median(ways), "step_seconds": step_seconds,
        "simulated": simulated.compute_utilization, "emulated": STEPS * step_seconds / seconds,
    }  # fmt: skip


def replica(out: Path, quick: bool) -> None:
    """Runs all cases of one number of replicas in one process. Rank 0 writes the mean over replicas."""
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    rows = []
    with launch.joined(size, 120.0) as group:
        for method, strategy in METHODS.items():
            strategy.warm_up()
            for factor in QUICK if quick else FACTORS:
                own = case(group, strategy, factor)
                mine = torch.tensor([own["simulated"], own["emulated"]], dtype=torch.float64)
                torch.distributed.all_reduce(mine)
                shared = dict(zip(("simulated", "emulated"), (mine / size).tolist(), strict=True))
                rows.append({"how": "sleeps", "replicas": size, "method": method, "of_floor": factor, **own, **shared})
        if group.rank == 0:
            out.write_text(json.dumps(rows))


def slept(size: int, quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port, out = chosen.getsockname()[1], Path(folder) / "rows.json"
        chosen.close()
        program = [sys.executable, __file__, "--replica", str(out), *(["--quick"] if quick else [])]
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        running = [subprocess.Popen(program, env={**os.environ, **world, "RANK": str(rank)}) for rank in range(size)]
        if any([process.wait() for process in running]):
            raise RuntimeError(f"{size} replicas failed; they said why above")
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def trained(run: Run, folder: Path) -> RunRecord:
    """Runs `thinwire train` with processes and returns its record."""
    run.save(folder.with_suffix(".toml"))
    command = [sys.executable, "-m", "thinwire", "train", str(folder.with_suffix(".toml")), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return RunRecord.load(folder)


def computed(quick: bool) -> list[dict[str, Any]]:
    """Returns rows of `thinwire train` with two replicas that compute."""
    base = Run.of(
        model="nano",
        every=EVERY,
        delay=DELAY,
        steps=4 * EVERY,
        eval_every=10**6,
        eval_batches=1,
        checkpoint_every=10**6,
    )
    strategy = base.make_strategy()
    numels = [fragment.numel for fragment in strategy.partition.fragments(skeleton(base))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bare = trained(base, Path(folder) / "bare")
        step = statistics.mean(float(statistics.median(r.compute_seconds.tolist())) for r in bare.replicas)
        for factor in QUICK if quick else FACTORS:
            link = Link(factor * 8 * strategy.nbytes_per_period(numels, 2) / (EVERY * step), WAY)
            record = trained(base.changed(link=str(link)), Path(folder) / f"of-{factor}")
            simulated = simulate(strategy, numels, Scenario.alike(2, step, Link.parse(str(link))), base.optimizer.steps)
            rows.append({
                "how": "train", "replicas": 2, "method": "streaming_diloco", "of_floor": factor, "step_seconds": step,
                "bits_per_second": link.bits_per_second, "simulated": simulated.compute_utilization,
                "emulated": record.summary.compute_utilization,
            })  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    view = Table(title="Simulated from what was probed, and emulated")
    for head in ("replicas", "step", "method", "of the floor", "Mbit/s", "simulated", "emulated", "error"):
        view.add_column(head, justify="left" if head in ("step", "method") else "right")
    for row in rows:
        view.add_row(
            str(row["replicas"]), row["how"], row["method"], f"{row['of_floor']:g}", f"{row['bits_per_second'] / 1e6:.2f}",
            f"{row['simulated']:.1%}", f"{row['emulated']:.1%}", f"{row['simulated'] / row['emulated'] - 1:+.1%}",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate a method")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/calibration.json)")
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        return replica(arguments.replica, arguments.quick)
    rows = [row for size in (2, 4) for row in slept(size, arguments.quick)] + computed(arguments.quick)
    errors = [abs(row["simulated"] / row["emulated"] - 1) for row in rows]
    result = {
        "benchmark": "calibration", "word": "emulated", **provenance(), "rows": rows, "goal": GOAL,
        "setting": {"step_seconds": STEP, "steps": STEPS, "every": EVERY, "delay": DELAY, "way_seconds": WAY},
        "largest_error": max(errors), "mean_error": statistics.mean(errors),
    }  # fmt: skip
    Console(width=130).print(table(rows))
    verdict = "within" if max(errors) <= GOAL else "NOT within"
    print(f"largest error {max(errors):.1%}, mean {statistics.mean(errors):.1%}: {verdict} the goal of {GOAL:.0%}")
    print(f"written: {save('calibration', result, arguments.into)}")


if __name__ == "__main__":
    main()
