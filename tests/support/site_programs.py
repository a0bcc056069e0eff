"""The program of four processes as two sites of two ranks: what reduces gradients inside a site, and what reaches over to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.testing.toy import fill

STEPS = 7


def stages() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 8)]


def model() -> nn.Module:
    return fill(nn.Sequential(*stages()))


def batch(replica: int, step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * replica + step))


def train(
    strategy: tw.Strategy, trained: nn.Module, group: Any, site: Any, update: Callable[[int], None]
) -> dict[str, Tensor]:
    """Train with plain SGD, whose updates are linear in the gradient: sums over ranks round apart from those over a batch, by last bits."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with tw.Replica(strategy, trained, optimizer, group, site=site) as replica:
        for step in range(STEPS):
            update(step)
            optimizer.step()
            optimizer.zero_grad()
        replica.finish()
        return replica.export()


def within_sites(rank: int) -> dict[str, Any]:
    """The export of each way to use the two ranks of a site, and the error of each that reaches over both sites."""
    group = tw.TorchGroup.from_world(2)
    number, shard = divmod(rank, 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [DeviceMesh("cpu", [2 * n, 2 * n + 1]) for n in range(2)]
    grids = [DeviceMesh("cpu", [[2 * n], [2 * n + 1]], mesh_dim_names=("replicas", "shards")) for n in range(2)]
    ways: dict[str, Callable[[nn.Module], tuple[nn.Module, nn.Module]]] = {
        "the module of DDP": lambda m: (m, DistributedDataParallel(m, process_group=groups[number])),
        "DDP": lambda m: (DistributedDataParallel(m, process_group=groups[number]),) * 2,
        "replicate": lambda m: (m, replicate(m, process_group=groups[number])),
        "FSDP2": lambda m: (fully_shard(m, mesh=pairs[number]),) * 2,
        "HSDP": lambda m: (fully_shard(m, mesh=grids[number]),) * 2,
        "DDP of all": lambda m: (m, DistributedDataParallel(m)),
        "replicate of all": lambda m: (m, replicate(m)),
        "FSDP2 of all": lambda m: (fully_shard(m),) * 2,
    }
    found: dict[str, Any] = {}
    strategy = tw.diloco(every=3)
    for name, wrap in ways.items():
        given, called = wrap(model())

        def update(step: int, called: nn.Module = called) -> None:
            x = batch(number, step).chunk(2)[shard]
            (called(x) - x.flip(1)).square().mean().backward()

        try:
            state = train(strategy, given, group, group.site, update)
            found[name] = {key.removeprefix("module."): value for key, value in state.items()}
        except tw.ModelError as error:
            found[name] = str(error)
    found["pipeline"] = pipelined(strategy, group, number, shard, groups[number])
    return found


def pipelined(strategy: tw.Strategy, group: Any, number: int, shard: int, ranks: Any) -> dict[str, Tensor]:
    """Each rank of the site holds one stage, and exchanges it with the same stage of the other site."""
    whole = model()
    own = whole[shard]
    stage = PipelineStage(own, shard, 2, torch.device("cpu"), group=ranks)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, target: (y - target).square().mean())

    def update(step: int) -> None:
        x = batch(number, step)
        schedule.step(x) if shard == 0 else schedule.step(target=x.flip(1))

    return {f"{shard}.{name}": value for name, value in train(strategy, own, group, group.site, update).items()}
