"""Warnings about the loop around a Replica; each is given once."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from thinwire.codecs.base import Codec
from thinwire.drivers.step_hooks import outermost
from thinwire.errors import CheckpointError
from thinwire.rng import Key

PROBED_VALUES = 256  # values of a delta with one that is not zero
_UNFINISHED = (
    "a Replica was neither finished nor closed: the training since the last round is not exchanged. "
    "Write `with Replica(...):` around the loop, or call finish() at its end"
)
_UNCOUNTED = "finished before the first inner step: the given optimizer has taken none; step it in the loop, or give the one that the loop steps"


def silent(event: str, step: int, **fields: Any) -> None:
    """An observer that does nothing; a Replica's warnings go to Python's `warnings` then."""


def warned(event: str, step: int, message: str) -> None:
    """Give the warning by Python's `warnings` instead of an observer."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class LoopWarnings:
    """The warnings of one Replica, the `owner`."""

    def __init__(
        self, owner: object, model: nn.Module, observe: Callable[..., None], codec: Codec, local: bool
    ) -> None:
        self._observe = warned if observe is silent else observe
        self._checked = False  # the state after the first step
        self._hook: RemovableHandle | None = None
        self._unfinished = weakref.finalize(owner, warnings.warn, _UNFINISHED, RuntimeWarning)
        for said in (_kept_apart(model) if local else "", _moved_untouched(model, codec)):
            if said:
                self._observe("warning", 0, message=said)

    def check_after_first_step(self, optimizer: torch.optim.Optimizer, check: Callable[[], None]) -> None:
        """Warn after the first step of `optimizer`, which makes its state, if `check` raises `CheckpointError`: not hours later, at a save."""

        def after(*_: Any) -> None:
            self._checked = True
            try:
                check()
            except CheckpointError as error:
                self._observe("warning", 1, message=f"checkpoint.save would refuse this replica: {error}")

        first = outermost(after)  # an optimizer whose step calls that of its parent class may make state after it
        self._hook = optimizer.register_step_post_hook(lambda *args: None if self._checked else first(*args))

    def finishes(self, step: int) -> None:
        self.closes()
        if step == 0:
            self._observe("warning", step, message=_UNCOUNTED)

    def closes(self) -> None:
        if self._hook:
            self._hook.remove()
        self._unfinished.detach()


def _moved_untouched(model: nn.Module, codec: Codec) -> str:
    """The warning about sparse embeddings with a codec that has no zero; empty if there are none."""
    tables = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if not tables:
        return ""
    fitted = codec.fitted(((PROBED_VALUES // 16, 16),))
    delta, back = torch.zeros(PROBED_VALUES), torch.zeros(PROBED_VALUES)
    delta[0] = 1.0
    payload = torch.zeros(fitted.nbytes(PROBED_VALUES), dtype=torch.uint8)
    fitted.encode(delta, payload, Key())
    fitted.decode_add(payload, back, Key())
    if not back[1:].any():
        return ""
    return (
        f"{len(tables)} embeddings have sparse gradients ({tables[0]}, ...) and {codec} has no zero: rows that were not looked up move a "
        "little in every round if their block has rows that were. A codec with a zero, such as E3M0(32), does not move them"
    )


def _kept_apart(model: nn.Module) -> str:
    """The warning about running statistics; empty if there are none."""
    normed = [name for name, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    if not normed:
        return ""
    return (
        f"{len(normed)} layers keep running statistics ({normed[0]}, ...) that stay local, so each replica evaluates and exports with its own. "
        "Use a norm without them (LayerNorm, GroupNorm), or a fixed group with buffers='mean'"
    )
