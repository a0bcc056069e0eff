"""Hooks on the steps of optimizers, once for each step; and what watches for steps that no Replica counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

StepHook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]


def outermost(hook: StepHook, family: Sequence[torch.optim.Optimizer] = ()) -> StepHook:
    """`hook` for `register_step_pre_hook` or `register_step_post_hook`, without the calls for a step inside a step of the same optimizer or of
    one of its `family`, which may wrap it.

    torch wraps the `step` of each class, so a subclass that calls `super().step()` calls all hooks twice. `torch.compile` of a step leaves
    the hook as it is.
    """

    def called(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_locals.get("self") is not optimizer:  # the compiler's frames come between
            frame = frame.f_back
        if not _inside_another((optimizer, *family), frame):
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


# ---- steps of optimizers that a Replica was not given
# By the id of a parameter, which its watcher keeps alive.
_watched: WeakValueDictionary[int, OtherOptimizers] = WeakValueDictionary()
_first = threading.Lock()  # replicas may be threads


class OtherOptimizers:
    """Calls `warn`, once, when another optimizer than `given` has stepped some of `parameters` twice since a given one has stepped.

    Twice, because an optimizer that steps a given one inside its own step ends its step after it.
    """

    def __init__(
        self, given: Sequence[torch.optim.Optimizer], parameters: Sequence[Tensor], warn: Callable[[str], None]
    ) -> None:
        self._given, self._parameters, self._warn = frozenset(map(id, given)), parameters, warn
        self._steps, self._said = 0, False  # of other optimizers, since a given one has stepped
        self.stepped_since_start = False  # whether another one has ever stepped
        self._within = False  # a step of a given one, which may step others
        with _first:
            _watch_all()
        for parameter in parameters:
            _watched[id(parameter)] = self

    def steps(self, within: bool) -> None:
        """Called before and after each step of a given optimizer."""
        self._steps, self._within = 0, within

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of any optimizer that holds some of the parameters."""
        if self._within or id(optimizer) in self._given:
            return
        self._steps += 1
        self.stepped_since_start = True
        if self._steps == 2 and not self._said:
            self._said = True
            self._warn(
                f"an optimizer ({type(optimizer).__name__}) that this Replica was not given steps its model: such steps are no inner steps, so no "
                "round departs and no gradient is exchanged in them. Give the Replica all optimizers in a list; or, to replace one, call "
                "finish() on all replicas and attach a new Replica"
            )

    def close(self) -> None:
        for parameter in self._parameters:
            if _watched.get(id(parameter)) is self:
                del _watched[id(parameter)]


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            watcher = _watched.get(id(parameter))
            if watcher:
                watcher.stepped(optimizer)
                return


@cache
def _watch_all() -> None:
    """Hook the steps of all optimizers; at the first Replica, so that an import alone changes none."""
    register_optimizer_step_post_hook(torch.compiler.disable(_after_any_step))  # type: ignore[no-untyped-call]
