"""Small runs of the language model, for tests of its training; fixtures that train them are in tests/app/trainer/conftest.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from run_folders import read_events

from thinwire.app.trainer import launch, run_folder, supervisor
from thinwire.app.trainer.run import Run

STEPS = 24


def small_run(text: str, **changes: object) -> Run:
    """Returns a run with rounds of both fragments in the air at most checkpoints: H = 6, τ = 4."""
    settings: dict[str, object] = dict(
        text=(text,), steps=STEPS, every=6, delay=4, batch=1, sequence=16, checkpoint_every=5, keep=9, eval_batches=1,
        model="nano", carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | changes))  # type: ignore[arg-type]


def run_in(folder: Path, run: Run, resume: bool = False) -> None:
    run_folder.new_folder(run, folder, resume)
    if run.placement.carrier == "threads":
        launch.train_threads(run, folder, resume, lambda: None)
    else:
        supervisor.train_processes(run, folder, resume, lambda: None)


def model_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def events_of(folder: Path, kind: str, replica: int = 0) -> list[dict[str, object]]:
    return [event for event in read_events(folder / f"events/replica-{replica}.jsonl") if event["event"] == kind]


def cut_back(folder: Path, copy: Path, step: int) -> Path:
    """Reduces `folder` to what a kill right after `step` would have left."""
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    for path in copy.glob("checkpoints/*/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return copy
