"""What the processes of test_site_processes.py run: eight ranks under gloo, 2 × 2 × 2."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from sites import Seen, train

import thinwire as tw
from thinwire.codecs import Int
from thinwire.comm import start_torch
from thinwire.sharding import Sharding, Shards, zero_plus_plus

WORLD = 8
SHARDINGS = {
    "ZeRO-3": Sharding(shards=Shards(8, 8, 8)),
    "three levels": Sharding(shards=Shards(2, 4, 8)),
    "three levels, few bits": Sharding(shards=Shards(2, 4, 8), weights=Int(8, 64), gradients=Int(4, 32)),
    "ZeRO++": zero_plus_plus(8, 4, Int(8, 64, "fp32"), Int(4, 32, "fp32")),
}


def everything(rank: int) -> dict[str, Seen]:
    group = tw.TorchGroup.from_world(replicas=WORLD, timeout=600.0)
    return {name: train(group, sharding, steps=3, micro=2) for name, sharding in SHARDINGS.items()}


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    try:
        start_torch(rank, WORLD, "127.0.0.1", port, 120.0)
        torch.save(everything(rank), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(traceback.format_exc())
    os._exit(0)  # without waiting for a group that may be dead


def run_world(folder: Path, limit: float = 900.0) -> list[Any]:
    """`everything` in every process; raises with the traceback of the first that failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_process, args=(rank, port, str(folder)), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    failures = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
