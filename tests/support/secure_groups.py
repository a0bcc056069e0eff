"""Replicas over a hub as threads of one process, each with its own key and connections, and a training to compare carriers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from group_laws import TIMEOUT

import thinwire as tw
from thinwire.comm import Group
from thinwire.drivers.handshake import digest
from thinwire.net import Hub, SecureGroup, Token, join


def run_secure(
    hub: Hub | Token,
    size: int,
    fn: Callable[[SecureGroup], Any],
    folder: Path,
    prefix: str = "replica",
    run: str = "",
    bits_per_second: float | None = None,
) -> list[Any]:
    """Runs `fn(group)` on `size` replicas that join `hub`. Returns the results in rank order, or raises the first error."""
    token = hub.invite(size) if isinstance(hub, Hub) else hub
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def replica(index: int) -> None:
        name = f"{prefix}-{threading.get_native_id()}-{index}" if isinstance(hub, Hub) else f"{prefix}-{index}"
        try:
            with join(str(token), name, size, folder, run or str(token), TIMEOUT, bits_per_second) as group:
                results[group.rank] = fn(group)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=replica, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


def digest_of_trained(group: Group, *, hidden: int = 64, batch: int = 32, steps: int = 40) -> bytes:
    """Trains a model of one hidden layer over `group`. Returns the digest of its weights, which is the same over any carrier."""
    model = torch.nn.Sequential(torch.nn.Linear(8, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))
    weights = torch.Generator().manual_seed(0)  # threads share torch's own generator
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(group.rank)
    with tw.Replica(tw.streaming_diloco(every=4, fragments=2, delay=1), model, optimizer, group):
        for _ in range(steps):
            x = torch.randn(batch, 8, generator=data)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(list(model.parameters()))
