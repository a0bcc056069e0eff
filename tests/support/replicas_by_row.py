"""Replicas as the rows of an fp64 matrix, for the equations of methods in which they do not agree."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread_of(x: Tensor) -> float:
    """Returns the mean squared distance of the replicas from their mean."""
    return float((x - x.mean(0)).square().sum(1).mean())
