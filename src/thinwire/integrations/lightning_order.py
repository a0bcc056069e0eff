"""The place of the bridge in Lightning's `Trainer`: around validations, and before and behind all other callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback


class _First(Callback):
    """Does before all other callbacks what some of them build on."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.bridge.save_anchors(trainer, checkpoint)

    def on_train_end(self, *_: Any) -> None:
        self.bridge.end()


class _Last(Callback):
    """Does behind all other callbacks what must see their work: one of them may save a checkpoint on an exception, or leave averages."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge

    def on_train_end(self, *_: Any) -> None:
        self.bridge.equalize()

    def on_exception(self, *_: Any) -> None:
        self.bridge.close()


def take_place(bridge: Any, trainer: Trainer) -> None:
    """Let `bridge` come before the callbacks that decide by metrics, its two helpers before and behind all, and its `validating` be around the
    whole of each validation: other callbacks and the module itself exchange weights in its hooks, and the two exchanges must not cross.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    first = next((place for place, one in enumerate(callbacks) if getattr(one, "monitor", None)), len(callbacks))
    if bridge in callbacks[first:]:
        callbacks.remove(bridge)
        callbacks.insert(first, bridge)
    others = [one for one in callbacks if not isinstance(one, _First | _Last)]
    callbacks[:] = [_First(bridge), *others, _Last(bridge)]
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    vars(loop).pop("run", None)
    run = loop.run

    def validate() -> Any:
        with bridge.validating():
            return run()

    loop.run = validate
    bridge.loop = loop


def leave_place(bridge: Any) -> None:
    """Undo what `take_place` has done to the trainer's loop. Idempotent."""
    if bridge.loop is not None:
        vars(bridge.loop).pop("run", None)
    bridge.loop = None
