"""Writes the trained model; where it cannot be written, to another folder, because nothing else holds the end of the training."""

from __future__ import annotations

import glob
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from thinwire import checkpoint
from thinwire.app.jobs.base import Job
from thinwire.app.trainer.run import Run
from thinwire.errors import CheckpointError

_PAGE = 4096  # bytes: a disk with fewer is full


def store(
    run: Run, job: Job, model: nn.Module, weights: Mapping[str, Tensor], place: Path, writer: str, mark: str
) -> None:
    """Write the files of the trained model to `place`, as `job` does.

    Raises `CheckpointError` if they cannot be written. It names the temporary folder that has them instead; or, if that cannot be written
    either, what a resume can restore.
    """
    try:
        job.store(place, model, weights, writer, mark)
    except CheckpointError as error:
        spare = Path(tempfile.gettempdir())
        try:
            spare = Path(tempfile.mkdtemp(prefix=f"{_spare(place)}-"))
            job.keep(spare, writer)
            job.store(spare, model, weights, writer, mark)
            run.save(spare / "run.toml")
        except (CheckpointError, OSError):
            if spare != Path(tempfile.gettempdir()):
                shutil.rmtree(spare, ignore_errors=True)
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
            raise CheckpointError(
                f"{error} Nor can it be written to {tempfile.gettempdir()}. {_left(place, writer, nbytes)}"
            ) from error
        raise CheckpointError(f"{error} It is in {spare} instead: {_move(place)}.") from error


def of_full_disk(folder: Path) -> tuple[str, bool]:
    """What the replicas of the run in `folder` could not say because its disk is full, empty if it is not; and whether the trained model is
    in another folder.
    """
    if shutil.disk_usage(folder).free >= _PAGE:
        return "", False
    begun, full = (folder / "run.toml").stat().st_mtime, f"The disk of {folder} is full."
    for path in Path(tempfile.gettempdir()).glob(f"{glob.escape(_spare(folder))}-*/model.safetensors"):
        if path.stat().st_mtime >= begun:
            return f"{full} The trained model is in {path.parent}: {_move(folder)}.", True
    again = (
        "" if any(folder.glob("checkpoints/*/step-*")) else ", and train again in another --out: there is no checkpoint"
    )
    return f"{full} Free some space{again}.", False


def _move(folder: Path) -> str:
    return f"free some space, then move its files to {folder}; do not resume"


def _spare(folder: Path) -> str:
    """The beginning of the name of the folder that has the trained model if `folder` cannot be written."""
    return f"thinwire-{folder.resolve().name}"


def _left(folder: Path, writer: str, nbytes: int) -> str:
    """What to do about a model that was written nowhere. The command adds its own way to resume."""
    found, _ = checkpoint.newest(folder / "checkpoints" / writer)
    if found is None:
        return f"There is no checkpoint either, so the training is lost: free {nbytes:,} bytes, and train again in another --out."
    return f"Free {nbytes:,} bytes, then resume: the run goes on from the checkpoint of step {found.step}."
