"""The speed of codecs on a GPU: GB/s of their fp32 input, beside a copy of the same tensor on the device.

    python benchmarks/codecs_gpu.py

For each codec three operations take turns: `copy_` of the input, encoding, and decoding onto a sum with a weight other than one.
A time is from launch to the end of the work on the device, including the check that all values are finite. A ratio is the median
over turns of copy / other. Goal: 0.7 of the copy for formats with a scale for each block; docs/gpus.md has the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table

import thinwire as tw
from thinwire.codecs import Codec
from thinwire.rng import Key

SEED, TURNS = 0, 21
SIZES = (1 << 20, 1 << 24, 1 << 28)  # bytes of input
CODECS: tuple[Codec, ...] = (
    *(
        tw.codecs.Identity(),
        tw.codecs.Cast("bf16"),
        tw.codecs.Cast("fp16"),
        tw.codecs.E3M0(),
        tw.codecs.E3M0(scale="fp32"),
        tw.codecs.E3M0(4096),
    ),
    *(
        tw.codecs.E3M0(rounding="stochastic"),
        tw.codecs.E2M1(),
        tw.codecs.E4M3(),
        tw.codecs.E5M2(),
        tw.codecs.Int(8),
        tw.codecs.Int(4),
        tw.codecs.Int(2),
    ),
    *(tw.codecs.Sign(), tw.codecs.Sign(block=4096)),
)


def measure(codec: Codec, nbytes: int) -> dict[str, Any]:
    """Returns GB/s of input, and the ratio to the copy's."""
    numel = nbytes // 4
    generator = torch.Generator("cuda").manual_seed(SEED)
    x, out = torch.randn(numel, generator=generator, device="cuda"), torch.zeros(numel, device="cuda")
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device="cuda")
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, payload, Key(SEED)),
        "decode": lambda: codec.decode_add(payload, out, Key(SEED), 1e-3),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(TURNS + 1):
        for name, work in works.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - began)
    ratios = {
        f"{name}_of_copy": statistics.median(copy / other for copy, other in zip(seconds["copy"], seconds[name]))
        for name in ("encode", "decode")
    }
    speeds = {name: nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    return {"codec": repr(codec), "nbytes": nbytes, **speeds, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/codecs_gpu.json)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not find_spec("triton"):
        parser.exit(
            2, "codecs_gpu: a GPU that torch sees (torch.cuda.is_available()) and triton are needed; here is none.\n"
        )
    result = {"benchmark": "codecs_gpu", "word": "measured", "gpu": torch.cuda.get_device_name(), **provenance()}
    result["rows"] = [measure(codec, nbytes) for codec in CODECS for nbytes in SIZES]
    view = Table(
        "codec", "MiB", "copy", "encode", "of copy", "decode", "of copy", title="Codecs on a GPU, GB/s of input"
    )
    for row in result["rows"]:
        numbers = [f"{row[name]:.3g}" for name in ("copy", "encode", "encode_of_copy", "decode", "decode_of_copy")]
        view.add_row(row["codec"], str(row["nbytes"] >> 20), *numbers)
    Console(width=130).print(view)
    print(f"written: {save('codecs_gpu', result, arguments.into)}")


if __name__ == "__main__":
    main()
