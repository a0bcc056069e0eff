"""What a Replica cannot mend in the loop around it, and says once."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_UNFINISHED = (
    "a Replica was neither finished nor closed: what was trained since the last round stays with this replica alone. "
    "Write `with Replica(...):` around the loop, or call finish() at its end"
)
_UNCOUNTED = "finished before the first inner step: the optimizer that was given has taken none; give the one that the loop steps"


def silent(event: str, step: int, **fields: Any) -> None:
    """Observe nothing. What is said here goes to Python's `warnings` then."""


def _warn(event: str, step: int, message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class LoopWarnings:
    """Of one Replica, the `owner`."""

    def __init__(self, owner: object, model: nn.Module, observe: Callable[..., None], local: bool) -> None:
        self._observe = _warn if observe is silent else observe
        self._unfinished = weakref.finalize(owner, warnings.warn, _UNFINISHED, RuntimeWarning)
        if local and (said := _kept_apart(model)):
            self._observe("warning", 0, message=said)

    def finishes(self, step: int) -> None:
        self.closes()
        if step == 0:
            self._observe("warning", step, message=_UNCOUNTED)

    def closes(self) -> None:
        self._unfinished.detach()


def _kept_apart(model: nn.Module) -> str:
    """Of running statistics; empty if there are none."""
    normed = [name for name, m in model.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None]
    if not normed:
        return ""
    return (
        f"{len(normed)} layers keep running statistics ({normed[0]}, ...) that stay local, so each replica evaluates and exports with its own. "
        "Take a norm without them (LayerNorm, GroupNorm), or a fixed group with buffers='mean'"
    )
