"""The checks of the bridge to Lightning's `Trainer`."""

from __future__ import annotations

import json
import socket
import zipfile
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader

from thinwire.comm import Group
from thinwire.comm.group import gather
from thinwire.drivers.model_buffers import floating
from thinwire.errors import CheckpointError, ConfigurationError
from thinwire.integrations.lightning_metrics import monitored
from thinwire.integrations.members import MemberSampler, refuse
from thinwire.integrations.traffic import gradient_nbytes
from thinwire.membership.rendezvous import Membership

_FOLDERS = 1 << 16  # most bytes of one replica's list of folders
_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")  # by name: older releases lack the second


def check(trainer: Trainer, module: LightningModule, size: int, weights: str) -> None:
    """Raise `ConfigurationError` for settings that cannot work with these replicas."""
    lightnings = trainer.strategy
    if not isinstance(lightnings, SingleDeviceStrategy):
        nbytes = gradient_nbytes(module, trainer.world_size)
        raise ConfigurationError(
            f"{type(lightnings).__name__} over {trainer.world_size} processes, which sends about {nbytes:,} bytes of gradients from each at every "
            "step: in every process a whole model that Lightning neither shards nor wraps is needed. Write Trainer(devices=1, num_nodes=1), "
            "without strategy=; on GPUs devices=[local rank]."
        )
    callbacks: list[Any] = list(getattr(trainer, "callbacks", []))
    anchors = weights == "anchors"
    by_time = getattr(trainer, "_val_check_time_interval", None)
    bare = any(isinstance(one, ModelCheckpoint) and one.save_weights_only for one in callbacks)
    refused = {
        "automatic_optimization=False with a GradScaler (16-mixed)": (
            not module.automatic_optimization and getattr(trainer.precision_plugin, "scaler", None) is not None,
            "choose bf16-mixed: each replica would leave out other steps",
        ),
        "ModelCheckpoint(save_weights_only=True)": (anchors and bare, "leave it out, or choose weights='own'"),
        "val_check_interval as a time, for a model with floating-point buffers, or a monitored metric": (
            size > 1 and by_time and ((anchors and floating(module) != []) or monitored(trainer) != []),
            "give it as a number of batches, or choose weights='own' and monitor nothing",
        ),
        **(_averaging(trainer) if size > 1 else {}),
        "max_time, or a Timer": (size > 1 and any(isinstance(one, Timer) for one in callbacks), "give max_steps"),
    }
    for name, (asked, advice) in refused.items():
        if asked:
            raise ConfigurationError(f"{name}: trainers that do the same on all replicas are needed; {advice}.")


def validations(trainer: Trainer) -> dict[str, str]:
    """When the trainer validates, as settings that must be equal on all replicas."""
    when = f"every {trainer.val_check_batch} batches, in every {trainer.check_val_every_n_epoch} epochs"
    return {"validation": when if trainer.enable_validation else "none"}


def check_folders(trainer: Trainer, group: Group) -> None:
    """Raise `ConfigurationError` if two replicas write checkpoints into one folder. Collective."""
    callbacks: list[Any] = list(getattr(trainer, "checkpoint_callbacks", []))
    folders = [str(Path(one.dirpath).resolve()) for one in callbacks if getattr(one, "dirpath", None)]
    told_of = gather(group, json.dumps([[socket.gethostname(), one] for one in folders]).encode(), _FOLDERS, "folders")
    seen: dict[str, int] = {}
    for rank, text in enumerate(told_of):
        for place in map(json.dumps, json.loads(text)):
            if seen.setdefault(place, rank) != rank:
                raise ConfigurationError(
                    f"replicas {seen[place]} and {rank} would write checkpoints into one folder, {json.loads(place)[1]}: each needs its own. "
                    'Write Trainer(default_root_dir=f"runs/replica-{callback.rank}"), and a dirpath likewise.'
                )


