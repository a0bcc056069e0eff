"""One replica that may be killed at any time, with Thinwire's rounds or torchft's DiLoCo. elastic.py starts it in its namespace.

Its inner step is a pause of given length and an update, so three replicas do not need three cores. It writes a line for each
event until it is killed.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from methods import Stopwatch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so

from thinwire import Replica, streaming_diloco
from thinwire.comm import Link
from thinwire.membership import LighthouseRendezvous, Membership, Timeouts
from thinwire.pieces.partition import Sequential


@dataclass(frozen=True)
class Part:
    """The settings of one replica. `timeout` is torchft's only timeout; Thinwire's timeouts follow from the other settings."""

    method: str  # thinwire or torchft
    name: str
    host: str
    lighthouse: str
    file: str
    bits_per_second: float
    every: int = 30
    delay: int = 5
    fragments: int = 2
    width: int = 300
    step_seconds: float = 0.1
    timeout: float = 10.0


Write = Callable[..., None]


def model_of(part: Part) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(*(nn.Linear(part.width, part.width) for _ in range(3))) for _ in range(part.fragments)]
    return nn.Sequential(*layers)


def thinwire(part: Part, model: nn.Sequential, optimizer: torch.optim.Optimizer, write: Write) -> object:
    strategy = streaming_diloco(every=part.every, delay=part.delay, partition=Sequential(part.fragments))
    numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
    nbytes = strategy.nbytes_per_period(numels, 3) // part.fragments
    timeouts = Timeouts.of(part.every, part.delay, part.step_seconds, nbytes, Link(part.bits_per_second))
    meeting = LighthouseRendezvous(part.lighthouse, host=part.host)
    membership = Membership(meeting, part.name, least=2, timeouts=timeouts)

    def observe(event: str, step: int, **fields: Any) -> None:
        if event == "round" and fields["fragment"] >= 0:
            counted = fields["counted"]
            write("round", good=fields["committed"] is True and part.name in counted, members=len(counted))

    return Replica(strategy, model, optimizer, membership, observer=observe)


def torchft(part: Part, model: nn.Sequential, optimizer: torch.optim.Optimizer, write: Write) -> object:
    """Sets up torchft as its own tests do, with its default transport for the state of a returning replica."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    store = TCPStore(part.host, 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=part.timeout)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience), min_replica_size=2, use_async_quorum=False, init_sync=False,
        load_state_dict=load, state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        timeout=patience, quorum_timeout=patience, connect_timeout=patience, replica_id=part.name, hostname=part.host,
        lighthouse_addr=f"http://{part.lighthouse}", store_addr=part.host, store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    outer = [torch.optim.SGD(layer.parameters(), lr=0.4, momentum=0.9, nesterov=True) for layer in model]
    diloco = DiLoCo(
        manager, list(model), optimizer, outer, sync_every=part.every, fragment_sync_delay=part.delay,
    )  # fmt: skip
    for fragment in diloco._fragments:

        def sync(perform: Callable[[], bool] = fragment.perform_sync) -> bool:
            good = perform()
            write("round", good=good, members=manager.num_participants())
            return good

        fragment.perform_sync = sync  # type: ignore[method-assign]
    diloco.__enter__()
    return store, manager, diloco  # these end when no variable refers to them


def main(part: Part) -> None:
    with Path(part.file).open("a", buffering=1) as file:

        def write(kind: str, **fields: Any) -> None:
            file.write(json.dumps({"kind": kind, "name": part.name, "at": time.monotonic(), **fields}) + "\n")

        model = model_of(part)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        watch = Stopwatch()
        optimizer.register_step_post_hook(watch.after)
        write("start")
        # All start together; otherwise torchft's first quorum would time out.
        while not Path(part.file).with_name("go").exists():
            time.sleep(0.1)
        attached = {"thinwire": thinwire, "torchft": torchft}[part.method](part, model, optimizer, write)
        optimizer.register_step_pre_hook(watch.before)
        gradients = [1e-3 * torch.randn_like(p) for p in model.parameters()]
        while attached:
            watch.begin()
            time.sleep(part.step_seconds)
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient
            watch.backward_done()
            try:
                optimizer.step()
            except Exception as error:  # for example, torchft gives up a quorum; elastic.py restarts the replica
                write("failed", reason=f"{type(error).__name__}: {error}"[:300])
                raise
            write("step", inner=watch.inner[-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Part(**json.loads(sys.argv[1])))
