"""The cost of late replicas, and what gradient codes save. All figures are simulated, over three seeds.

    python benchmarks/coding.py            # about three minutes on one core
    python benchmarks/coding.py --quick    # one seed, a quarter of the steps

Data-parallel training waits for the slowest replica; ignoring the slowest loses their share of the batch; codes compute more. The
first three cases have 16 replicas, and use the parameters that were fastest in 40 steps before those that count. The last case has
256 replicas on which work costs little (2.2 s for a whole batch), with the parameters of arXiv 2211.13802.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from provenance import provenance, save
from rich.console import Console
from rich.table import Table

from thinwire.lab.methods.gradient_codes import gradient_code
from thinwire.lab.methods.sequential_codes import Coded, Multiplexed, Scheme, SelectiveRepeat
from thinwire.lab.simulate.stragglers import (
    FAMILIES,
    CodedRun,
    Delays,
    gilbert_elliott,
    search,
    shifted_exponential,
    simulate,
    without_the_slowest,
)

PROBE, STEPS, REPLICAS, PAUSE = 40, 100, 16, 5.0
CASES = (
    "bursts, all of a step is work",
    "bursts, a tenth of a step is work",
    "exponential, all of a step is work",
    "256 replicas",
)
PAPER: dict[str, Scheme] = {
    "gradient coding": Coded(gradient_code(256, 15)),
    "SR-SGC": SelectiveRepeat(256, 2, 3, 23),
    "M-SGC": Multiplexed(256, 1, 2, 27),
}


def delays(case: str, steps: int, seed: int) -> Delays:
    if case == CASES[3]:
        return Delays(gilbert_elliott(steps, 256, 1.0, PAUSE, 30, 1, seed), 2.2)
    share = 0.1 if case == CASES[1] else 1.0
    if case == CASES[2]:
        return Delays(shifted_exponential(PROBE + steps, REPLICAS, 1.0, 1.0, seed), share * REPLICAS)
    return Delays(gilbert_elliott(PROBE + steps, REPLICAS, 1.0, PAUSE, 20, 2, seed), share * REPLICAS)


def runs(case: str, steps: int, seed: int) -> dict[str, CodedRun]:
    given = delays(case, steps, seed)
    if case == CASES[3]:
        rest, schemes = given, PAPER
    else:
        probe, rest = given.part(0, PROBE), given.part(PROBE)
        schemes = {family: search(family, probe) for family in FAMILIES}
    coded = schemes["gradient coding"]
    assert isinstance(coded, Coded)
    found = {"data-parallel": simulate(Coded(gradient_code(rest.replicas, 0)), rest)}
    found["ignore the slowest"] = without_the_slowest(rest, coded.code.stragglers)
    return found | {name: simulate(scheme, rest) for name, scheme in schemes.items()}


def case(name: str, steps: int, seeds: int) -> dict[str, Any]:
    """Returns the means over seeds, and the setting."""
    rows: dict[str, Any] = {}
    for seed in range(seeds):
        for method, run in runs(name, steps, seed).items():
            rows.setdefault(method, []).append(
                {
                    "scheme": str(run.scheme),
                    "seconds_per_step": run.seconds_per_job,
                    "lost": run.lost,
                    "load": float(run.scheme.load * run.scheme.replicas),
                    "delay": run.scheme.delay,
                }
            )
    return {"case": name, "steps": steps, "seeds": seeds, "methods": rows}


def table(cases: list[dict[str, Any]]) -> Table:
    view = Table(title="Seconds a step under stragglers, and of data-parallel's (simulated)")
    for head in ("case", "method", "a step", "of it", "computes", "T", "lost"):
        view.add_column(head, justify="left" if head in ("case", "method") else "right")
    for one in cases:
        control = statistics.fmean(row["seconds_per_step"] for row in one["methods"]["data-parallel"])
        for number, (method, rows) in enumerate(one["methods"].items()):
            took = [row["seconds_per_step"] for row in rows]
            spread = f" ± {statistics.stdev(took):.2f}" if len(took) > 1 else ""
            mean = {key: statistics.fmean(row[key] for row in rows) for key in ("load", "delay", "lost")}
            view.add_row(
                "" if number else one["case"], method, f"{statistics.fmean(took):.2f} s{spread}", f"{statistics.fmean(took) / control:.2f} ×",
                f"{mean['load']:.2f} ×", f"{mean['delay']:.1f}", f"{mean['lost']:.1%}",
            )  # fmt: skip
    return view


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="one seed, a quarter of the steps")
    arguments.add_argument("--out", type=Path, help="where the JSON goes; default: results/coding.json")
    asked = arguments.parse_args()
    cases = [case(name, STEPS // 4 if asked.quick else STEPS, 1 if asked.quick else 3) for name in CASES]
    Console(width=120).print(table(cases))
    save("coding", provenance() | {"benchmark": "coding", "word": "simulated", "cases": cases}, asked.out)


if __name__ == "__main__":
    main()
