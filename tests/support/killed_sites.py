"""A program of four ranks, by `torchrun`: two replicas of two ranks, each sharded by FSDP2, whose checkpoints are trees: state of optimizers in
their attributes, extra state and buffers of modules, parameters that do not train. `killed_sites.py FOLDER OUT [KILLED_AT]`
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resumed_optimizers import SAM
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire import checkpoint
from thinwire.comm import start_torch

STEPS = 15


class Noted(nn.Module):
    """Trees of its own beside tensors; 31 is not divided by the two ranks of a site."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropped, self.last = nn.Linear(8, 31), nn.Dropout(0.1), nn.Linear(31, 8, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        self.log: dict[str, Any] = {"batches": 0, "sizes": []}

    def get_extra_state(self) -> dict[str, Any]:
        return {"log": self.log}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.log = state["log"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.log["batches"] += 1
            self.log["sizes"] = [*self.log["sizes"][-2:], (len(x), None)]
        done: Tensor = self.last(self.dropped(self.first(x).tanh())) * self.scale
        return done


class Averaging(torch.optim.AdamW):
    """Averages of its shards, a generator and a counter in attributes."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.averages, self.steps = [p.detach().clone() for p in parameters], 0
        self.drawn = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        share = float(torch.rand(1, generator=self.drawn)) / (10 + self.steps)
        for p, average in zip(self.param_groups[0]["params"], self.averages):
            p.lerp_(average.lerp_(p, 0.1), share)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "SAM": lambda p: [SAM(p, torch.optim.Adam, lr=1e-2)],
    "averages": lambda p: [Averaging(p, 1e-2)],
    "two": lambda p: [
        torch.optim.NAdam([one for one in p if one.ndim == 2], lr=1e-2),
        torch.optim.SGD([one for one in p if one.ndim != 2], lr=1e-2, momentum=0.9),
    ],
}


def trained(name: str, group: Any, mesh: DeviceMesh, folder: Path, until: int) -> dict[str, Any] | None:
    """Train until a step, from the newest checkpoint of all. The state at the end; None before it."""
    torch.manual_seed(0)
    model = Noted()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], T_max=STEPS)
    data = torch.Generator().manual_seed(10 * group.rank + group.shard)
    torch.manual_seed(7 + data.initial_seed())
    own = folder / name / f"replica-{group.rank}.shard-{group.shard}"
    saved, _ = checkpoint.newest_common(own, group, group.site)
    strategy = tw.streaming_diloco(every=6, fragments=2, delay=2)
    with tw.Replica(strategy, model, optimizers, group, site=group.site) as replica:
        if saved:
            checkpoint.load(saved, replica)
            schedule.load_state_dict(saved.manifest["notes"]["schedule"])
            data.set_state(saved.manifest["notes"]["data"])
        while replica.step < until:
            x = torch.randn(8, 8, generator=data)

            def closure(x: Tensor = x) -> Tensor:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
                return loss

            if name == "SAM":
                optimizers[0].step(closure)
            else:
                closure()
                for optimizer in optimizers:
                    optimizer.step()
            schedule.step()
            if replica.step % 7 == 0:
                notes = {"schedule": schedule.state_dict(), "data": data.get_state()}
                checkpoint.save(own, replica, notes)
        if until < STEPS:
            replica.close()
            return None
    state = replica.export()
    return {"model": state, "log": model.log, "drawn": torch.rand(3), "rate": schedule.get_last_lr()}


def main(folder: Path, out: Path, killed_at: int | None) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = os.environ["TORCHELASTIC_RUN_ID"]
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix=prefix)
    group = tw.TorchGroup.from_world(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))["shards"]
    found = {name: trained(name, group, mesh, folder, killed_at or STEPS) for name in OPTIMIZERS}
    if killed_at:
        dist.barrier()  # all have written
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else None)
