"""A small training loop with accelerate. As a program it is one of two replicas: `torchrun ... accelerate_loop.py FOLDER`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup
from thinwire.integrations.accelerate import LocalSGD

BATCHES, SAVED = 12, 6
STREAMING = tw.streaming_diloco(every=4, fragments=2, delay=2)


def train(
    local: dict[str, Any] | None, accumulate: int = 1, save: Path | None = None, load: Path | None = None
) -> tuple[Tensor, Accelerator, nn.Module]:
    """Trains an epoch of `BATCHES` steps and returns the weights. It saves after `SAVED` steps, or resumes there. `local` goes to `LocalSGD`."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(2 * BATCHES * accumulate * accelerator.num_processes, 4)
    # a new iterator of the loader draws random numbers
    data = DataLoader(TensorDataset(x, x.prod(dim=1, keepdim=True)), batch_size=2)
    made = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(plain, made, data)
    attached = LocalSGD(accelerator=accelerator, model=model, **local) if local else nullcontext()
    with attached as local_sgd:
        begin = 0
        if load:
            accelerator.load_state(str(load))
            begin = SAVED
        for index, (points, targets) in enumerate(accelerator.skip_first_batches(loader, begin * accumulate)):
            with accelerator.accumulate(model):
                accelerator.backward(((model(points) - targets) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()
                if local_sgd:
                    local_sgd.step()
            if save and index + 1 == SAVED * accumulate:
                accelerator.save_state(str(save))
    return torch.cat([p.detach().reshape(-1) for p in plain.parameters()]), accelerator, model


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    Accelerator(cpu=True)  # joins the world
    ledger = Ledger()
    group = LinkedGroup(CountedGroup(tw.TorchGroup.from_world(2, timeout=600.0), ledger), Link.parse("50mbit,5ms"))
    found["weights"], _, model = train({"strategy": STREAMING, "group": group}, save=folder / "state")
    found["wrapped"] = isinstance(model, nn.parallel.DistributedDataParallel)
    found["shapes"] = [fragment.shapes for fragment in STREAMING.partition.fragments(model.module)]
    found["packets"] = ledger.sent("packet")
    found["resumed"], _, _ = train({"strategy": STREAMING}, load=folder / "state")
    found["average"], _, _ = train({"local_sgd_steps": 4, "group": group})
    found["disabled"], _, _ = train({"local_sgd_steps": 4, "group": group, "enabled": False})
    found["bare"], _, _ = train(None)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
