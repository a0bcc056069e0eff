"""The speed of codecs on one core: GB/s of their fp32 input, beside a copy of the same tensor and beside plain torch.

    python benchmarks/codecs.py            # about five minutes
    python benchmarks/codecs.py --quick    # half a minute, up to 16 MiB

For each codec and size three operations take turns: `copy_` of the input, encoding, and decoding onto a sum with a weight other
than one. Times are those of the thread on its core. Caches and memory are shared, so other load of the machine affects all three.
A ratio is the median over turns of copy / other, with its quartiles. A codec that decodes the packets of a round together decodes
two; its seconds are of one.
Then the same codec is run in its reference (plain torch, eager). Goal from 16 MiB on: 0.6 of the copy for formats with a scale
for each block, signs and casts; 0.2 for the largest values of a tensor. Measured.
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
from unittest.mock import patch

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table

import thinwire as tw
from thinwire import kernels
from thinwire.codecs import Codec, warm_up
from thinwire.kernels import reference
from thinwire.lab.codecs import Levels, OverSenders
from thinwire.rng import Key

SEED = 0
SIZES = (1 << 10, 1 << 15, 1 << 20, 1 << 24, 1 << 28)  # bytes of input
CODECS: tuple[Codec, ...] = (
    tw.codecs.Identity(),
    tw.codecs.Cast("bf16"),
    tw.codecs.Cast("fp16"),
    tw.codecs.E3M0(),
    tw.codecs.E3M0(32),
    tw.codecs.E3M0(scale="fp32"),
    tw.codecs.E3M0(rounding="stochastic"),
    tw.codecs.E2M1(),
    tw.codecs.E4M3(),
    tw.codecs.E5M2(),
    tw.codecs.Int(8),
    tw.codecs.Int(4),
    tw.codecs.Int(2),
    Levels(),
    tw.codecs.Sign(),
    tw.codecs.Sign(block=4096),
    tw.codecs.TopK(0.01),
    tw.codecs.ChunkedTopK(),
    OverSenders(tw.codecs.ChunkedTopK()),
    tw.codecs.RandomK(0.01),
)
Work = Callable[[], object]


def measure(codec: Codec, nbytes: int, turns: int) -> dict[str, Any]:
    """Returns GB/s of input, and the ratio to the copy's."""
    numel = nbytes // 4
    generator = torch.Generator().manual_seed(SEED)
    x, out = torch.randn(numel, generator=generator), torch.zeros(numel)
    payload, key = torch.empty(codec.nbytes(numel), dtype=torch.uint8), Key(SEED)
    packets = 2 if codec.joint else 1
    again = max(1, (1 << 16) // nbytes)  # a clock is too coarse for 1 KiB

    def encode() -> None:
        codec.encode(x, payload, key)

    def decode() -> None:
        if codec.joint:
            codec.decode_joint([(payload, key, 1.0)] * packets, numel)
        else:
            codec.decode_add(payload, out, key, 1e-3)

    works: dict[str, Work] = {"copy": lambda: out.copy_(x), "encode": encode, "decode": decode}
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            seconds[name].append(_seconds(work, again) / (packets if name == "decode" else 1))
    with patch.object(kernels, "_of", lambda device: reference):
        slow = {"encode": _seconds(encode, 1), "decode": _seconds(decode, 1) / packets}
    return {
        "codec": repr(codec),
        "nbytes": nbytes,
        "bits": 8 * len(payload) / numel,
        "turns": turns,
        **{name: nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()},
        **{f"{name}_of_copy": _ratio(seconds["copy"], seconds[name]) for name in ("encode", "decode")},
        **{f"{name}_reference": nbytes / value / 1e9 for name, value in slow.items()},
    }


def _seconds(work: Work, again: int) -> float:
    """Returns the seconds that this thread ran on a core, without those in which other threads had it."""
    began = time.thread_time()
    for _ in range(again):
        work()
    return (time.thread_time() - began) / again


def _ratio(copies: list[float], others: list[float]) -> list[float]:
    """Returns lower quartile, median and upper quartile of the turns."""
    return statistics.quantiles([copy / other for copy, other in zip(copies, others)], n=4)


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("codec", "bits", "size", "copy", "encode", "of copy", "quartiles", "decode", "of copy", "torch", "torch")
    view = Table(
        *columns, title="Codecs on one core, GB/s of input: encode, decode and add; last plain torch (measured)"
    )
    for row in rows:
        low, encode, high = row["encode_of_copy"]
        size = f"{row['nbytes'] >> 20} MiB" if row["nbytes"] >> 20 else f"{row['nbytes'] >> 10} KiB"
        view.add_row(
            _short(row["codec"]), f"{row['bits']:.3g}", size, f"{row['copy']:.1f}", f"{row['encode']:.1f}", f"{encode:.2f}",
            f"{low:.2f} … {high:.2f}", f"{row['decode']:.1f}", f"{row['decode_of_copy'][1]:.2f}",
            f"{row['encode_reference']:.2g}", f"{row['decode_reference']:.2g}",
        )  # fmt: skip
    return view


def _short(codec: str) -> str:
    return (
        codec.replace(", scale='exponent'", "")
        .replace(", rounding='nearest'", "")
        .replace("values=Cast(dtype='bf16')", "…")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, and nothing above 16 MiB: a smoke run")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/codecs.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(AttributeError):  # some systems do not have it
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    result = {"benchmark": "codecs", "word": "measured", "seed": SEED, **provenance()}
    sizes = [size for size in SIZES if size <= 1 << 24] if arguments.quick else SIZES
    rows = []
    for codec in CODECS:
        warm_up(codec)
        rows += [measure(codec, size, 5 if arguments.quick else 21 if size <= 1 << 24 else 7) for size in sizes]
    result["rows"] = rows
    Console(width=170).print(table(rows))
    print(f"written: {save('codecs', result, arguments.into)}")


if __name__ == "__main__":
    main()
