"""The loop of 01 with a process for each replica, under torch.distributed; the same file runs on several machines.

python examples/02_processes.py                                               # starts two processes here
torchrun --standalone --nproc-per-node 2 examples/02_processes.py             # the same, by hand
torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 examples/02_processes.py       # on 10.0.0.1
torchrun --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 examples/02_processes.py       # on the other
"""

import argparse
import os
import subprocess
import sys

import torch
from torch import distributed, nn

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger, start_torch


def train(steps: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = os.environ.get("TORCHELASTIC_RUN_ID")  # torchrun hosts the store
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix=prefix)
    ledger = Ledger()
    group = CountedGroup(tw.TorchGroup.from_world(replicas=world), ledger)

    torch.manual_seed(0)  # equal weights from the start; otherwise all would take replica 0's
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(rank)
    with tw.Replica(tw.streaming_diloco(every=20, fragments=2, delay=2), model, optimizer, group):
        for _ in range(steps):
            points = torch.rand(64, 2, generator=data) * 2 - 1
            loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"replica {rank}: last loss {loss.item():.5f}, {ledger.sent():,} bytes sent", flush=True)
    group.close()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each replica (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.steps)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
