"""The place of one replica: its rank or member name, its files and its part of the data, which differ between the replicas of a run."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from thinwire.app.jobs.base import Share
from thinwire.app.trainer.member import MemberSpec
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.signals import heed
from thinwire.comm import Group

if TYPE_CHECKING:
    from thinwire.net.upload import HubUploader


class Stop(threading.Event):
    """Set when the run must stop. `number`: the signal that requested it; SIGTERM if another process of the run received it.

    Args:
        launched: whether a launcher, ours or torchrun, started this process. It kills the process when a stop must be at once. So no number of
            signals ends the process: a service manager may signal both, and the launcher forwards its own signal.
    """

    number: int = signal.SIGTERM
    at_once: bool = False  # whether replicas that are threads end without a checkpoint
    heeded: bool = False  # whether this run has trained, and ends with a checkpoint; before that it ends at once
    orphaned: bool = False  # whether the launcher is gone, so that nobody else could end this process

    def __init__(self, launched: bool = False) -> None:
        super().__init__()
        self.launched = launched

    def heed(self) -> None:
        """Called when there is something to save: after the first inner step, and where other processes train."""
        if not self.heeded:
            self.heeded = True
            heed(math.inf if self.launched else 1)

    @property
    def exit_code(self) -> int:
        """The shell's exit code of a process that the signal ended: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the run must stop at once."""
        if self.at_once:
            raise KeyboardInterrupt(self.number)


@dataclass(frozen=True)
class Place:
    """The place of a replica of a fixed group. `group` has the other replicas, `site` the other ranks of this replica."""

    group: Group
    folder: Path
    resume: bool = False
    site: Group | None = None
    shard: int = 0
    shards: int = 1
    gpu: int = 0  # see `device_of`
    stop: Stop = field(default_factory=Stop)
    alone: bool = False  # whether it is the only replica in its folder, because the others have their own
    uploader: Callable[[], HubUploader] | None = None  # makes what sends published versions to a hub elsewhere

    @property
    def name(self) -> str:
        """The name of its event file and its checkpoints."""
        return f"replica-{self.group.rank}" + (f".shard-{self.shard}" if self.shards > 1 else "")

    @property
    def writes_the_model(self) -> bool:
        """Whether this rank writes the model: all replicas hold the same, so only the first rank does, or each in its own folder."""
        return (self.group.rank == 0 or self.alone) and self.shard == 0

    def share(self, run: Run) -> Share:
        """Its share of the data."""
        return Share(run.seed, self.group.rank, self.group.size, batches=run.data.batches)


@dataclass(frozen=True)
class ElasticPlace:
    """The place of an elastic member, which always has one rank."""

    member: MemberSpec
    folder: Path
    resume: bool = False
    gpu: int = 0  # see `device_of`
    stop: Stop = field(default_factory=Stop)

    alone: ClassVar[bool] = False
    shard: ClassVar[int] = 0
    shards: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The name of its event file and its checkpoints."""
        return self.member.name

    @property
    def writes_the_model(self) -> bool:
        """Always: a member cannot know which members are left at the end, so each writes the model."""
        return True

    @property
    def uploader(self) -> Callable[[], HubUploader] | None:
        """See `Place`."""
        return self.member.uploader

    def share(self, run: Run) -> Share:
        """Its share of the data."""
        return Share.of(run.seed, run.placement.replicas, self.member.name)


def device_of(gpu: int) -> torch.device:
    """The device of a process that is number `gpu` on its machine: GPUs are given out in turn, so several may share one."""
    gpus = torch.cuda.device_count()
    return torch.device("cuda", gpu % gpus) if gpus else torch.device("cpu")


def shard(model: nn.Module, replicas: int, shards: int, device: torch.device) -> None:
    """FSDP2 inside the replica: every block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replica", "shard"))["shard"]
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
