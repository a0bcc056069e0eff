"""The place of the bridge among the callbacks of Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback


class _Last(Callback):
    """Closes `first` behind all other callbacks, because one of them may save a checkpoint on an exception."""

    def __init__(self, first: Any) -> None:
        self.first = first

    def on_exception(self, *_: Any) -> None:
        self.first.close()


def take_place(callback: Callback, trainer: Trainer) -> None:
    """Let `callback` come before those that decide by metrics, and be closed behind all after an exception."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    first = next((place for place, one in enumerate(callbacks) if getattr(one, "monitor", None)), len(callbacks))
    if callback in callbacks[first:]:
        callbacks.remove(callback)
        callbacks.insert(first, callback)
    callbacks[:] = [one for one in callbacks if not isinstance(one, _Last)] + [_Last(callback)]
