"""transformers' `Trainer`, and the trainers of TRL, as replicas.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[ThinwireCallback(tw.streaming_diloco(every=100))])
    trainer.train()                       # under torchrun, or any launcher: each process is a replica

Under a launcher accelerate wraps the model in DistributedDataParallel, and averages gradients, losses and metrics over all processes at
every step. The callback tells accelerate that each process is alone, before anything is wrapped, so that only Thinwire exchanges between
the processes. Training data are still divided among them. Needs the extra: pip install thinwire[hf].
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from thinwire import checkpoint
from thinwire.comm import Group
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.attached import TrainableState, count_skipped, too_short, world
from thinwire.integrations.traffic import told
from thinwire.pieces.partition import trainable
from thinwire.replica import Replica
from thinwire.runtime.handshake import compare_settings
from thinwire.runtime.loop_warnings import silent
from thinwire.strategy import Gradients, Strategy
from thinwire.types import Observer

FOLDER = "thinwire"  # within a checkpoint of the trainer
_REFUSED = (
    "{given} · in every process a whole model that the trainer neither shards nor wraps is needed · {advice}, and give "
    "each replica one process"
)


class ThinwireCallback(TrainerCallback, ExportableState):
    """Makes each process of a `Trainer` a replica under `strategy`; an optimizer step of the trainer is an inner step.

    Each replica writes whole checkpoints of its own: replica 0 in `output_dir`, replica r in `output_dir/replica-r`. Beside the trainer's
    files stands `thinwire/`, with the replica's own weights, moments, anchors and rounds in the air. `resume_from_checkpoint=True` goes on
    from there, bit for bit, all replicas at one step. Only replica 0 logs. When training ends all models are equal, and only replica 0 saves.

    A step that a GradScaler skips trains nothing and counts as an inner step, so that all replicas keep to the same steps.

    Args:
        strategy: of all replicas.
        group: the replicas that exchange; None: the launcher's processes under gloo, or one replica alone.
        weights: what the trainer evaluates and saves: "anchors", on which all replicas agree, or the replica's "own".
        own_data: True: every process has training data of its own; False: all have the same, and each trains on a share.
        observer: called with each event, as that of `Replica`.

    Raises:
        ConfigurationError: when the trainer is made or begins: a setting that cannot work; the message says what to do.
        CheckpointError: the trainer resumes where no state of this replica is.
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
        self.strategy, self.weights, self.own_data = strategy, weights, own_data
        self.replica: Replica | None = None
        self._given, self._group, self._observer = group, group, observer
        self._place = _Place(0, 1)
        self._anchored = ExitStack()
        self._ended = False

    def state(self) -> dict[str, Any]:
        """For `trainer_state.json`: the replica whose checkpoint it is."""
        return {"args": {}, "attributes": {"replica": self._place.rank, "replicas": self._place.size}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let accelerate see one process, except where it divides the data."""
        seen = PartialState()
        rank, size = (self._given.rank, self._given.size) if self._given else (seen.process_index, seen.num_processes)
        self._place = _Place(rank, size, seen.local_process_index, args.save_on_each_node)
        _check(args, size, self.own_data, self.weights)
        self._place.hide(shares=1 if self.own_data else size)
        if rank:
            args.output_dir = str(Path(str(args.output_dir)) / f"replica-{rank}")
        if size > 1:
            args.log_on_each_node = args.average_tokens_across_devices = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Meet the other replicas; where the trainer resumes, go on from this replica's own state."""
        _check_hidden()
        if state.is_hyper_param_search:
            raise ConfigurationError(
                "a hyperparameter search · one training is needed, for all replicas · search with one process, without the callback"
            )
        found = self._found(args, state)
        place, model, optimizer, loader = (self._place, given["model"], given["optimizer"], given["train_dataloader"])
        if getattr(optimizer, "scaler", None) is not None and isinstance(self.strategy.signal, Gradients):
            raise ConfigurationError(
                "fp16 with a strategy that exchanges gradients, which each replica has scaled by a number of its own · bf16, or deltas are "
                "needed · give bf16=True, or another strategy"
            )
        if not self.own_data:
            _check_share(loader, place)
        self._group = self._given or place.group(args.ddp_timeout)
        compare_settings(self._group, _facts(state, loader, self.own_data))
        if found:  # equal everywhere, so that no weights travel; what was saved follows
            with torch.no_grad():
                for _name, parameter in trainable(model):
                    parameter.zero_()
        inner = getattr(optimizer, "optimizer", optimizer)
        self.replica = Replica(self.strategy, model, inner, self._group, observer=self._observer)
        self._ended = False
        if found:
            checkpoint.load(found, TrainableState(self.replica))
        place.hide(shares=1)
        args.save_on_each_node = True  # each replica writes what is its own
        model.should_save_on_this_rank = bool  # if the trainer says so, whatever torch.distributed's rank is
        state.is_local_process_zero = place.rank == 0  # who prints
        if place.rank == 0:
            print(f"thinwire: {told(self.strategy, self.replica, place.size)}", file=sys.stderr, flush=True)
            if short := too_short(self.strategy, state.max_steps):
                print(f"thinwire: {short}", file=sys.stderr, flush=True)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._anchored.close()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Count a step that was skipped, end with the last one, and show what is to be evaluated and saved."""
        replica = self._attached()
        if replica.step < state.global_step:
            count_skipped(given["optimizer"])
        if replica.step != state.global_step:
            raise ConfigurationError(
                f"the optimizer has taken {replica.step} steps, the trainer {state.global_step} · one of each is needed · let the trainer "
                "alone step the optimizer"
            )
        if state.global_step >= state.max_steps:
            self._end()
        self._show(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._anchored.close()
        self._show(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write this replica's state into the checkpoint that the trainer has just written."""
        self._anchored.close()
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / FOLDER
        checkpoint.save(
            folder, TrainableState(self._attached()), {"replica": self._place.rank, "replicas": self._place.size}
        )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave the outer weights in the model, or the best ones if the trainer has loaded these, and leave the group."""
        self._anchored.close()
        replica = self._attached()
        if not self._ended:
            best = args.load_best_model_at_end and state.best_model_checkpoint is not None
            kept = [(p, p.detach().clone()) for _, p in trainable(replica.model)] if best else []
            self._end()
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
        del replica.model.should_save_on_this_rank
        self.close()
        self._place.show_local(args)

    def close(self) -> None:
        """Detach and leave the group, after an error too. Idempotent; a group that was given stays open."""
        self._anchored.close()
        if self.replica:
            self.replica.close()
        self.replica = None
        if self._group and not self._given:
            self._group.close()
        self._group = self._given

    def _attached(self) -> Replica:
        if self.replica is None:
            raise ConfigurationError("no training has begun · `trainer.train()` is needed first · call it")
        return self.replica

    def _end(self) -> None:
        self._attached().finish()
        self._ended = True

    def _show(self, control: TrainerControl) -> None:
        """Let the trainer evaluate and save the anchors."""
        if self.weights == "anchors" and not self._ended and (control.should_evaluate or control.should_save):
            self._anchored.enter_context(self._attached().anchored())

    def _found(self, args: TrainingArguments, state: TrainerState) -> checkpoint.Checkpoint | None:
        """This replica's state at the step at which the trainer resumes; None if it begins."""
        if state.global_step == 0:
            return None
        step, place = state.global_step, self._place
        callbacks: Any = state.stateful_callbacks or {}
        told: Any = callbacks.get(type(self).__name__)
        if not isinstance(told, Mapping) or told.get("attributes") != self.state()["attributes"]:
            whose = told.get("attributes") if isinstance(told, Mapping) else "a training without this callback"
            raise CheckpointError(
                f"the trainer resumes at step {step} from a checkpoint of {whose} · one of replica {place.rank} of {place.size} is needed · "
                f"call trainer.train(resume_from_checkpoint=True), which takes the newest in {args.output_dir}"
            )
        return checkpoint.read(Path(str(args.output_dir)) / f"checkpoint-{step}" / FOLDER / f"step-{step:08d}")


@dataclass
class _Place:
    """Which replica this process is, and what accelerate and the trainer see of it."""

    rank: int
    size: int
    local: int = 0
    save_on_each: bool = False

    def hide(self, shares: int) -> None:
        """Nothing is distributed; training data are cut into `shares`. On every replica the trainer may write files."""
        _seen(distributed_type=DistributedType.NO, num_processes=shares, process_index=self.rank, local_process_index=0)

    def show_local(self, args: TrainingArguments) -> None:
        """Write files only where the user has asked for them."""
        args.save_on_each_node = self.save_on_each
        _seen(local_process_index=self.local)

    def group(self, seconds: float) -> Group:
        return world(self.size, seconds)


def _seen(**values: object) -> None:
    """Change what accelerate knows of the processes; all its objects share it."""
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared.update(values)


def _facts(state: TrainerState, loader: Any, own_data: bool) -> dict[str, Any]:
    """In what the trainers of all replicas must be alike."""
    batches = len(loader) if hasattr(loader, "__len__") else None
    facts = {"the trainer's step": state.global_step, "the trainer's max_steps": state.max_steps}
    if own_data:
        return facts
    sampler = getattr(getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None), "sampler", None)
    order = {"seed of the order of training data": getattr(sampler, "initial_seed", None)}
    return facts | {"batches of an epoch": batches} | order


