"""Two replicas of two ranks each: FSDP2 shards the model inside a replica, Thinwire exchanges shard by shard between them.

    python examples/04_fsdp_inside_a_replica.py                                              # starts four gloo processes here
    torchrun --standalone --nproc-per-node 4 examples/04_fsdp_inside_a_replica.py            # the same, by hand

World rank r is shard r % 2 of replica r // 2. With GPUs: `init_device_mesh("cuda", ...)`, and start_torch(..., backend="cpu:gloo,cuda:nccl").
"""

import argparse
import os
import subprocess
import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.comm import start_torch

REPLICAS = 2


def train(steps: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = os.environ.get("TORCHELASTIC_RUN_ID")  # torchrun hosts the store
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix=prefix)
    # `group` joins equal shards of both replicas; `group.site` joins the shards of one replica
    group = tw.TorchGroup.from_world(replicas=REPLICAS)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    mesh = init_device_mesh("cpu", (REPLICAS, world // REPLICAS), mesh_dim_names=("replica", "shard"))["shard"]
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # made after sharding, because it must hold the shards

    data = torch.Generator().manual_seed(rank)
    with tw.Replica(
        tw.streaming_diloco(every=10, fragments=2, delay=2), model, optimizer, group, site=group.site
    ) as replica:
        for _ in range(steps):
            x = torch.randn(64, 32, generator=data)
            loss = nn.functional.mse_loss(model(x), x.flip(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = replica.export()  # whole tensors, the same on every rank; all ranks of a site call it
    total = sum(float(value.double().abs().sum()) for value in weights.values())
    print(
        f"replica {group.rank}, shard {group.shard}: loss {loss.item():.4f}, sum of |weights| {total:.12f}", flush=True
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
