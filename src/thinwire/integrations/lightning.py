"""Lightning's `Trainer`, as a replica.

    callback = ThinwireCallback(tw.streaming_diloco(every=100))
    loader = DataLoader(data, batch_size=8, sampler=callback.share(data))
    trainer = Trainer(devices=1, default_root_dir=f"runs/replica-{callback.rank}", callbacks=[callback])
    trainer.fit(module, loader)           # under torchrun: each process is a replica

Under torchrun Lightning runs all processes as one DistributedDataParallel if `devices` says so, which sends every gradient at every step.
That is refused; with `devices=1` each process is alone, and only Thinwire exchanges between them.
Needs the extra: pip install thinwire[lightning].
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import Dataset, DistributedSampler

from thinwire.comm import Group, ThreadGroup, TorchGroup, start_torch
from thinwire.comm.group import gather
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.traffic import gradient_nbytes, told
from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.runtime.handshake import compare_settings
from thinwire.runtime.loop_warnings import silent
from thinwire.strategy import Gradients, Strategy
from thinwire.types import Observer

_TIMEOUT = 1800.0  # seconds, as torch.distributed's own
_FOLDERS = 1 << 16  # bytes of one replica's list of folders


class ThinwireCallback(Callback):
    """Makes each process of a `Trainer` a replica under `strategy`; an optimizer step of the trainer is an inner step.

    Each replica writes checkpoints of its own, which hold its own weights, moments, anchors and rounds in the air: `trainer.fit(...,
    ckpt_path=...)` goes on from there, all replicas at one step. When training ends all models are equal.

    A step that a GradScaler skips trains nothing and counts as an inner step, so that all replicas keep to the same steps.

    Args:
        strategy: of all replicas; it exchanges deltas.
        group: the replicas that exchange; None: torchrun's processes under gloo, or one replica alone.
        weights: what the trainer validates and saves: "anchors", on which all replicas agree, or the replica's "own".
        own_data: True: every process has training data of its own; False: all have the same, and each trains on a share.
        observer: called with each event, as that of `Replica`.

    Raises:
        ConfigurationError: when training begins: a setting that cannot work; the message says what to do.
        CheckpointError: a checkpoint of another replica.
        ModelError, DisagreementError, LinkError: when training begins, as `Replica`.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group | None = None,
        *,
        weights: Literal["anchors", "own"] = "anchors",
        own_data: bool = False,
        observer: Observer = silent,
    ) -> None:
        if weights not in ("anchors", "own"):
            raise ConfigurationError(f"weights={weights!r} · 'anchors' or 'own' is needed · choose one")
        if isinstance(strategy.signal, Gradients):
            raise ConfigurationError(
                "a strategy of Gradients() · one of deltas is needed, for Lightning computes gradients within the optimizer's step · choose "
                "diloco() or another, or Lightning's DDPStrategy with thinwire's GradientHook"
            )
        self.strategy, self.weights, self.own_data = strategy, weights, own_data
        self.replica: Replica | None = None
        self.rank, self.replicas = (group.rank, group.size) if group else _place()
        self._given, self._group, self._observer = group, group, observer
        self._anchored = ExitStack()
        self._shown = self._ended = self._epoch_over = False
        self._loaded: dict[str, Any] = {}
        self._began = 0  # the trainer's steps before this replica's

    def share(self, data: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
        """The sampler of this replica's share of `data`, for its `DataLoader`."""
        return DistributedSampler(data, self.replicas, self.rank, shuffle=shuffle, seed=seed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, before Lightning wraps anything."""
        if stage == "fit":
            _check(trainer, pl_module, self.replicas, self.weights)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet the other replicas."""
        self._group = self._given or _meet(self.rank, self.replicas)
        facts = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        compare_settings(self._group, facts | {"accumulate_grad_batches": trainer.accumulate_grad_batches})
        _check_folders(trainer, self._group)
        if self._loaded.get("epoch over"):  # then the data loader, which draws when it begins, comes after
            torch.set_rng_state(self._loaded["random"].cpu())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach; where the trainer resumes, go on from this replica's own state."""
        assert self._group is not None
        if not self.own_data:
            _check_share(trainer, self.rank, self.replicas)
        compare_settings(
            self._group, {"batches of an epoch": str(trainer.num_training_batches), "step": trainer.global_step}
        )
        found = self._found()
        own = {name: p.detach().clone() for name, p in trainable(pl_module)} | found.get("own", {}) if found else {}
        with torch.no_grad():
            for name, parameter in trainable(pl_module):
                if name in own:  # equal everywhere, so that no weights travel; what was saved follows
                    parameter.zero_()
        self.replica = Replica(self.strategy, pl_module, trainer.optimizers, self._group, observer=self._observer)
        if found:
            with torch.no_grad():
                for name, parameter in trainable(pl_module):
                    parameter.copy_(own[name])
            self.replica.load_state(found["tensors"], found["facts"])
            if not found["epoch over"]:
                torch.set_rng_state(found["random"].cpu())
        self._ended, self._loaded, self._began = False, {}, trainer.global_step - self.replica.step
        if self.rank == 0:
            rank_zero_info(f"thinwire: {told(self.strategy, self.replica, self.replicas)}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step that was skipped."""
        replica, due, self._epoch_over = self._attached(), trainer.global_step - self._began, trainer.is_last_batch
        if replica.step < due and getattr(trainer.precision_plugin, "scaler", None) is not None:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
                optimizer.step()
        if replica.step != due:
            raise ConfigurationError(
                f"the optimizer has taken {replica.step} steps, the trainer {due} · one of each is needed · let the trainer alone step it, and "
                "choose an optimizer whose `step` calls its hooks, as all of torch do"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.weights == "anchors" and self.replica and not self._ended:
            self._show()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hide()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the anchors as the checkpoint's weights; this replica's own ones are in this callback's state."""
        if self.weights == "anchors" and self.replica and not self._ended:
            with self.replica.anchored():
                state = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: _copy(value) for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that this replica needs to go on bit for bit; empty once training has ended and all models are equal."""
        if self.replica is None or self._ended:
            return {}
        tensors, facts = self.replica.state()
        shown = self._shown
        self._hide()
        own = {name: p.detach().clone() for name, p in trainable(self.replica.model)}
        if shown:
            self._show()
        return {
            "replica": self.rank,
            "replicas": self.replicas,
            "strategy": repr(self.strategy),
            "facts": facts,
            "tensors": {name: _copy(value) for name, value in tensors.items()},
            "own": own,
            "random": torch.get_rng_state(),
            "epoch over": self._epoch_over,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins, which goes on from it."""
        self._loaded = state_dict

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the outer weights in the model, before the trainer's last checkpoint."""
        self._hide()
        self._attached().finish()
        self._ended = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Detach and leave the group. Idempotent; a group that was given stays open."""
        self._hide()
        if self.replica:
            self.replica.close()
        self.replica = None
        if self._group and not self._given:
            self._group.close()
        self._group = self._given

    def _attached(self) -> Replica:
        if self.replica is None:
            raise ConfigurationError("no training has begun · `trainer.fit()` is needed first · call it")
        return self.replica

    def _show(self) -> None:
        self._anchored.enter_context(self._attached().anchored())
        self._shown = True

    def _hide(self) -> None:
        self._anchored.close()
        self._shown = False

    def _found(self) -> Mapping[str, Any]:
        """This replica's state in the checkpoint from which the trainer resumes; empty if there is none. Raises `CheckpointError`."""
        found = self._loaded
        told_of = (found.get("replica"), found.get("replicas"))
        if found and told_of != (self.rank, self.replicas):
            raise CheckpointError(
                f"a checkpoint of replica {told_of[0]} of {told_of[1]} · one of replica {self.rank} of {self.replicas} is needed · give each "
                "replica the ckpt_path of its own folder"
            )
        if found and found.get("strategy") != repr(self.strategy):
            raise CheckpointError(
                f"a checkpoint of {found.get('strategy')!s:.200} · one of {self.strategy!r} is needed · resume with the run's own strategy"
            )
        return found


def _place() -> tuple[int, int]:
    """Which replica this process is, of how many, by torch.distributed or torchrun."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if TorchElasticEnvironment.detect():
        world = TorchElasticEnvironment()
        return world.global_rank(), world.world_size()
    return 0, 1


def _meet(rank: int, size: int) -> Group:
    if size == 1:
        return ThreadGroup.create(1)[0]
    if not dist.is_initialized():
        world = TorchElasticEnvironment()
        start_torch(rank, size, world.main_address, world.main_port, _TIMEOUT, book="thinwire")
    return TorchGroup.from_world(size, timeout=_TIMEOUT)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _check(trainer: Trainer, module: LightningModule, size: int, weights: str) -> None:
    """Refuse what cannot work with these replicas."""
    lightnings = trainer.strategy
    if not isinstance(lightnings, SingleDeviceStrategy):
        nbytes = gradient_nbytes(module, trainer.world_size)
        raise ConfigurationError(
            f"{type(lightnings).__name__} over {trainer.world_size} processes, which sends about {nbytes:,} bytes of gradients from each at every "
            "step · in every process a whole model that Lightning neither shards nor wraps is needed · write Trainer(devices=1, num_nodes=1), "
            "without strategy=; on GPUs devices=[local rank]"
        )
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    anchors = weights == "anchors"
    bare = any(isinstance(one, ModelCheckpoint) and one.save_weights_only for one in callbacks)
    refused = {
        "automatic_optimization=False": (not module.automatic_optimization, "put a Replica into your own loop"),
        "ModelCheckpoint(save_weights_only=True)": (anchors and bare, "leave it out, or choose weights='own'"),
        "EarlyStopping with weights='own'": (
            size > 1 and not anchors and any(isinstance(one, EarlyStopping) for one in callbacks),
            "choose weights='anchors', and the same validation data for all",
        ),
        "max_time, or a Timer": (size > 1 and any(isinstance(one, Timer) for one in callbacks), "give max_steps"),
    }
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(f"{name} · trainers that do the same on all replicas are needed · {advice}")


def _check_folders(trainer: Trainer, group: Group) -> None:
    """Refuse two replicas that write checkpoints into one folder. Collective."""
    callbacks: list[Any] = list(getattr(trainer, "checkpoint_callbacks", []))
    folders = [str(Path(one.dirpath).resolve()) for one in callbacks if getattr(one, "dirpath", None)]
    told_of = gather(group, json.dumps([[socket.gethostname(), one] for one in folders]).encode(), _FOLDERS, "folders")
    seen: dict[str, int] = {}
    for rank, text in enumerate(told_of):
        for place in map(json.dumps, json.loads(text)):
            if seen.setdefault(place, rank) != rank:
                raise ConfigurationError(
                    f"replicas {seen[place]} and {rank} would write checkpoints into one folder, {json.loads(place)[1]} · each needs its own · "
                    'write Trainer(default_root_dir=f"runs/replica-{callback.rank}"), and a dirpath likewise'
                )


def _check_share(trainer: Trainer, rank: int, size: int) -> None:
    """Refuse training data of which this replica does not read its own share."""
    if size == 1:
        return
    for loader in CombinedLoader(trainer.train_dataloader, "min_size").flattened:
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
        if (getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)) != (size, rank):
            raise ConfigurationError(
                f"training data that are not share {rank} of {size} · each replica needs a share of its own · write DataLoader(data, ..., "
                "sampler=callback.share(data)), or say ThinwireCallback(..., own_data=True) if each process has data of its own"
            )