def _check(args: TrainingArguments, size: int, own_data: bool, weights: str) -> None:
    """Refuse what cannot work, before anything is wrapped."""
    kind = AcceleratorState().distributed_type
    wrappers = {
        DistributedType.DEEPSPEED: ("DeepSpeed", "leave `deepspeed` out"),
        DistributedType.FSDP: ("FSDP", "leave `fsdp` out"),
        DistributedType.MEGATRON_LM: ("Megatron-LM", "leave it out"),
        DistributedType.XLA: ("torch_xla", "train on CPUs or GPUs"),
    }
    if kind in wrappers:
        given, advice = wrappers[kind]
        raise ConfigurationError(_REFUSED.format(given=given, advice=advice))
    if args.n_gpu > 1:
        raise ConfigurationError(
            _REFUSED.format(given=f"DataParallel on {args.n_gpu} GPUs", advice="start one process a GPU, by torchrun")
        )
    if args.parallelism_config is not None:
        raise ConfigurationError(_REFUSED.format(given="parallelism_config", advice="leave it out"))
    refused: dict[str, tuple[bool, str]] = {
        "auto_find_batch_size": (args.auto_find_batch_size, "choose a batch size that fits all replicas"),
        "restore_callback_states_from_checkpoint": (
            args.restore_callback_states_from_checkpoint,
            "leave it out: ThinwireCallback restores itself",
        ),
        "train_sampling_strategy='group_by_length'": (
            size > 1 and not own_data and args.train_sampling_strategy == "group_by_length",
            "choose 'random': each replica would draw groups of its own, and shares would overlap",
        ),
        "load_best_model_at_end": (
            size > 1 and weights == "own" and args.load_best_model_at_end,
            "choose weights='anchors': the best of each replica's own weights is another model on each",
        ),
    }
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(f"{name} · trainers that do the same on all replicas are needed · {advice}")


