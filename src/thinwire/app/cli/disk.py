"""Checks before training that the disk of the run folder can hold what the run will write there."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from torch import Tensor, nn

from thinwire.app.plan.memory import kept_nbytes
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError
from thinwire.files import existing

PAGE_NBYTES = 5_000_000  # the report page


def room_on_disk(run: Run, model: nn.Module, here: int, folder: Path, console: Console) -> None:
    """Compare the free bytes where `folder` is or will be with those of the trained model, of the checkpoints of the `here` replicas on this
    machine, and of the report page; print a warning if not all fit. What a run in `folder` has written already counts as free.

    Raises `ConfigurationError` if not even the trained model fits.
    """
    held = sum(file.stat().st_size for file in folder.glob("checkpoints/*/step-*/*") if file.is_file())
    free = shutil.disk_usage(existing(folder)).free + held
    room = f"{text_of_nbytes(free)} of the disk are free{' or have its checkpoints' if held else ''}"
    elsewhere = "" if held else ", or choose another --out"  # a run that has begun stays where it is
    weights, each = _nbytes_on_disk(run, model)
    writes = run.placement.checkpoint_every
    at_once = min(run.placement.keep, run.optimizer.steps // writes) + 1 if writes else 1
    if free < weights:
        raise ConfigurationError(
            f"{folder}: {room}, and the trained model needs {text_of_nbytes(weights)} (predicted); "
            f"free some space{elsewhere}."
        )
    needed = weights + here * at_once * each + PAGE_NBYTES
    if free < needed:
        console.print(
            f"warning: {folder}: {room}, and the run needs {text_of_nbytes(needed)} (predicted): "
            f"{text_of_nbytes(weights)} for the model, {text_of_nbytes(each)} for a checkpoint, of which {here * at_once} are there at once, "
            f"and {text_of_nbytes(PAGE_NBYTES)} for the page. Without a checkpoint a run that ends early cannot be resumed. Free some space, "
            f"or --keep fewer{elsewhere}.",
            soft_wrap=True,
            highlight=False,
        )  # fmt: skip


def _nbytes_on_disk(run: Run, model: nn.Module) -> tuple[int, int]:
    """Bytes of the trained model, and about those of one replica's checkpoint, with the moments of AdamW."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    weights = sum(value.numel() * value.element_size() for value in tensors)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if run.make_method():
        return weights, weights + 8 * trained
    strategy = run.make_strategy()
    numels = [fragment.numel for fragment in strategy.partition.fragments(model)]
    kept = kept_nbytes(trained, strategy, numels, run.placement.replicas)
    return weights, weights + sum(nbytes for purpose, nbytes in kept.items() if purpose != "parameters")
