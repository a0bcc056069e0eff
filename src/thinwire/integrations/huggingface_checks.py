"""The checks of the bridge to transformers' `Trainer`, and accelerate's view of the processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments

from thinwire.comm import Group
from thinwire.errors import ConfigurationError
from thinwire.integrations.attached import world
from thinwire.integrations.members import MemberSampler, refuse
from thinwire.membership.rendezvous import Membership

_REFUSED = (
    "{given}: in every process a whole model that the trainer neither shards nor wraps is needed; {advice}, and give "
    "each replica one process."
)
_FOUND = "thinwire_found"  # in accelerate's state; new TrainingArguments clear it
# beside the fields of TrainingArguments:
_FOLDERS = "_thinwire_folders"  # `output_dir` as it was given, and as `set_folder` has left it
_SAVE = "_thinwire_save"  # `save_on_each_node` as it was given, during a training


def found_place(seen: PartialState) -> tuple[int, int, int]:
    """The rank of this process, the number of processes, and the rank on this machine, as accelerate found them before any `hide`."""
    told: tuple[int, int, int] = getattr(
        seen, _FOUND, (seen.process_index, seen.num_processes, seen.local_process_index)
    )
    return told


def set_folder(args: TrainingArguments, name: str) -> None:
    """Add `name` to `output_dir`, unless an earlier Trainer with these arguments has added one."""
    given, own = vars(args).get(_FOLDERS, (None, None))
    base = given if args.output_dir == own else args.output_dir
    args.output_dir = str(Path(str(base)) / name) if name else base
    vars(args)[_FOLDERS] = (base, args.output_dir)


@dataclass
class ProcessPlace:
    """The replica of this process, and the view that accelerate and the trainer have of it."""

    rank: int
    size: int
    local: int = 0

    def hide(self, shares: int) -> None:
        """Show a single process, whose training data are cut into `shares`. The trainer may write files on every replica."""
        shown = {
            _FOUND: found_place(PartialState()),
            "num_processes": shares,
            "process_index": self.rank,
            "local_process_index": 0,
        }
        _seen(distributed_type=DistributedType.NO, **shown)

    def show_each(self, args: TrainingArguments) -> None:
        """Let each replica write its own files."""
        vars(args).setdefault(_SAVE, args.save_on_each_node)
        args.save_on_each_node = True

    def show_local(self, args: TrainingArguments) -> None:
        """Write files only if the user has requested them."""
        args.save_on_each_node = vars(args).pop(_SAVE)
        _seen(local_process_index=self.local)

    def group(self, seconds: float) -> Group:
        return world(self.size, seconds)


def _seen(**values: object) -> None:
    """Change accelerate's state of the processes, which all its objects share."""
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared.update(values)


def facts(state: TrainerState, loader: Any, own_data: bool) -> dict[str, Any]:
    """The settings that must be equal in the trainers of all replicas."""
    batches = len(loader) if hasattr(loader, "__len__") else None
    facts = {"the trainer's max_steps": state.max_steps}
    if own_data:
        return facts
    sampler = getattr(getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None), "sampler", None)
    order = {"seed of the order of training data": getattr(sampler, "initial_seed", None)}
    return facts | {"batches of an epoch": batches} | order


def evaluations(args: TrainingArguments, state: TrainerState, loader: Any) -> dict[str, str]:
    """When the trainer evaluates and saves, as settings that must be equal on all replicas."""
    batches = len(loader) if hasattr(loader, "__len__") else "?"
    epoch = f"each epoch of {batches} batches, {args.gradient_accumulation_steps} a step"

    def when(strategy: Any, steps: object) -> str:
        told: dict[str, str] = {"steps": f"every {steps} steps", "epoch": epoch}
        return told.get(strategy.value, str(strategy.value))

    return {
        "evaluations": f"{when(args.eval_strategy, state.eval_steps)}, from {args.eval_delay}"
        + ", and at the start" * args.eval_on_start,
        "saves": when(args.save_strategy, state.save_steps),
    }


def check(args: TrainingArguments, size: int, own_data: bool, weights: str) -> None:
    """Raise `ConfigurationError` for settings that cannot work, before anything is wrapped."""
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
            _REFUSED.format(given=f"DataParallel on {args.n_gpu} GPUs", advice="start one process per GPU, by torchrun")
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
            "choose 'random': each replica would have its own random groups, and shares would overlap",
        ),
        "enable_jit_checkpoint": (
            getattr(args, "enable_jit_checkpoint", False),
            "leave it out and give save_steps: it saves and stops each process at its own step, without Thinwire's part of the checkpoint",
        ),
        "load_best_model_at_end": (
            size > 1 and weights == "own" and args.load_best_model_at_end,
            "choose weights='anchors': the best of each replica's own weights would be another model on each",
        ),
        "num_generations, of TRL's GRPO or RLOO": (
            size > 1 and hasattr(args, "num_generations"),
            "give a Membership and own_data=True: in a fixed group TRL seeks each process's completions among those of all",
        ),
    }
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(f"{name}: trainers that do the same on all replicas are needed; {advice}.")


def check_member(args: TrainingArguments, member: Membership, sampler: MemberSampler | None) -> None:
    """Raise `ConfigurationError` for settings that cannot work in an elastic run."""
    ahead = sampler is not None
    args.ignore_data_skip |= ahead  # the ledger has the position in the data
    refuse(
        member,
        {
            "load_best_model_at_end": (args.load_best_model_at_end, "leave it out: each would have another best"),
            "dataloader_num_workers with share()": (ahead and args.dataloader_num_workers > 0, "set it to 0"),
            "fp16 with share() and max_grad_norm=0": (ahead and args.fp16 and not args.max_grad_norm, "give bf16=True"),
        },
    )


def check_hidden() -> None:
    if PartialState().distributed_type != DistributedType.NO:
        raise ConfigurationError(
            "accelerate found the other processes again, after the Trainer was made, and has wrapped the model: one state for the whole "
            "training is needed. Make all TrainingArguments and Accelerators before the Trainer."
        )


def check_share(loader: Any, place: ProcessPlace) -> None:
    """Raise `ConfigurationError` unless this replica reads its own share of the data."""
    if place.size == 1:
        return
    if isinstance(loader, DataLoaderDispatcher):
        raise ConfigurationError(
            "an iterable data set that one process would read for all: each replica must read its own share. Give "
            "TrainingArguments accelerator_config={'dispatch_batches': False}."
        )
    cut = getattr(loader, "batch_sampler", None)
    if not isinstance(cut, BatchSamplerShard):
        cut = getattr(loader, "dataset", None)
        if isinstance(cut, IterableDataset) and not isinstance(cut, IterableDatasetShard):
            return  # of `datasets`, which cuts by its own shards
    if (getattr(cut, "num_processes", None), getattr(cut, "process_index", None)) != (place.size, place.rank):
        raise ConfigurationError(
            f"training data that are not share {place.rank} of {place.size}: each replica needs its own share. Make a new Trainer for "
            "each training; if your own data loader cuts them, or each process has its own, give ThinwireCallback(..., own_data=True)."
        )
