"""One replica of one method: the process that utilization.py starts in each namespace.

The model, its batches and the inner optimizer are the same for all methods; a method only attaches itself. Protocol: one JSON
line on stdout when it is attached and warm, a line on stdin to start, one JSON line with the measurements, a line on stdin to leave.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so
from torch.nn.parallel import DistributedDataParallel

from thinwire import Replica, Strategy, TorchGroup
from thinwire.app.trainer.model import SIZES, Transformer
from thinwire.catalogue.parsing import parse
from thinwire.comm import CountedGroup, Group, Ledger, start_torch

TIMEOUT = 300.0  # seconds; no process dies here
Facts = Callable[[], dict[str, float]]  # counters of a method; they only grow
Model = Callable[[torch.Tensor, torch.Tensor], Any]
Attach = Callable[["Part", nn.Module, torch.optim.Optimizer], AbstractContextManager[tuple[Model, Facts]]]


@dataclass(frozen=True)
class Part:
    """The settings of one replica. `method` is bare, ddp, torchft, or the text of a Thinwire strategy."""

    method: str
    rank: int
    addresses: tuple[str, ...]
    port: int
    interface: str
    warm: int  # steps before the window, on the unshaped link
    steps: int  # steps in the window
    every: int
    delay: int
    fragments: int  # torchft's; a Thinwire strategy has its own
    size: str = "mini"
    batch: tuple[int, int] = (4, 128)
    seed: int = 0


class Stopwatch:
    """Measures time in inner steps without what a method does in its optimizer hooks: register `after` before, `before` after it."""

    def __init__(self) -> None:
        self.inner: list[float] = []
        self._step = self._update = 0.0

    def begin(self) -> None:
        self._step = time.perf_counter()

    def backward_done(self) -> None:
        self._step = time.perf_counter() - self._step

    def before(self, *_: Any) -> None:
        self._update = time.perf_counter()

    def after(self, *_: Any) -> None:
        self.inner.append(self._step + time.perf_counter() - self._update)


@contextmanager
def bare(part: Part, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Model, Facts]]:
    """No exchange: the upper limit."""
    yield model, dict


@contextmanager
def thinwire(part: Part, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Model, Facts]]:
    start_torch(part.rank, 2, part.addresses[0], part.port, TIMEOUT)
    with over(TorchGroup.from_world(2, timeout=TIMEOUT), part, model, optimizer) as attached:
        yield attached


@contextmanager
def over(
    carrier: Group, part: Part, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Model, Facts]]:
    """A Thinwire strategy over any carrier."""
    strategy = parse(part.method)
    assert isinstance(strategy, Strategy)
    ledger = Ledger()
    replica = Replica(strategy, model, optimizer, CountedGroup(carrier, ledger))
    try:
        yield model, lambda: {"counted_nbytes": ledger.sent("packet"), "late_seconds": replica.stall_seconds}
    finally:
        replica.close()


@contextmanager
def ddp(part: Part, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Model, Facts]]:
    """Exchanges within backward, so its inner steps cannot be timed separately; gradients only, no buffers."""
    start_torch(part.rank, 2, part.addresses[0], part.port, TIMEOUT)
    yield DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False), dict


@contextmanager
def torchft(part: Part, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Model, Facts]]:
    """torchft's streaming DiLoCo as its own tests set it up: fp32, strided layers, all other parameters in the first fragment."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    own = part.addresses[part.rank]
    with ExitStack() as stack:
        if part.rank == 0:
            lighthouse = LighthouseServer(bind=f"[::]:{part.port}", min_replicas=2, join_timeout_ms=60_000)
            stack.callback(lighthouse.shutdown)
        store = TCPStore(own, part.port + 1, is_master=True, wait_for_workers=False)
        patience = timedelta(seconds=TIMEOUT)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=patience), min_replica_size=2, use_async_quorum=False, init_sync=False,
            load_state_dict=model.load_state_dict, state_dict=model.state_dict,
            timeout=patience, quorum_timeout=patience, connect_timeout=patience,
            replica_id=f"replica_{part.rank}", hostname=own, lighthouse_addr=f"http://{part.addresses[0]}:{part.port}",
            store_addr=own, store_port=store.port, rank=0, world_size=1,
        )  # fmt: skip
        stack.callback(manager.shutdown, wait=False)
        fragments = _fragments(model, part.fragments)
        outer = [torch.optim.SGD(f.parameters(), lr=0.4, momentum=0.9, nesterov=True) for f in fragments]
        diloco = DiLoCo(
            manager, fragments, optimizer, outer, sync_every=part.every,
            fragment_sync_delay=part.delay, fragment_update_alpha=0.5,
        )  # fmt: skip
        stack.enter_context(diloco)
        yield model, lambda: {"rounds": float(manager.current_step())}


