"""Two replicas of two ranks each: tensor parallelism inside a replica, by a plan derived from names; Thinwire between the replicas.

    python examples/14_tensor_parallel.py                                    # starts four gloo processes here
    torchrun --standalone --nproc-per-node 4 examples/14_tensor_parallel.py  # the same, by hand

World rank r is rank r % 2 of replica r // 2. The ranks of a replica read the same batches and need fast links: `thinwire plan tp`
shows the plan, and the cost of a link. With GPUs: `init_device_mesh("cuda", ...)`, and start_torch(..., backend="cpu:gloo,cuda:nccl").
"""

import argparse
import os
import subprocess
import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

import thinwire as tw
from thinwire.app.trainer.model import Architecture, Transformer
from thinwire.comm import start_torch
from thinwire.lab.plan.split import split

REPLICAS = 2


def train(steps: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = os.environ.get("TORCHELASTIC_RUN_ID")  # torchrun hosts the store
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix=prefix)
    group = tw.TorchGroup.from_world(replicas=REPLICAS)  # joins equal ranks of both replicas

    # One seed, so all ranks have the same weights.
    model = Transformer(Architecture(layers=3, width=64, heads=4, vocabulary=64), seed=0)
    mesh = init_device_mesh("cpu", (REPLICAS, world // REPLICAS), mesh_dim_names=("replica", "shard"))["shard"]
    plan = split(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made after the split, because it must hold the parts

    data = torch.Generator().manual_seed(group.rank)  # depends on the replica, not on the rank
    with tw.Replica(
        tw.streaming_diloco(every=10, fragments=2, delay=2), model, optimizer, group, site=group.site
    ) as replica:
        for _ in range(steps):
            tokens = torch.randint(0, 16, (8, 1), generator=data) + torch.arange(17)
            loss = model(tokens[:, :-1], tokens[:, 1:]).loss
            loss.backward()
            with implicit_replication():  # mixes split and whole parameters
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = replica.export()  # whole tensors, the same on every rank; all ranks of a site call it
    total = sum(float(value.double().abs().sum()) for value in weights.values())
    print(
        f"replica {group.rank}, rank {group.shard}: {plan.kept:,} of {plan.numel:,} parameters, loss {loss.item():.4f}, "
        f"sum of |weights| {total:.12f}",
        flush=True,
    )
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="inner steps of each replica (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.steps)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        sys.exit(subprocess.call([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
