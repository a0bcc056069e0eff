"""Weights & Biases (`pip install 'thinwire[wandb]'`): one run with the metrics of all replicas. What wandb reads from its own surroundings
(WANDB_MODE=offline, WANDB_PROJECT, WANDB_API_KEY) holds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from thinwire.app.report.trackers.remembered import remembered
from thinwire.app.report.trackers.sinks import Sink


class Wandb(Sink):
    """`replica-0/loss` and so on over `inner_step`; a resumed run keeps its id."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], given: str) -> None:
        self._run = wandb.init(
            project=given or None,
            name=folder.resolve().name,
            id=remembered(folder / "wandb-run.txt", lambda: secrets.token_hex(4)),
            dir=str(folder),
            config=dict(settings),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("inner_step")
        self._run.define_metric("*", step_metric="inner_step")
        self.where = self._run.url or f"wandb sync {self._run.settings.sync_dir}"

    def write(self, replica: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"inner_step": step} | {f"{replica}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()
