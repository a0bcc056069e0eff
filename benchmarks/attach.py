"""What an attached Replica costs while nothing is in the air: a ratio to the bare loop, goal at most 1.01.

    python benchmarks/attach.py            # about three minutes
    python benchmarks/attach.py --quick    # about twenty seconds

One process, one core, one model, one optimizer. Blocks of steps alternate, bare and attached, in the order
ABBA so that a drift of the machine falls on both alike; a block's time is the median of its steps, a pair's ratio is
attached / bare, and the figure is the median of all pairs. A second bare block in the place of the attached one (bare /
bare) shows what the method itself can resolve on this machine. Measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import Replica, ThreadGroup, streaming_diloco
from thinwire.lm.model import SIZES, Transformer

SEED = 0
NEVER = 1 << 30  # steps between two exchanges: nothing is ever in the air


def language_model() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """7.2 million parameters, 512 tokens a step."""
    model = Transformer(SIZES["mini"], seed=SEED)
    tokens = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(SEED))
    return model, lambda: model(tokens, tokens).loss  # type: ignore[return-value]  # targets are given


def tiny() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Two layers of 64: a step is nearly all overhead of PyTorch itself, the hardest case."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(32, 64)
    return model, lambda: model(x).square().mean()


def block(steps: int, loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> float:
    """The median seconds of a step."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], steps: int, pairs: int) -> dict[str, Any]:
    """Step times and ratios of `pairs` pairs of blocks, against an attached Replica and, as a control, against bare again."""
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    (group,) = ThreadGroup.create(1)
    strategy = streaming_diloco(every=NEVER, delay=5)

    def run(attached: bool) -> float:
        if not attached:
            return block(steps, loss, optimizer)
        replica = Replica(strategy, model, optimizer, group)
        try:
            return block(steps, loss, optimizer)
        finally:
            replica.close()  # and not `finish`, which would exchange

    def ratios(attached: bool) -> tuple[list[float], list[float], list[float]]:
        bare, other = [], []
        for pair in range(pairs):
            order = (False, attached) if pair % 2 == 0 else (attached, False)
            first, second = run(order[0]), run(order[1])
            bare.append(first if pair % 2 == 0 else second)
            other.append(second if pair % 2 == 0 else first)
        return bare, other, [o / b for o, b in zip(other, bare)]

    run(False), run(True)  # warm
    _, _, control = ratios(False)
    bare, attached, paired = ratios(True)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "pairs": pairs,
        "bare_seconds": statistics.median(bare),
        "attached_seconds": statistics.median(attached),
        "ratio": statistics.median(paired),
        "ratio_spread": _quartiles(paired),
        "control_ratio": statistics.median(control),
        "control_spread": _quartiles(control),
        "attach_microseconds": statistics.median(a - b for a, b in zip(attached, bare)) * 1e6,
    }


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def table(cases: dict[str, dict[str, Any]]) -> Table:
    columns = ("model", "parameters", "bare step", "attached / bare", "quartiles", "bare / bare", "cost per step")
    view = Table(*columns, title="An attached Replica with nothing in the air (measured)")
    for name, case in cases.items():
        low, high = case["ratio_spread"]
        view.add_row(
            name, f"{case['parameters']:,}", f"{case['bare_seconds'] * 1e3:.3f} ms", f"{case['ratio']:.4f}",
            f"{low:.4f} … {high:.4f}", f"{case['control_ratio']:.4f}", f"{case['attach_microseconds']:.1f} µs",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks: a smoke run")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/attach.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(AttributeError):  # not on every system
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {"benchmark": "attach", "word": "measured", "seed": SEED, **provenance()}
    large, small = ((5, 4), (300, 20)) if arguments.quick else ((8, 20), (1000, 60))
    result["cases"] = {"language model": measure(language_model, *large), "tiny": measure(tiny, *small)}
    Console(width=140).print(table(result["cases"]))
    print(f"written: {save('attach', result, arguments.into)}")


if __name__ == "__main__":
    main()
