"""Hooks on the steps of an optimizer, once for each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

StepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


def outermost(hook: StepHook, outer: torch.optim.Optimizer | None = None) -> StepHook:
    """`hook` for `register_step_pre_hook` or `register_step_post_hook`, without the calls for a step inside a step of the same optimizer or of
    `outer`, which may wrap it.

    torch wraps the `step` of each class, so a subclass that calls `super().step()` calls all hooks twice. `torch.compile` of a step leaves
    the hook as it is.
    """

    def called(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_locals.get("self") is not optimizer:  # the compiler's frames come between
            frame = frame.f_back
        if not _inside_another((optimizer, outer or optimizer), frame):
            hook(optimizer, args, kwargs)

    return torch.compiler.disable(called)  # type: ignore[no-any-return, no-untyped-call]


def _inside_another(optimizers: tuple[torch.optim.Optimizer, ...], wrapper: FrameType) -> bool:
    """Whether torch's `wrapper` of this step runs inside one of another step of `optimizers`. The stack says so also after a step has failed."""
    frame = wrapper.f_back
    while frame is not None:
        if frame.f_code is wrapper.f_code and any(frame.f_locals.get("self") is one for one in optimizers):
            return True
        frame = frame.f_back
    return False
