"""The programs of the processes of `test_processes_equal_threads.py`: four ranks under gloo, as four replicas or as two replicas of two shards."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from strategies import IN_SITES, METHODS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire.comm import start_torch
from thinwire.pieces.partition import local
from thinwire.testing.toy import Journey, Plan, adamw, agreed, batch, fill, same_bits, travel

WORLD, STEPS = 4, 12
ALIKE: tuple[Mapping[str, str], ...] = ({},) * WORLD
# Environment variables with which libraries are told another processor.
NEW = {"ATEN_CPU_CAPABILITY": "avx512"}  # lower, or the best instructions of this machine
MIDDLE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OLD = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA,-FMA4,-AVX2",
}
OLDEST = OLD | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
UNLIKE = (OLDEST, OLD, MIDDLE, NEW)
POISON_STEP = 6
FOUR = METHODS | {"two sites": IN_SITES[2, 2]}
STRATEGIES = {
    "diloco": tw.diloco(every=3),
    "streaming": tw.streaming_diloco(every=6, fragments=2, delay=2, codec=tw.codecs.Identity()),
    "streaming, 4 bits": tw.streaming_diloco(every=6, fragments=2, delay=2),
    "eager": tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, 3), outer=tw.pieces.outer.Nesterov(), merge=tw.pieces.merge.Eager()
    ),
    "data_parallel": tw.data_parallel(),
}


class Uneven(nn.Module):
    """A model whose sizes two shards cannot halve: 5 rows become 3 and 2, and the head's single row leaves one shard empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def uneven() -> nn.Module:
    return fill(Uneven())


def sharded(shards: int) -> nn.Module:
    """Returns `Uneven`, sharded layer by layer over the ranks of this replica by FSDP2."""
    mesh = init_device_mesh("cpu", (WORLD // shards, shards), mesh_dim_names=("replica", "shard"))["shard"]
    model = uneven()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> Tensor:
    """Returns all weights, flat. If they are sharded, all ranks of the site must call it."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def train(strategy: tw.Strategy, group: Any, model: nn.Module, poisoned: bool = False) -> dict[str, Any]:
    """Trains. Both ranks of a site see the same batch, so the mean of their gradients is exactly the replica's gradient."""
    journey = Journey()

    def observer(event: str, step: int, **fields: Any) -> None:
        journey.events.append({"event": event, "step": step, **fields})

    optimizer = adamw(model)
    shard = getattr(group, "shard", 0)
    with tw.Replica(strategy, model, optimizer, group, site=getattr(group, "site", None), observer=observer) as replica:
        for step in range(1, STEPS + 1):
            x, y = batch(0, group.rank, step)
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            if poisoned and step == POISON_STEP and (group.rank, shard) == (1, 1):
                local(next(iter(model.parameters())).detach()).view(-1)[0] = float("nan")
            optimizer.step()
            journey.weights.append(whole(model))
            journey.agreed.append(agreed(replica))
        exported = replica.export()
    journey.final, journey.final_agreed = whole(model), agreed(replica)
    return {"journey": journey, "exported": exported, "numels": [f.numel for f in replica.fragments]}


def site_is_needed(group: Any) -> str:
    model = sharded(2)
    try:
        tw.Replica(tw.diloco(), model, adamw(model), group)
    except tw.ModelError as error:
        return str(error)
    return ""


def resumed(group: Any) -> list[bool]:
    """Law 6 with shards: saves with rounds in the air, and resumes in new objects."""
    strategy, same = STRATEGIES["streaming, 4 bits"], []
    model = sharded(2)
    optimizer = adamw(model)
    saved: list[Any] = []
    seen: list[Tensor] = []

    def inner(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        x, y = batch(0, group.rank, step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()

    with tw.Replica(strategy, model, optimizer, group, site=group.site) as replica:
        for step in range(1, STEPS + 1):
            inner(model, optimizer, step)
            seen.append(whole(model))
            moments = [{k: local(v).clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
            tensors, facts = replica.state()
            parts = [local(p.detach()).clone() for p in model.parameters()]
            saved.append((parts, moments, {name: t.clone() for name, t in tensors.items()}, facts))
    for at in (6, 7, 10):
        parts, moments, tensors, facts = saved[at - 1]
        model = sharded(2)
        optimizer = adamw(model)
        with tw.Replica(strategy, model, optimizer, group, site=group.site) as replica:
            inner(model, optimizer, 99)  # gives the optimizer a state to overwrite
            for p, part, moment in zip(model.parameters(), parts, moments):
                local(p.detach()).copy_(part)
                for name, value in moment.items():
                    local(optimizer.state[p][name]).copy_(value)
            replica.load_state(tensors, facts)
            for step in range(at + 1, STEPS + 1):
                inner(model, optimizer, step)
                same.append(same_bits(whole(model), seen[step - 1]))
    return same


CUT = tw.lab.recipes.d_psgd(topology=tw.lab.topology.Cut(tw.lab.topology.Ring(), 4, 12))


def healed(rank: int) -> Journey:
    """Trains one replica on a ring of eight that is cut in two and heals."""
    journey = travel(Plan(CUT, steps=24), tw.TorchGroup.from_world(replicas=8, timeout=600.0))
    torch.distributed.barrier()  # a process that leaves earlier must not close connections that others still read
    return journey


def everything(rank: int) -> dict[str, Any]:
    four = tw.TorchGroup.from_world(replicas=4, timeout=600.0)
    two = tw.TorchGroup.from_world(replicas=2, timeout=600.0)
    results: dict[str, Any] = {"carriers": {name: travel(Plan(strategy), four) for name, strategy in FOUR.items()}}
    results["sharded"] = {name: train(strategy, two, sharded(2)) for name, strategy in STRATEGIES.items()}
    results["poisoned"] = {
        name: train(strategy, two, sharded(2), poisoned=True)
        for name, strategy in STRATEGIES.items()
        if name != "data_parallel"
    }
    results["site"] = site_is_needed(two)
    results["resumed"] = resumed(two)
    return results


def _process(fn: Callable[[int], Any], rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    try:
        start_torch(rank, world, "127.0.0.1", port, 600.0)
        torch.save(fn(rank), Path(folder) / f"{rank}.pt")
    except BaseException:
        (Path(folder) / f"{rank}.txt").write_text(traceback.format_exc())
    os._exit(0)  # does not wait for a group that may be dead


def run_world(
    fn: Callable[[int], Any], folder: Path, limit: float = 900.0, machines: Sequence[Mapping[str, str]] = ALIKE
) -> list[Any]:
    """Runs `fn(rank)` in every process of a world, and raises the first failure with its traceback. `machines`: additional
    environment variables of each process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    world = len(machines)
    processes = [
        context.Process(target=_process, args=(fn, rank, world, port, str(folder)), daemon=True)
        for rank in range(world)
    ]
    for process, machine in zip(processes, machines):
        with mock.patch.dict(os.environ, machine):
            process.start()
    end = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    failures = [path.read_text() for path in sorted(folder.glob("*.txt"))]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
