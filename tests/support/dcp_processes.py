"""The program of the two processes of test_stateful.py: torch.distributed.checkpoint with one folder for both replicas, by `torchrun`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire as tw
from thinwire.comm import start_torch
from thinwire.testing.toy import adamw, batch, inner_step, toy, weights

STEPS, SAVED = 13, 7
STRATEGIES = {
    "streaming": tw.streaming_diloco(every=6, fragments=2, delay=2),
    "eager": tw.recipes.eager_diloco(every=4, fragments=2),
    "sparse": tw.recipes.sparse_loco(every=3, codec=tw.codecs.ChunkedTopK(16, 4, tw.codecs.Sign(block=4))),
    "gradients": tw.data_parallel(),
}


class Loop:
    """A replica with its model and optimizer. `all` is the content of a checkpoint."""

    def __init__(self, strategy: Any, group: tw.Group, seed: int = 0) -> None:
        self.model = toy(seed)
        self.optimizer = adamw(self.model)
        self.rank, self.replica = group.rank, tw.Replica(strategy, self.model, self.optimizer, group)

    def all(self) -> dict[str, Any]:
        """Returns the state. Each replica's model and optimizer have separate keys, because they differ."""
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {"own": {str(self.rank): own}, "replica": self.replica}

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            inner_step(self.model, self.optimizer, *batch(0, self.rank, step))

    def end(self) -> torch.Tensor:
        self.replica.finish()
        self.replica.close()
        return weights(self.model)

    def load(self, folder: Path, **options: Any) -> None:
        """Loads a checkpoint. As in a real resume, the optimizer's moments must exist before they are loaded."""
        self.train(1, 1)
        self.replica.close()
        state = self.all()
        fresh = Loop(self.replica.strategy, self.replica.group)
        state["replica"] = fresh.replica
        dcp.load(state, checkpoint_id=folder, **options)
        fresh.model.load_state_dict(state["own"][str(self.rank)]["model"])
        fresh.optimizer.load_state_dict(state["own"][str(self.rank)]["optimizer"])
        self.__dict__ = fresh.__dict__


def through_and_resumed(strategy: Any, group: tw.Group, folder: Path, **options: Any) -> dict[str, Any]:
    loop = Loop(strategy, group)
    loop.train(1, SAVED)
    flying = list(loop.replica.in_flight)
    dcp.save(loop.all(), checkpoint_id=folder, **options)
    loop.train(SAVED + 1, STEPS)
    through = loop.end()
    again = Loop(strategy, group)
    again.load(folder, **options)
    assert again.replica.step == SAVED
    again.train(SAVED + 1, STEPS)
    return {"through": through, "resumed": again.end(), "in flight": flying}


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prefix = os.environ["TORCHELASTIC_RUN_ID"]
    start_torch(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 600.0, prefix=prefix)
    group = tw.TorchGroup.from_world(world, timeout=600.0)
    found = {name: through_and_resumed(s, group, folder / name) for name, s in STRATEGIES.items()}
    torch.save(found, folder / f"{rank}.pt")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
