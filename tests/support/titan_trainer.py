"""The parts of torchtitan's Trainer, made from its real configurations, and its loop. The Trainer itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig

import thinwire as tw
from thinwire.testing.toy import Toy, batch, fill

STREAMING = tw.streaming_diloco(every=6, fragments=2, delay=2)


class ToyWithoutEmpty(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.nothing, self.frozen
        self.frozen = 1.0


class Titan:
    """An object with the attributes of torchtitan's Trainer that the bridge uses."""

    def __init__(
        self,
        folder: Path,
        groups: int = 2,
        steps: int = 12,
        saved: int = 7,
        load: int = -1,
        initial: Path | None = None,
    ) -> None:
        self.config = SimpleNamespace(training=SimpleNamespace(steps=steps), checkpoint=SimpleNamespace(load_step=load))
        self.step = 0
        self.model_parts = [fill(ToyWithoutEmpty())]
        options = {"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.01, "weight_decay": 0.1}}
        slow = {"optimizer_name": "Adam", "optimizer_kwargs": {"lr": 0.001}}
        patterns = [ParamGroupConfig(pattern=r"^head\.", **slow)] if groups == 2 else []
        config = OptimizersContainer.Config(
            param_groups=[*patterns, ParamGroupConfig(pattern=".*", **options)], implementation="for-loop"
        )
        self.optimizers = config.build(model_parts=self.model_parts)
        rates = LRSchedulersContainer.Config(warmup_steps=2)
        self.lr_schedulers = rates.build(optimizers=self.optimizers, training_steps=steps)
        keep = CheckpointManager.Config(
            enable=True, interval=saved, keep_latest_k=0, last_save_model_only=False,
            initial_load_path=str(initial) if initial else None,
        )  # fmt: skip
        self.checkpointer = keep.build(
            dataloader=None,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )
        self.checkpointer.states.pop("dataloader")  # this trainer has no dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train(self, before: Callable[[], object] = lambda: None) -> Toy:
        """Trains in the order of `Trainer.train`."""
        (model,), last = self.model_parts, self.config.training.steps
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        while self.step < last:
            before()
            self.step += 1
            self.optimizers.zero_grad()
            x, y = batch(0, 0, self.step)
            ((model(x) - y) ** 2).mean().backward()
            self.optimizers.step()
            self.lr_schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == last)
        return model
