"""A replica that test_diagnosis_wire.py starts in a network namespace. It trains a toy, writes events, and obeys lines on stdin:

sleep     sleep 0.1 s in every step from now on
before    stop (SIGSTOP) before the next round begins
during    stop in the middle of the next round
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.app.records.events import EventLog
from thinwire.comm import TorchGroup, start_torch

STEPS = 4  # inner steps in a round
NUMEL = 50_000  # 200 kB in a message


def main() -> None:
    rank, size, address, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    told: set[str] = set()
    threading.Thread(target=lambda: [told.add(line.strip()) for line in sys.stdin], daemon=True).start()
    start_torch(rank, size, address, 29500, 600.0)
    group = TorchGroup.from_world(size, timeout=6.0)
    log = EventLog(folder / "events" / f"replica-{rank}.jsonl")
    start = {
        "run": {},
        "strategy": "diloco",
        "parameters": NUMEL,
        "fragments": [],
        "link": None,
        "carrier": "gloo",
        "machine": {},
    }
    log.emit("start", 0, wall_time=time.time(), replica=rank, replicas=size, **start)

    def observe(event: str, step: int, **fields: Any) -> None:
        log.emit(event, step, **fields)
        if event == "depart" and "during" in told:
            os.kill(os.getpid(), signal.SIGSTOP)

    model = nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = tw.Replica(tw.diloco(every=STEPS), model, optimizer, group, observer=observe, clock=log.seconds)
    while True:
        for _ in range(STEPS):
            time.sleep(0.12 if "sleep" in told else 0.02)
            model.weight.grad = torch.ones_like(model.weight)
            if "before" in told and (replica.step + 1) % STEPS == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except tw.LinkError as error:
        print(f"ended: {error}", flush=True)
        os._exit(1)
