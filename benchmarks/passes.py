"""Passes over a fragment from the parameters to the wire and back: bytes that operations read and write, and new buffers.

    python benchmarks/passes.py            # a minute
    python benchmarks/passes.py --before OLD.json   # with the figures of an earlier version beside

The default, `streaming_sign`, two replicas as threads, one fragment of four million parameters in one tensor. Every operation of torch
is counted by a dispatch mode in the thread that runs it, with all its inputs and outputs; a kernel of numba by its arguments, and of a
tensor to which it adds at some places, these. Bytes are counted whether they come from the cache or from memory. A new buffer is a tensor
of at least half the fragment that an operation allocates.
Four rounds count, after the first ones, so the pool of buffers is full. Counts are exact, and the same on every machine.
In a second run without counters the stages of the main thread are timed: the seconds that the thread had a core, median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from provenance import provenance, save
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thinwire as tw
from thinwire.drivers.deltas import DeltaDriver
from thinwire.drivers.rounds import RoundPipeline
from thinwire.exchange.send_queue import SendQueue
from thinwire.kernels import cpu_block
from thinwire.pieces.partition import Whole

NUMEL, EVERY, FIRST, ROUNDS = 1 << 22, 4, 3, 4
STAGES = ("departure, main thread", "encode, beside training", "decode, beside training", "landing, main thread")
OVERWRITES = ("copy_", "zero_", "fill_")


# bytes that the default's kernels read and write, by their arguments
KERNELS: dict[str, Callable[..., tuple[int, int]]] = {
    "encode_signs": lambda x, payload, *_: (x.nbytes, payload.nbytes),
    "add_signs": lambda payload, out, *_: (payload.nbytes + out.nbytes, out.nbytes),
    "select_largest": lambda x, chunk, count, index: (x.nbytes, index.nbytes),
    "pack_ascending": lambda index, packed, low: (index.nbytes, packed.nbytes),
    "unpack_ascending": lambda packed, index, *_: (packed.nbytes, index.nbytes),
    "carry": lambda x, *_: (4 * x.nbytes, x.nbytes),
    "add_at": lambda index, values, *_: (index.nbytes + 2 * values.nbytes, values.nbytes),
}


class Counts:
    """Bytes read and written and buffers made, of one replica, by stage."""

    def __init__(self) -> None:
        self.lock, self.on = threading.Lock(), False
        self.read, self.written, self.made = (defaultdict[str, int](int) for _ in range(3))

    def add(self, stage: str, read: int, written: int, made: int = 0) -> None:
        if self.on:
            with self.lock:
                self.read[stage] += read
                self.written[stage] += written
                self.made[stage] += made


class Counter(TorchDispatchMode):
    """Counts the operations of one thread for a `stage`."""

    def __init__(self, counts: Counts, stage: str) -> None:
        super().__init__()
        self.counts, self.stage = counts, stage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, schema = func(*args, **(kwargs or {})), func._schema
        returned = [r.alias_info for r in schema.returns]
        if any(info is not None and not info.is_write for info in returned):  # a view
            return result
        given = list(zip(schema.arguments, args)) + [
            (a, (kwargs or {}).get(a.name)) for a in schema.arguments[len(args) :]
        ]
        read = written = made = 0
        for argument, value in given:
            nbytes = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            writes = argument.alias_info is not None and argument.alias_info.is_write
            only = argument.name == "out" or schema.name.removeprefix("aten::") in OVERWRITES
            written += nbytes if writes else 0
            read += 0 if writes and only else nbytes
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not any(returned):
                written += 0 if "empty" in schema.name else leaf.nbytes
                made += leaf.nbytes >= 2 * NUMEL  # half a fragment
        self.counts.add(self.stage, read, written, made)
        return result


def counted(function: Callable[..., Any], stage: str, mine: Callable[[Any], Counts | None]) -> Callable[..., Any]:
    """`function` with a counter in its thread, if `mine` of its first argument knows one."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts = mine(self)
        if counts is None:
            return function(self, *args, **kwargs)
        with Counter(counts, stage):
            current.stage, current.counts = stage, counts
            try:
                return function(self, *args, **kwargs)
            finally:
                current.stage = ""

    return wrapped


current = threading.local()