def checkpoints_of(
    trainer: Trainer, callback: str, replica: object
) -> tuple[dict[tuple[int, ...], list[Path]], list[str]]:
    """The checkpoints of this `replica`, by their position: step, and epochs that were over; the newest file first. And why others were skipped."""
    root = trainer.default_root_dir
    folders: list[Any] = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
    # where Lightning puts those without a dirpath: each start of a logger has a version of its own
    folders += [Path(one.save_dir or root) / str(one.name or "") for one in trainer.loggers] or [
        Path(root) / "checkpoints"
    ]
    below = [path for folder in folders if folder for path in Path(folder).rglob("*.ckpt")]
    paths = {path.resolve() for path in (*below, *Path(root).glob("*.ckpt"))}
    found: dict[tuple[int, ...], list[Path]] = {}
    skipped: list[str] = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            with zipfile.ZipFile(path) as archive:
                torn = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            torn = str(error)
        if torn:
            skipped.append(f"{path} is damaged: {torn}")
            continue
        try:
            saved = trainer.strategy.load_checkpoint(path, weights_only=True)
        except Exception as error:  # of which kind, is its reader's choice
            first = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{path} holds other objects than tensors and plain values ({first:.300}), so it is not read: it may not be of this run. Allow "
                "the classes by torch.serialization.add_safe_globals, move the file away, or choose the ckpt_path yourself."
            ) from None
        if saved.get("callbacks", {}).get(callback, {}).get("replica") == replica:
            over = saved["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
            found.setdefault((int(saved["global_step"]), int(over)), []).append(path)
    return found, skipped


def check_share(trainer: Trainer, rank: int, size: int) -> None:
    """Raise `ConfigurationError` unless this replica reads its own share of the training data."""
    if size == 1:
        return
    for loader in _loaders(trainer):
        sampler = _sampler_of(loader)
        if (getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)) != (size, rank):
            raise ConfigurationError(
                f"training data that are not share {rank} of {size}: each replica needs its own share. Write DataLoader(data, ..., "
                "sampler=callback.share(data)), or ThinwireCallback(..., own_data=True) if each process has its own data."
            )


def check_member(trainer: Trainer, member: Membership, sampler: MemberSampler | None, own_data: bool) -> None:
    """Raise `ConfigurationError` for settings that cannot work in an elastic run."""
    read = [_sampler_of(loader) for loader in _loaders(trainer)]
    refuse(
        member,
        {
            f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}": (
                trainer.max_steps < 0 or trainer.max_epochs != -1,
                "set the end of the run by Trainer(max_steps=...) only",
            ),
            "training data that other members read too": (
                not own_data and not (len(read) == 1 and read[0] is sampler),
                "write DataLoader(data, ..., sampler=callback.share(data)), or ThinwireCallback(..., own_data=True) if each has data of its own",
            ),
            **_averaging(trainer),
            "automatic_optimization=False": (
                not trainer.lightning_module.automatic_optimization,
                "put a Replica into your own loop: a trainer that steps several optimizers by hand cannot jump to the step of the others",
            ),
            "a learning rate schedule by epochs": (
                any(one.interval != "step" for one in trainer.lr_scheduler_configs),
                'return {"scheduler": ..., "interval": "step"} from configure_optimizers',
            ),
        },
    )


def _averaging(trainer: Trainer) -> dict[str, tuple[bool, str]]:
    """The refusal of callbacks that average the weights of several steps."""
    kinds = {kind.__name__ for one in getattr(trainer, "callbacks", []) for kind in type(one).__mro__}
    advice = "leave it out: each replica would end with the average of its own weights"
    return {" or ".join(_AVERAGING): (not kinds.isdisjoint(_AVERAGING), advice)}


def batch_size(trainer: Trainer) -> int:
    """Samples in a batch of the training data."""
    return sum(int(loader.batch_size) for loader in _loaders(trainer))


def _loaders(trainer: Trainer) -> list[Any]:
    return list(CombinedLoader(trainer.train_dataloader, "min_size").flattened)


def _sampler_of(loader: Any) -> Any:
    return getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