def _check_hidden() -> None:
    if PartialState().distributed_type != DistributedType.NO:
        raise ConfigurationError(
            "accelerate found the other processes again, after the Trainer was made, and has wrapped the model · one state for the whole "
            "training is needed · make all TrainingArguments and Accelerators before the Trainer"
        )


def _check_share(loader: Any, place: _Place) -> None:
    """Refuse data of which this replica does not read its own share."""
    if place.size == 1:
        return
    if isinstance(loader, DataLoaderDispatcher):
        raise ConfigurationError(
            "an iterable data set that one process would read for all · each replica must read its own share · give "
            "TrainingArguments accelerator_config={'dispatch_batches': False}"
        )
    cut = getattr(loader, "batch_sampler", None)
    if not isinstance(cut, BatchSamplerShard):
        cut = getattr(loader, "dataset", None)
        if isinstance(cut, IterableDataset) and not isinstance(cut, IterableDatasetShard):
            return  # of `datasets`, which cuts by its own shards
    if (getattr(cut, "num_processes", None), getattr(cut, "process_index", None)) != (place.size, place.rank):
        raise ConfigurationError(
            f"training data that are not share {place.rank} of {place.size} · each replica needs a share of its own · make a new Trainer for "
            "each training; if your own data loader cuts them, or each process has its own, say ThinwireCallback(..., own_data=True)"
        )