@contextmanager
def counting(counts: Counts) -> Iterator[None]:
    """A context in which replica 0 counts."""

    def kernel(name: str) -> Callable[..., Any]:
        function = getattr(cpu_block, name)

        def wrapped(*args: Any) -> Any:
            if stage := getattr(current, "stage", ""):
                current.counts.add(stage, *KERNELS[name](*args))
            return function(*args)

        return wrapped

    def of_group(owner: Any) -> Counts | None:
        return counts if owner.rank == 0 else None

    put = SendQueue.put

    def with_counter(self: SendQueue, order: Any, job: Callable[[], Any]) -> Any:
        return put(
            self, order, lambda: counted(lambda queue: job(), STAGES[1], lambda queue: of_group(queue._group))(self)
        )

    def of_driver(driver: Any) -> Counts | None:
        return of_group(driver._group)

    with (
        patch.dict(vars(cpu_block), {name: kernel(name) for name in KERNELS}),
        patch.object(SendQueue, "put", with_counter),
        patch.object(
            RoundPipeline, "_arrive", counted(RoundPipeline._arrive, STAGES[2], lambda p: of_group(p.context.group))
        ),
        patch.object(DeltaDriver, "_depart", counted(DeltaDriver._depart, STAGES[0], of_driver)),
        patch.object(DeltaDriver, "_land", counted(DeltaDriver._land, STAGES[3], of_driver)),
    ):
        yield


@contextmanager
def timing(seconds: dict[str, list[float]]) -> Iterator[None]:
    """A context in which the stages of replica 0's main thread are timed."""

    def timed(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def wrapped(self: DeltaDriver, *args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            result = function(self, *args, **kwargs)
            if self._group.rank == 0:
                seconds[stage].append(time.thread_time() - began)
            return result

        return wrapped

    with (
        patch.object(DeltaDriver, "_depart", timed(DeltaDriver._depart, STAGES[0])),
        patch.object(DeltaDriver, "_land", timed(DeltaDriver._land, STAGES[3])),
    ):
        yield


def measure() -> list[dict[str, Any]]:
    """The rows: a stage, its bytes for each parameter and round, and the main thread's seconds for a round."""
    counts, seconds = Counts(), defaultdict[str, list[float]](list)
    with counting(counts):
        train(counts)
    with timing(seconds):
        train(Counts())
    share = NUMEL * ROUNDS
    return [
        {
            "stage": s,
            "read_nbytes": counts.read[s] / share,
            "written_nbytes": counts.written[s] / share,
            "buffers": counts.made[s] / ROUNDS,
            "seconds": statistics.median(seconds[s][FIRST : FIRST + ROUNDS]) if s in seconds else None,
        }
        for s in STAGES
    ]


def train(counts: Counts) -> None:
    """Train two replicas; `counts` is on in the rounds that count."""
    strategy = tw.streaming_sign(every=EVERY, delay=1, partition=Whole())

    def replica(group: tw.Group) -> None:
        torch.manual_seed(0)
        model = nn.Linear(NUMEL // 1024, 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with tw.Replica(strategy, model, optimizer, group) as attached:
            for step in range(EVERY * (FIRST + ROUNDS) + 2):
                if group.rank == 0 and step == EVERY * FIRST + 2:
                    assert attached._training.fragments[0].flight is None  # whole rounds count
                    counts.on = True
                model.weight.grad = torch.full_like(model.weight, 1.0 + group.rank)
                optimizer.step()
            assert attached._training.fragments[0].flight is None
            if group.rank == 0:
                counts.on = False
            attached.finish()

    tw.run_threads(2, replica, timeout=600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the JSON of an earlier version, whose figures go beside these")
    parser.add_argument("--into", type=Path, help="where the JSON goes (default: benchmarks/results/passes.json)")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "passes",
        "word": "measured",
        **provenance(),
        "numel": NUMEL,
        "rows": measure(),
    }
    if arguments.before:
        earlier = json.loads(arguments.before.read_text())
        result["before"] = {"commit": earlier["commit"], "rows": earlier["rows"]}
    view = Table("stage", "read", "written", "new buffers", "ms", title="Bytes per parameter and round (counted)")
    for row in result["rows"]:
        ms = "" if row["seconds"] is None else f"{1e3 * row['seconds']:.1f}"
        figures = (f"{row[name]:.1f}" for name in ("read_nbytes", "written_nbytes", "buffers"))
        view.add_row(row["stage"], *figures, ms)
    Console(width=120).print(view)
    print(f"written: {save('passes', result, arguments.into)}")


if __name__ == "__main__":
    main()
