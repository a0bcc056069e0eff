"""A callback that makes Lightning's `Trainer` a replica.

    callback = ThinwireCallback(tw.streaming_diloco(every=100))
    loader = DataLoader(data, batch_size=8, sampler=callback.share(data))
    trainer = Trainer(devices=1, default_root_dir=f"runs/replica-{callback.rank}", callbacks=[callback])
    trainer.fit(module, loader)           # under torchrun: each process is a replica

Under torchrun Lightning may run all processes as one DistributedDataParallel (`devices`), which sends every gradient at every step.
This is refused. With `devices=1` each process is alone, and only Thinwire exchanges between them.
Needs the extra: pip install thinwire[lightning].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import Dataset, DistributedSampler, Sampler

from thinwire.integrations.extras import needs

with needs("lightning"):
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities import rank_zero_info

from thinwire.comm import Group, ThreadGroup, TorchGroup, start_torch
from thinwire.comm.group import TIMEOUT
from thinwire.drivers.handshake import agree_on_resume, compare_settings
from thinwire.drivers.loop_warnings import silent
from thinwire.drivers.model_buffers import floating
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.attached import equalize, newest_of_all, sample
from thinwire.integrations.lightning_checks import (
    batch_size,
    check,
    check_folders,
    check_member,
    check_share,
    checkpoints_of,
    validations,
)
from thinwire.integrations.lightning_metrics import all_monitored, average
from thinwire.integrations.lightning_order import leave_place, take_place
from thinwire.integrations.members import MemberSampler, keep_to_the_end, meet
from thinwire.integrations.traffic import told
from thinwire.membership.rendezvous import Membership
from thinwire.pieces import optimizer_attributes
from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.strategy import Strategy
from thinwire.types import Observer


class ThinwireCallback(Callback):
    """Makes each process of a `Trainer` a replica under `strategy`; an optimizer step of the trainer is an inner step.

    Each replica writes its own checkpoints, with its own weights, moments, anchors and rounds in flight: `trainer.fit(...,
    ckpt_path=callback.newest(trainer))` starts, and resumes from there, all replicas at one step. When training ends all models are equal.

    A step that a GradScaler skips trains nothing and counts as an inner step, so that all replicas keep to the same steps.

    With a `Membership` replicas may die, return and join late. Each is started separately, with `max_steps`, and continues at the step of
    the others: `trainer.global_step` and schedules by steps move there.

    Args:
        strategy: the strategy of all replicas; it exchanges deltas.
        group: the replicas that exchange, or a `Membership`; None: torchrun's processes under gloo, or a single replica.
        weights: the weights that the trainer validates and saves: the "anchors", on which all replicas agree, or the replica's "own".
        own_data: True: every process has its own training data; False: all have the same, and each trains on a share.
        keep_seconds: with a `Membership`: the seconds for which one member stays at the end, to give missing members the final state.
        observer: called with each event, like that of `Replica`.

    Raises:
        ConfigurationError: when training begins: a setting that cannot work; the message says what to do.
        CheckpointError: the checkpoint is of another replica.
        ModelError, DisagreementError, LinkError: when training begins, like `Replica`.
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group | Membership | None = None,
        *,
        weights: Literal["anchors", "own"] = "anchors",
        own_data: bool = False,
        keep_seconds: float = 300.0,
        observer: Observer = silent,
    ) -> None:
        if weights not in ("anchors", "own"):
            raise ConfigurationError(f"weights={weights!r}: 'anchors' or 'own' is needed. Choose one.")
        if strategy.exchanges_gradients:
            raise ConfigurationError(
                "a strategy of Gradients(): one of deltas is needed, because Lightning computes gradients within the optimizer's step. Choose "
                "diloco() or another, or Lightning's DDPStrategy with thinwire's GradientHook."
            )
        self.strategy, self.weights, self.own_data, self.keep_seconds = strategy, weights, own_data, keep_seconds
        self.replica: Replica | None = None
        self._member = group if isinstance(group, Membership) else None
        given = group if isinstance(group, Group) else None
        self.rank, self.replicas = (0, 1) if self._member else (given.rank, given.size) if given else _place()
        self._given, self._group, self._observer = given, given, observer
        self._sampler: MemberSampler | None = None
        self._start: Callable[[], None] | None = None
        self._batches = 0  # batches since the last step
        # the replica's own weights and buffers, while a validation has others in the model
        self._own: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._trained: Tensor | None = None  # a sample of the weights at the end
        self._ended = self._epoch_over = False
        self._loaded: dict[str, Any] = {}
        self.loop: Any = None  # the trainer's loop of validations, while this callback is around it
        self._monitored: list[str] = []  # the metrics that all replicas average
        self._checked = False  # whether what the optimizer holds can be saved
        self._began = 0  # the trainer's steps before this replica's first

    def share(self, data: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> Sampler[int]:
        """The sampler of this replica's share of `data`, for its `DataLoader`. With a `Membership` it has no end, and always shuffles."""
        if self._member is not None:
            samples: Any = data
            self._sampler = MemberSampler(len(samples), seed, self._member, self._before_reading)
            return self._sampler
        return DistributedSampler(data, self.replicas, self.rank, shuffle=shuffle, seed=seed)

    def newest(self, trainer: Trainer) -> str | None:
        """For `trainer.fit(..., ckpt_path=callback.newest(trainer))`, which starts a training and resumes it. Collective in a fixed group.

        It looks for this replica's `*.ckpt` where the trainer's `ModelCheckpoint`s write them, in all versions of a logger.

        Returns:
            The checkpoint of this replica at the newest step of which every replica has a whole one; None at the first start. Later ones are
            renamed to *.ckpt.passed-over: they belong to another future of this run.

        Raises:
            CheckpointError: no step is common to all replicas, and more than the first save would be lost.
            LinkError: another replica was lost, or has not called it.
        """
        own = self._member.name if self._member else self.rank
        found, skipped = checkpoints_of(trainer, self.state_key, own)
        if self._member is None:
            self._group = self._group or _meet(self.rank, self.replicas)
        try:
            newest = newest_of_all(found, skipped, self._group, Path(trainer.default_root_dir))
        except BaseException:
            self.close()
            raise
        for position, paths in found.items():
            for path in paths if newest is None or position > newest else []:
                path.rename(path.with_name(f"{path.name}.passed-over"))
        return str(found[newest][0]) if newest else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise `ConfigurationError` for settings that cannot work, before Lightning wraps anything."""
        if stage == "fit":
            check(trainer, pl_module, self.replicas, self.weights)
            take_place(self, trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Meet the other replicas."""
        for optimizer in trainer.optimizers:  # before the trainer loads their states
            optimizer_attributes.begin(optimizer, pl_module)
        if self._member is not None:
            self._start = partial(self._begin, trainer, pl_module)
            return
        self._group = self._group or _meet(self.rank, self.replicas)
        facts = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        compare_settings(self._group, facts | {"accumulate_grad_batches": trainer.accumulate_grad_batches})
        check_folders(trainer, self._group)
        if self._loaded.get("epoch over"):  # then the data loader begins to read after this
            torch.set_rng_state(self._loaded["random"].cpu())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, unless the first batch has been read before."""
        if self.replica is None:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach. If the trainer resumes, resume from this replica's own state."""
        self._start = None
        found = self._found()
        own = {name: p.detach().clone() for name, p in trainable(pl_module)} | found.get("own", {}) if found else {}
        resume = partial(_load, found, own) if found else None
        attach = self._join if self._member else self._attach
        self.replica, self._batches = attach(trainer, pl_module, resume), 0
        self._ended, self._loaded, self._checked = False, {}, False
        if self._member:
            _catch_up(trainer, self.replica.step - trainer.global_step)
            # the run has ended, and a member has kept the final state for this one
            if self.replica.step >= trainer.max_steps:
                self._end()
        self._began = trainer.global_step - self.replica.step
        if self.rank == 0:
            rank_zero_info(f"thinwire: {told(self.strategy, self.replica, self.replicas)}")

    def _attach(self, trainer: Trainer, module: LightningModule, resume: Callable[[Replica], object] | None) -> Replica:
        """Attach a replica of a fixed group."""
        assert self._group is not None
        if not self.own_data:
            check_share(trainer, self.rank, self.replicas)
        facts = {"batches of an epoch": str(trainer.num_training_batches)}
        self._monitored = all_monitored(trainer, self._group)
        # all average them at the same validations
        if self._monitored or (self.weights == "anchors" and floating(module)):
            facts |= validations(trainer)
        compare_settings(self._group, facts)
        agree_on_resume(self._group, trainer.global_step, bytes(16))
        if resume:  # zeros are equal on all replicas, so no weights are sent; the saved ones are loaded afterwards
            with torch.no_grad():
                for _name, parameter in trainable(module):
                    parameter.zero_()
        return Replica(self.strategy, module, trainer.optimizers, self._group, resume=resume, observer=self._observer)

    def _join(self, trainer: Trainer, module: LightningModule, resume: Callable[[Replica], object] | None) -> Replica:
        """Attach a member of an elastic run, when enough others have joined."""
        member, sampler = self._member, self._sampler
        assert member is not None
        check_member(trainer, member, sampler, self.own_data)
        member.require({"max_steps": str(trainer.max_steps)})
        member.most_steps = member.most_steps or trainer.max_steps
        reader = None
        if sampler and not self.own_data:
            batch = batch_size(trainer) * trainer.accumulate_grad_batches
            member.require(sampler.facts(batch))
            reader = sampler.open(batch)

        def attach() -> Replica:
            return Replica(
                self.strategy, module, trainer.optimizers, member, reader=reader, resume=resume, observer=self._observer
            )  # fmt: skip

        return meet(member, attach, TIMEOUT)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batches += 1

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let a step change nothing if its samples belong to others now, or the run has ended."""
        sampler = self._sampler
        if self._ended or (sampler and sampler.reader and not sampler.trains(self._batches * batch_size(trainer))):
            optimizer.zero_grad()
        self._batches = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a skipped step."""
        if self._ended:
            return
        replica, due, self._epoch_over = self._attached(), trainer.global_step - self._began, trainer.is_last_batch
        if not self._checked and replica.step and trainer.checkpoint_callbacks:  # now, not at the first save
            self._checked = True
            replica.state()
        if (
            not pl_module.automatic_optimization
        ):  # Lightning counts the steps of each optimizer, the replica one when each has stepped
            trainer.should_stop |= replica.stopping
            return
        if replica.step < due and getattr(trainer.precision_plugin, "scaler", None) is not None:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
                optimizer.step()
        if self._member:
            _catch_up(trainer, replica.step - due)
            due = replica.step
            trainer.should_stop |= bool(self._sampler and self._sampler.ended)
        if replica.step != due:
            raise ConfigurationError(
                f"the optimizer has taken {replica.step} steps, the trainer {due}: the two numbers must be equal. Let the trainer alone step it, and "
                "choose an optimizer whose `step` calls its hooks; all of torch's do."
            )
        trainer.should_stop |= replica.stopping

    @contextmanager
    def validating(self) -> Iterator[None]:
        """A context around a validation, with the anchors and the mean of all replicas' buffers in the model. Collective in a fixed group."""
        if self.weights == "own" or self.replica is None or self._ended:
            yield
            return
        model = self.replica.model
        # for checkpoints that are written meanwhile, when others, such as a callback with averages, may have exchanged the weights again
        self._own = {name: _copy(p) for name, p in trainable(model)}
        self._buffers = {name: _copy(one) for name, one in model.named_buffers()}
        try:
            with self.replica.anchored(), self.replica.averaged_buffers():
                yield
        finally:
            self._own, self._buffers = {}, {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let all replicas stop, save and change their learning rates alike, whatever their data. Collective in a fixed group."""
        if self.replica and not self._ended:
            average(trainer, self.replica, self._monitored)

    def save_anchors(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Write the anchors as the checkpoint's weights, beside own buffers; the replica's own weights are in this callback's state. Before any
        other callback, because some move these weights."""
        if self.weights == "anchors" and self.replica and not self._ended:
            with self.replica.anchored():
                state = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {
                    name: _copy(self._buffers.get(name, value)) for name, value in state.items()
                }

    def state_dict(self) -> dict[str, Any]:
        """The state from which this replica resumes bit for bit; empty after the end of training, when all models are equal."""
        if self.replica is None or self._ended:
            return {}
        tensors, facts = self.replica.state()
        own = self._own or {name: _copy(p) for name, p in trainable(self.replica.model)}
        return {
            "replica": self._member.name if self._member else self.rank,
            "replicas": self.replicas,
            "strategy": repr(self.strategy),
            "facts": facts,
            "tensors": {name: _copy(value) for name, value in tensors.items()},
            "own": own,
            "random": torch.get_rng_state(),
            "epoch over": self._epoch_over,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins, which resumes from it."""
        self._loaded = state_dict

    def end(self) -> None:
        """Leave the outer weights in the model, before any other callback ends, and before the trainer's last checkpoint."""
        self._end()
        self._trained = sample(self._attached().model)

    def equalize(self) -> None:
        """Make what other callbacks have left in the model, such as averages of weights, equal on all replicas."""
        if self._group and self.replica and self._trained is not None:
            equalize(self.replica.model, self._group, self._trained)

    def _end(self) -> None:
        self._attached().finish(self.keep_seconds)
        self._ended = True
        if self._sampler:
            self._sampler.ended = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._member and self._ended:
            keep_to_the_end(self._member, self.keep_seconds)
        self.close()

    def close(self) -> None:
        """Detach and leave the group. Idempotent; a group that was given stays open."""
        leave_place(self)
        if self.replica:
            self.replica.close()
        self.replica, self._trained, self._loaded = None, None, {}
        if self._group and not self._given:
            self._group.close()
        self._group = self._given

    def _attached(self) -> Replica:
        if self.replica is None:
            raise ConfigurationError("no training has begun: `trainer.fit()` is needed first. Call it.")
        return self.replica

    def _before_reading(self) -> None:
        if self._start:
            self._start()

    def _found(self) -> Mapping[str, Any]:
        """This replica's state in the checkpoint from which the trainer resumes; empty if there is none. Raises `CheckpointError`."""
        found = self._loaded
        told_of, own = (found.get("replica"), found.get("replicas")), self._member.name if self._member else self.rank
        if found and told_of != (own, self.replicas):
            raise CheckpointError(
                f"a checkpoint of replica {told_of[0]} of {told_of[1]}: one of replica {own} of {self.replicas} is needed. Give each "
                "replica the ckpt_path of its own folder."
            )
        if found and found.get("strategy") != repr(self.strategy):
            raise CheckpointError(
                f"a checkpoint of {found.get('strategy')!s:.200}: one of {self.strategy!r} is needed. Resume with the run's own strategy."
            )
        return found


def _place() -> tuple[int, int]:
    """The number of this process's replica, and of all replicas, from torch.distributed or torchrun."""
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
        start_torch(rank, size, world.main_address, world.main_port, TIMEOUT, prefix="thinwire")
    return TorchGroup.from_world(size, timeout=TIMEOUT)


def _load(found: Mapping[str, Any], own: Mapping[str, Tensor], replica: Replica) -> None:
    """Resume `replica` with its `own` weights from this callback's state."""
    with torch.no_grad():
        for name, parameter in trainable(replica.model):
            parameter.copy_(own[name])
    replica.load_state(found["tensors"], found["facts"])
    if not found["epoch over"]:
        torch.set_rng_state(found["random"].cpu())


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _catch_up(trainer: Trainer, jump: int) -> None:
    """Advance the trainer's step, and schedules by steps, by `jump` steps."""
    if jump <= 0:
        return
    counted = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    counted.ready += jump
    counted.completed += jump
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the optimizer has not stepped before
        for config in trainer.lr_scheduler_configs:
            schedule: Any = config.scheduler
            for _ in range(0 if config.reduce_on_plateau else jump // config.frequency):
                schedule.step()
