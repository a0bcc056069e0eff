"""The time to simulate thousands of replicas for a day, and the paper's table. Goals: a minute, ten seconds.

    python benchmarks/simulate.py            # about two minutes
    python benchmarks/simulate.py --quick    # an hour of virtual time instead of a day

It uses one core. Replicas and uplinks differ (lognormal, 10 % and 50 %), steps jitter, replicas pause, fail and return, and
uplinks go down: everything that the simulator has, together. The method is Streaming DiLoCo with H = 30, τ = 5 and nine fragments of
100,000 parameters in 4 bits; each replica's packets go to all others. A short run finds how many steps a day has. Every case runs
in a separate process, for its peak memory. A flight event is a departure, an arrival or a landing.
Times and memory are measured; the runs are simulated.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from provenance import provenance, save
from rich.console import Console
from rich.table import Table

from thinwire import streaming_diloco
from thinwire.comm import Link
from thinwire.lab.simulate.layers import Stack
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Failures, Outages, Scenario, Stragglers, Wire, spread
from thinwire.lab.simulate.utilization import STUDIED, Study
from thinwire.rng import derive

SEED = 0
STRATEGY = streaming_diloco(every=30, delay=5)
NUMELS = [100_000] * 9
DAY, HOUR = 86_400.0, 3600.0


def scenario(replicas: int, sharing: int = 1) -> Scenario:
    """Uplinks of about 2 Mbit/s for each replica of the group: sixteen times the floor, so that the slowest replicas keep up."""
    rates = spread(2e6 * replicas * sharing, 0.5, replicas // sharing, SEED, "links")
    wires = [
        Wire(Link(rate, 0.03), loss=0.001, outages=Outages(30 * DAY, 20.0, derive(SEED, "outages", number)))
        for number, rate in enumerate(rates)
    ]
    return Scenario(
        step_seconds=spread(1.0, 0.1, replicas, SEED, "steps"),
        wires=tuple(wires),
        shares=tuple(rank // sharing for rank in range(replicas)),
        jitter=0.1,
        stragglers=Stragglers(10 * DAY, 10.0),
        failures=Failures(30 * DAY, 600.0, 10.0),
        seed=SEED,
    )


def case(replicas: int, seconds: float, sharing: int = 1) -> dict[str, Any]:
    """Simulates until `seconds` of virtual time are over, in a separate process."""
    with suppress(AttributeError):  # some systems do not have it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    here = scenario(replicas, sharing)
    pilot = simulate(STRATEGY, NUMELS, here, 300)
    steps = round(1.05 * seconds / (pilot.wall_seconds.max() / 300))  # slightly more than asked for
    began, burnt = time.perf_counter(), time.process_time()
    outcome = simulate(STRATEGY, NUMELS, here, steps)
    took, used = time.perf_counter() - began, time.process_time() - burnt
    array_events = 3 * outcome.rounds * replicas
    return {
        "replicas": replicas,
        "sharing": sharing,
        "steps": steps,
        "virtual_seconds": float(outcome.wall_seconds.max()),
        "events": outcome.events,
        "rounds": outcome.rounds,
        "failures": outcome.failures,
        "compute_utilization": outcome.compute_utilization,
        "seconds": took,
        "cpu_seconds": used,  # less than the seconds if other processes used the core
        "nanoseconds_per_flight_event": used / array_events * 1e9,
        "peak_nbytes": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before),
    }


def alone(*arguments: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(case, *arguments).result()


def paper() -> dict[str, Any]:
    """All methods that are studied, on all three sizes of the paper, both grids."""
    began = time.perf_counter()
    stacks = (Stack(1e9, 24, 0.1), Stack(1e10, 48, 0.8), Stack(1e11, 108, 4.9))
    cells = 0
    for study in map(Study, stacks):
        for method in STUDIED:
            cells += len(study.rates(method)) + len(study.paper_rates(method))
    return {"cells": cells, "seconds": time.perf_counter() - began}


def table(cases: list[dict[str, Any]]) -> Table:
    view = Table(title="Simulating a run (measured time and memory of simulated runs)")
    heads = (
        "replicas",
        "virtual time",
        "inner steps",
        "events",
        "seconds",
        "of CPU",
        "ns of CPU a flight event",
        "peak memory",
    )
    for head in heads:
        view.add_column(head, justify="right")
    for row in cases:
        shared = f" ({row['sharing']} share an uplink)" if row["sharing"] > 1 else ""
        view.add_row(
            f"{row['replicas']:,}{shared}", f"{row['virtual_seconds'] / HOUR:.2f} h", f"{row['steps']:,}",
            f"{row['events'] / 1e6:,.1f} M", f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['nanoseconds_per_flight_event']:.1f}",
            f"{row['peak_nbytes'] / 1e6:.1f} MB",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an hour instead of a day")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/simulate.json)")
    arguments = parser.parse_args()
    whole = HOUR if arguments.quick else DAY
    result: dict[str, Any] = {"benchmark": "simulate", "word": "measured", "seed": SEED, **provenance()}
    asked = [(100, whole), (1000, whole), (10_000, whole / 4), (10_000, whole), (10_000, whole / 24, 10)]
    result |= {"strategy": repr(STRATEGY), "numels": NUMELS, "scenario": dataclasses.asdict(scenario(1))}
    result["cases"] = [alone(*one) for one in asked]
    result["paper"] = paper()
    console = Console(width=150)
    console.print(table(result["cases"]))
    console.print(f"the paper's table, {result['paper']['cells']} cells: {result['paper']['seconds']:.2f} s (measured)")
    print(f"written: {save('simulate', result, arguments.into)}")


if __name__ == "__main__":
    main()
