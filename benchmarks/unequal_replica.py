"""One replica of torchft's DiLoCo on a machine of its own speed, started by unequal.py. Emulated.

Model, text, inner optimizer and learning rate are those of `thinwire train` with the same settings, and a slow machine waits after each
inner step as with `--slow`. Deltas are fp32, the whole model is one fragment. Replica 0 runs the lighthouse.

The last line of output is JSON: loss of the agreed weights, seconds of the training loop, tokens, rounds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without saying so

from thinwire.app.jobs.base import Share
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.setup import learning_rate
from thinwire.app.trainer.text_job import TextJob

PATIENCE = timedelta(seconds=300.0)  # no process dies here
HOST = "127.0.0.1"


def attach(given: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Any:
    """torchft's DiLoCo as its own tests set it up. All replicas are in every round. Returns its manager."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    logging.disable(logging.INFO)
    rank, size = given["rank"], len(given["slow"])
    if rank == 0:
        lighthouse = LighthouseServer(bind=f"{HOST}:{given['port']}", min_replicas=size, join_timeout_ms=60_000)
        stack.callback(lighthouse.shutdown)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=size, use_async_quorum=False, init_sync=False,
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
        timeout=PATIENCE, quorum_timeout=PATIENCE, connect_timeout=PATIENCE, replica_id=f"replica_{rank}",
        hostname=HOST, lighthouse_addr=f"http://{HOST}:{given['port']}",
        store_addr=HOST, store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    stack.callback(lambda: (manager.shutdown(wait=False), store))  # nothing else holds the store
    outer = torch.optim.SGD(model.parameters(), lr=given["lr"], momentum=given["momentum"], nesterov=True)
    stack.enter_context(DiLoCo(manager, [model], optimizer, outer, sync_every=given["every"]))
    return manager


def main(given: dict[str, Any]) -> dict[str, Any]:
    rank, size, cpu = given["rank"], len(given["slow"]), torch.device("cpu")
    run = Run.of(**given["settings"], steps=given["steps"], replicas=size, seed=given["seed"])
    job = TextJob(run, None)
    job.begin(Share(run.seed, rank, size))
    model = job.make_model()
    optimizer = run.plan.inner.make(model, run.lr, run.optimizer.weight_decay)
    with ExitStack() as stack:
        manager = attach(given, model, optimizer, stack)
        start = time.monotonic()
        for step in range(given["steps"]):
            begun = time.monotonic()
            for settings in optimizer.param_groups:
                settings["lr"] = learning_rate(run, step + 1)
            optimizer.zero_grad()
            job.loss(model, step, cpu).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip)
            time.sleep((given["slow"][rank] - 1) * (time.monotonic() - begun))
            optimizer.step()
        seconds = time.monotonic() - start
        with torch.no_grad():
            loss = job.evaluation(model, cpu)["loss"]
        tokens = given["steps"] * run.data.batch * run.data.sequence
        told = {"loss": loss, "time": seconds, "tokens": tokens, "rounds": manager.current_step()}
        print(json.dumps(told), flush=True)
        sys.stdin.readline()  # the others may still need its servers
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
    os._exit(0)  # its servers have threads that do not end by themselves
