"""What a strategy asks of an inner optimizer; pieces/inner_optimizers.py has some."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from thinwire.errors import ConfigurationError


@runtime_checkable
class Inner(Protocol):
    """An inner optimizer. A run's learning rate, which suits AdamW, is multiplied by its `lr_factor`."""

    @property
    def lr_factor(self) -> float: ...

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Make the optimizer of `model`'s trainable parameters, with the rate lr · lr_factor. In a steady state a step shrinks the
        weights by lr · `weight_decay`."""

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `ConfigurationError` unless a replica may train with `optimizer` if the strategy names this one."""


def check_momentum(optimizer: torch.optim.Optimizer, owner: object) -> None:
    """Raise `ConfigurationError` if `optimizer` has momentum in addition to that of `owner`."""
    for group in optimizer.param_groups:
        if group.get("momentum") or any(group.get("betas", (0,))[:1]):
            raise ConfigurationError(
                f"{owner} keeps momentum before the exchange and {type(optimizer).__name__} after it, one owner is needed; give "
                "torch.optim.SGD without momentum, or take the filter out of the strategy."
            )


def highest_rate(optimizer: torch.optim.Optimizer) -> float:
    """The highest learning rate of the optimizer's groups; NaN if none has one, as in Adafactor with relative steps.

    >>> highest_rate(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.5))
    0.5
    """
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    return float(max(rates)) if rates else math.nan
