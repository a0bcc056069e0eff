"""Predicted memory of a replica against the peak that the kernel counted for it: goal within 10 %.

    python benchmarks/memory.py            # about ten minutes
    python benchmarks/memory.py --quick    # two settings, about a minute

Linux. Every setting is trained by `thinwire train`'s own code, two replicas as processes. A replica's figure is its
peak of resident memory (VmHWM) from the making of the model to the exported file, over what the process held after a
first step of the smallest model and a packet of the codec, which bring all libraries in. The kernel counts pages that
are resident, so glibc is told to give freed memory back (MALLOC_MMAP_THRESHOLD_); the last column is the same without
that. Measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table

from thinwire.app.plan.memory import Memory, replica_memory
from thinwire.app.trainer import launch
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import make_model
from thinwire.app.trainer.tokenizer import open_corpus
from thinwire.codecs import Identity, warm_up

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
SMALL = {"steps": 12, "eval_every": 6, "eval_batches": 1, "checkpoint_every": 6, "every": 5}
SETTINGS: list[dict[str, Any]] = [
    {"model": "mini", "batch": 16, "sequence": 128, "delay": 1},
    {"model": "mini", "batch": 8, "sequence": 128, "strategy": "diloco"},
    {"model": "mini", "batch": 2, "sequence": 128, "strategy": "diloco", "codec": "Identity"},
    {"model": "mini", "batch": 4, "sequence": 256, "delay": 1, "accumulate": 2},
    {"model": "mini", "batch": 16, "sequence": 64, "strategy": "data_parallel", "every": None},
    {"model": "tiny", "batch": 32, "sequence": 256, "delay": 1},
    {"model": "mini", "batch": 8, "sequence": 128, "delay": 1, "precision": "bf16"},
    {"model": "mini", "batch": 4, "sequence": 128, "delay": 1, "tokenizer": "bpe:4096"},
    {"model": "35m", "batch": 1, "sequence": 256, "strategy": "sparse_loco"},
]


def predicted(run: Run, vocabulary: int) -> Memory:
    with torch.device("meta"):
        model = make_model(run.model, run.data.sequence, run.seed, vocabulary)
    assert isinstance(model, Transformer)
    strategy = run.make_strategy()
    numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
    return replica_memory(
        model.architecture, strategy, numels, run.placement.replicas,
        batch=run.data.largest_batch, sequence=run.data.sequence, accumulate=run.data.accumulate, bf16=run.model.precision == "bf16",
    )  # fmt: skip


def measured(run: Run, place: Path, environment: dict[str, str]) -> int:
    """The larger peak of two replicas, in bytes."""
    folder = Path(tempfile.mkdtemp(dir=place))
    run.save(folder / "run.toml")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--replica", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": str(run.placement.replicas), "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
        )
        for rank in range(run.placement.replicas)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{run} failed; its replicas said why above")
    return max(int(text.strip().splitlines()[-1]) for text in said)


def replica(folder: Path) -> None:
    """In a process of its own: train, and print the peak over what was there before."""
    torch.set_num_threads(1)
    model = Transformer(SIZES["nano"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    model(tokens, tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    del model, optimizer
    run = Run.load(folder / "run.toml")
    warm_up(getattr(run.make_strategy(), "codec", Identity()))  # numba and LLVM
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    launch.train_as_rank(run, folder, resume=False)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    print(peak - before)


def text(place: Path) -> Path:
    """A megabyte of made-up words: little enough that its pages do not count."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(8000)]
    path = place / "words.txt"
    path.write_text(" ".join(draw.choices(words, k=200_000)))
    return path


def table(rows: list[dict[str, Any]]) -> Table:
    view = Table(
        "setting", "phase", "predicted", "peak", "predicted / peak", "glibc's default", title="Memory of a replica, MB"
    )
    for row in rows:
        view.add_row(
            row["setting"], row["phase"], f"{row['predicted_nbytes'] / 1e6:.0f}", f"{row['measured_nbytes'] / 1e6:.0f}",
            f"{row['ratio']:.3f}", f"{row['default_malloc_nbytes'] / 1e6:.0f}",
        )  # fmt: skip
    return view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two settings only")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/memory.json)")
    parser.add_argument("--replica", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica:
        return replica(arguments.replica)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        words = str(text(Path(name)))
        for setting in SETTINGS[:2] if arguments.quick else SETTINGS:
            run = Run.of(text=(words,), **{**SMALL, **setting})
            phase, expected = predicted(run, open_corpus(run.data, run.model.model).vocabulary).worst()
            peak, hoarded = (measured(run, Path(name), environment) for environment in (GIVE_BACK, {}))
            described = ", ".join(f"{key} {value}" for key, value in setting.items() if value is not None)
            rows.append({
                "setting": described, "phase": phase, "predicted_nbytes": expected, "measured_nbytes": peak,
                "ratio": expected / peak, "default_malloc_nbytes": hoarded,
            })  # fmt: skip
            Console(width=160).print(table(rows[-1:]))
    errors = [abs(row["ratio"] - 1) for row in rows]
    result = {
        "benchmark": "memory", "word": "measured", **provenance(), "rows": rows,
        "largest_error": max(errors), "mean_error": statistics.mean(errors),
    }  # fmt: skip
    Console(width=160).print(table(rows))
    print(f"largest error {max(errors):.1%}, mean {statistics.mean(errors):.1%}")
    print(f"written: {save('memory', result, arguments.into)}")


if __name__ == "__main__":
    main()
