"""The program of the two processes of `test_ddp_hook.py`."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from core_processes import uneven
from torch import nn

import thinwire as tw
from thinwire.comm import start_torch
from thinwire.testing.toy import batch, weights

STEPS, WORLD = 10, 2
STRATEGIES = {
    "identity": tw.data_parallel(),
    "identity, all-reduced": tw.data_parallel(exchange=tw.exchange.AllReduce()),
    "dgc": tw.lab.recipes.dgc(
        clip=0.0, codec=tw.lab.codecs.Each(tw.codecs.TopK(0.1), least=10), policy=tw.pieces.policy.Constant()
    ),
    "one_bit_adam": tw.lab.recipes.one_bit_adam(clip=0.0, freeze=4, codec=tw.codecs.Sign("l2", 16)),
    "ef21": tw.lab.recipes.ef21(codec=tw.codecs.TopK(0.1)),
    "power_sgd": tw.lab.recipes.power_sgd(rank=1),
    "qsgd": tw.lab.recipes.qsgd(),
}
POISONED = "poisoned"


def steps(ddp, optimizer, rank, first, last, poison=0):
    seen = []
    for step in range(first, last):
        x, y = batch(0, rank, step)
        optimizer.zero_grad()
        loss = ((ddp(x) - y) ** 2).mean()
        (loss * float("nan") if step == poison and rank == 1 else loss).backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in ddp.parameters()):
            optimizer.step()
        seen.append(weights(ddp.module))
    return seen


def make(strategy, group, rank, hooked=True):
    ddp = nn.parallel.DistributedDataParallel(uneven(), bucket_cap_mb=1e-4)  # buckets of about 100 bytes
    inner = strategy.inner or tw.pieces.inner_optimizers.AdamW()
    optimizer, hook = inner.make(ddp.module, 0.01 / inner.lr_factor, 0.1), None
    if hooked:
        hook = tw.GradientHook(strategy, ddp.module, group)
        hook.register(ddp, optimizer)
    return ddp, optimizer, hook


def everything(rank: int) -> dict[str, Any]:
    group, seen = tw.TorchGroup.from_world(WORLD), {}
    ddp, optimizer, _ = make(STRATEGIES["identity"], group, rank, hooked=False)
    seen["plain"] = steps(ddp, optimizer, rank, 0, STEPS)
    for name, strategy in STRATEGIES.items():
        ddp, optimizer, hook = make(strategy, group, rank)
        seen[name] = steps(ddp, optimizer, rank, 0, STEPS)
        seen[name + " state"] = hook.state()[0]
        seen["buckets"] = len(hook._states)
        hook.close()
    strategy = STRATEGIES["dgc"]
    ddp, optimizer, hook = make(strategy, group, rank)
    seen[POISONED] = steps(ddp, optimizer, rank, 0, STEPS, poison=5)
    hook.close()
    # saved after five steps and resumed in new objects
    ddp, optimizer, hook = make(strategy, group, rank)
    steps(ddp, optimizer, rank, 0, 5)
    saved, model, moments = hook.state(), ddp.module.state_dict(), optimizer.state_dict()
    hook.close()
    ddp, optimizer, hook = make(strategy, group, rank)
    ddp.module.load_state_dict(model)
    optimizer.load_state_dict(moments)
    hook.load_state(*saved)
    seen["resumed"] = steps(ddp, optimizer, rank, 5, STEPS)
    hook.close()
    ddp, optimizer, hook = make(STRATEGIES["identity"], group, rank)
    seen["drifted"] = steps(ddp, optimizer, rank, 0, 5)
    if rank == 1:
        ddp.module.head.weight.detach().add_(1e-4)
    with warnings.catch_warnings(record=True) as told:
        seen["drifted"] += steps(ddp, optimizer, rank, 5, 102)
    seen["told"] = [str(warning.message) for warning in told]
    hook.close()
    # a rank that has fewer batches
    ddp, optimizer, hook = make(STRATEGIES["identity"], group, rank)
    try:
        with ddp.join():
            steps(ddp, optimizer, rank, 0, 3 - rank)
    except tw.ThinwireError as error:
        seen["joined"] = f"{type(error).__name__}: {error}"
    group.close()
    return seen


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    start_torch(rank, WORLD, "127.0.0.1", port, 600.0)
    torch.save(everything(rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)


def run(folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_process, args=(rank, port, str(folder))) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    for process in processes:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]
