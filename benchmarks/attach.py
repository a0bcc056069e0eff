"""The cost of an attached Replica while nothing is in the air: a ratio to the bare loop, goal at most 1.01.

    python benchmarks/attach.py            # about three minutes
    python benchmarks/attach.py --quick    # about half a minute

One process on one core has two equal models with their optimizers; a Replica is attached to one of them. Their steps
alternate in the order ABBA, so other load of the machine affects both alike. From repeat to repeat the Replica
changes to the other model, so the place of a model in memory affects both alike. The figure of a repeat is the
median of attached / bare over its pairs; the table shows the median and quartiles of the repeats. The same without any
Replica, bare / bare, shows the resolution of the measurement. Measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire import Replica, ThreadGroup, streaming_diloco
from thinwire.app.trainer.model import SIZES, Transformer

SEED = 0
NEVER = 1_000_000  # steps between two exchanges, more than are taken: nothing is ever in the air


def language_model() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """7.2 million parameters, 512 tokens in a step."""
    model = Transformer(SIZES["mini"], seed=SEED)
    tokens = torch.randint(0, 256, (4, 128), generator=torch.Generator().manual_seed(SEED))

    def loss() -> torch.Tensor:
        output: torch.Tensor | None = model(tokens, tokens).loss
        assert output is not None  # targets are given
        return output

    return model, loss


def tiny() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Two layers of width 64. A step is almost only overhead of PyTorch, which is the hardest case."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(32, 64)
    return model, lambda: model(x).square().mean()


@dataclass(frozen=True)
class Loop:
    """The training loop of a model."""

    loss: Callable[[], torch.Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def seconds(self, steps: int) -> float:
        """Returns the mean time of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.loss().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - began) / steps


@dataclass(frozen=True)
class Size:
    """The size of a measurement: `steps` at a time, in `pairs` for each repeat."""

    steps: int
    pairs: int
    repeats: int


def measure(make: Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]], size: Size) -> dict[str, Any]:
    """Returns step times and ratios, with a Replica and, as a control, without."""
    loops = []
    for _ in range(2):
        model, loss = make()
        loops.append(Loop(loss, model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)))
        loops[-1].seconds(5)
    (group,) = ThreadGroup.create(1)
    strategy = streaming_diloco(every=NEVER, delay=5)
    pairs: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
    for repeat in range(2 * size.repeats):
        attached = repeat % 2 == 1
        bare, other = loops if repeat % 4 < 2 else loops[::-1]
        replica = Replica(strategy, other.model, other.optimizer, group) if attached else None
        pairs[attached].append(_pairs(bare, other, size))
        if replica is not None:
            replica.close()  # `finish` would exchange
    ratios = {kind: [statistics.median(b / a for a, b in repeat) for repeat in pairs[kind]] for kind in pairs}
    return {
        "parameters": sum(p.numel() for p in loops[0].model.parameters()),
        **asdict(size),
        "bare_seconds": statistics.median(a for repeat in pairs[True] for a, _ in repeat),
        "ratio": statistics.median(ratios[True]),
        "ratio_quartiles": _quartiles(ratios[True]),
        "control_ratio": statistics.median(ratios[False]),
        "control_quartiles": _quartiles(ratios[False]),
        "attach_microseconds": statistics.median(b - a for repeat in pairs[True] for a, b in repeat) * 1e6,
    }


def _pairs(bare: Loop, other: Loop, size: Size) -> list[tuple[float, float]]:
    """Returns seconds of a step, bare and other, in the order ABBA."""
    pairs = []
    for number in range(size.pairs):
        if number % 2 == 0:
            a = bare.seconds(size.steps)
            b = other.seconds(size.steps)
        else:
            b = other.seconds(size.steps)
            a = bare.seconds(size.steps)
        pairs.append((a, b))
    return pairs


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def table(cases: dict[str, dict[str, Any]]) -> Table:
    columns = (
        "model",
        "parameters",
        "bare step",
        "attached / bare",
        "quartiles",
        "bare / bare",
        "quartiles",
        "difference",
    )
    view = Table(*columns, title="An attached Replica with nothing in the air (measured)")
    for name, case in cases.items():
        view.add_row(
            name, f"{case['parameters']:,}", f"{case['bare_seconds'] * 1e3:.3f} ms",
            f"{case['ratio']:.4f}", "{:.4f} … {:.4f}".format(*case["ratio_quartiles"]),
            f"{case['control_ratio']:.4f}", "{:.4f} … {:.4f}".format(*case["control_quartiles"]),
            f"{case['attach_microseconds']:.1f} µs",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks: a smoke run")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/attach.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(AttributeError):  # some systems do not have it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {"benchmark": "attach", "word": "measured", "seed": SEED, **provenance()}
    large, small = Size(steps=1, pairs=20, repeats=10), Size(steps=20, pairs=200, repeats=20)
    if arguments.quick:
        large, small = replace(large, pairs=4, repeats=4), replace(small, repeats=4)
    result["cases"] = {"language model": measure(language_model, large), "tiny": measure(tiny, small)}
    Console(width=140).print(table(result["cases"]))
    print(f"written: {save('attach', result, arguments.into)}")


if __name__ == "__main__":
    main()
