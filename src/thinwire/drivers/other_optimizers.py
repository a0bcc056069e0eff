"""Steps of optimizers that a Replica was not given, over parameters that it exchanges: they are not counted, so this warns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

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