ATTACH: dict[str, Attach] = {"bare": bare, "ddp": ddp, "torchft": torchft}


def _fragments(model: nn.Module, count: int) -> list[nn.Module]:
    assert isinstance(model, Transformer)
    fragments = [nn.ModuleList(list(model.blocks)[i::count]) for i in range(count)]
    fragments[0].extend([model.embedding, model.norm, model.head])
    return list(fragments)


@dataclass(frozen=True)
class Reading:
    """Everything that is read at both ends of the window."""

    seconds: float
    process_cpu: float  # all threads of this process
    thread_cpu: float  # the training thread
    core_cpu: float  # everything that this core did
    sent: int  # the interface's counter
    facts: dict[str, float]

    @classmethod
    def now(cls, part: Part, facts: Facts) -> Reading:
        sent = int(Path(f"/sys/class/net/{part.interface}/statistics/tx_bytes").read_text())
        return cls(time.perf_counter(), time.process_time(), time.thread_time(), _core_cpu(), sent, facts())


def _core_cpu() -> float:
    """Returns the busy seconds of this process's core since boot; interrupts count, idling and waiting do not."""
    core = min(os.sched_getaffinity(0))
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    user, nice, system, _, _, irq, soft, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def run(part: Part) -> None:
    """Attaches, warms up, waits for the start line, trains `steps` steps, and returns the measurements."""
    with standing(part, ATTACH.get(part.method, thinwire)) as window:
        say({"ready": part.rank})
        hear()
        say(window(part.steps))
        hear()  # the peer may still need this process


@contextmanager
def standing(part: Part, attach: Attach) -> Iterator[Callable[[int], dict[str, Any]]]:
    """A model that trains with a method and is warm. What it yields trains so many steps and returns what was measured."""
    model = Transformer(SIZES[part.size], seed=part.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(part.seed + 1 + part.rank)
    batches = [torch.randint(0, 256, part.batch, generator=generator) for _ in range(8)]
    watch = Stopwatch()
    optimizer.register_step_post_hook(watch.after)
    with attach(part, model, optimizer) as (attached, facts):
        optimizer.register_step_pre_hook(watch.before)

        def step(number: int) -> float:
            watch.begin()
            optimizer.zero_grad()
            tokens = batches[number % len(batches)]
            attached(tokens, tokens).loss.backward()
            watch.backward_done()
            optimizer.step()
            return time.perf_counter()

        def window(steps: int) -> dict[str, Any]:
            watch.inner.clear()
            begin = Reading.now(part, facts)
            ends = [begin.seconds, *(step(number) for number in range(steps))]
            end = Reading.now(part, facts)
            return _measured(part, begin, end, ends, watch.inner)

        for number in range(part.warm):
            step(number)
        yield window


def _measured(part: Part, begin: Reading, end: Reading, ends: list[float], inner: list[float]) -> dict[str, Any]:
    seconds = [b - a for a, b in pairwise(ends)]
    own = end.process_cpu - begin.process_cpu
    return {
        "rank": part.rank,
        "steps": len(seconds),
        "wall_seconds": end.seconds - begin.seconds,
        "step_seconds": statistics.median(seconds),
        "inner_seconds": None if part.method == "ddp" else sum(inner),
        "inner_step_seconds": None if part.method == "ddp" else statistics.median(inner),
        "cpu_seconds": own,
        "training_thread_cpu_seconds": end.thread_cpu - begin.thread_cpu,
        "others_cpu_seconds": max(0.0, end.core_cpu - begin.core_cpu - own),
        "wire_nbytes": end.sent - begin.sent,
        **{name: end.facts[name] - value for name, value in begin.facts.items()},
        "each_step_seconds": [round(s, 4) for s in seconds],
    }


def say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def hear() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the benchmark that started this replica is gone.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    run(Part(**{**given, "addresses": tuple(given["addresses"]), "batch": tuple(given["batch"])}))
    os._exit(0)  # servers and carriers of the rivals have threads that do not end by themselves
