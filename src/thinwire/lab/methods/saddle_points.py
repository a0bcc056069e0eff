"""Saddle-point problems: a replica's operator F, and constraints as proximal maps. The methods are in minmax.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError

Operator = Callable[[Tensor], Tensor]  # flat z -> flat F_m(z), of one replica


def saddle(objective: Callable[[Tensor, Tensor], Tensor], minimised: int) -> Operator:
    """The operator of min over x, max over y of `objective`(x, y).

    Args:
        objective: takes x and y, 1-D fp32, and returns a scalar that autograd can differentiate.
        minimised: how many elements of z are x; the rest is y.

    >>> F = saddle(lambda x, y: (x * y).sum(), minimised=1)
    >>> F(torch.tensor([2.0, 3.0]))
    tensor([ 3., -2.])
    """

    def operator(z: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(objective(z[:minimised], z[minimised:]), z)
        return torch.cat([gradient[:minimised], -gradient[minimised:]])

    return operator


# ---- constraints


@runtime_checkable
class Prox(Protocol):
    """argmin over v of h(v) + ‖v − z‖²/2: for a set, the nearest point in it."""

    def __call__(self, z: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Free:
    """No constraint: h = 0.

    >>> Free()(torch.tensor([1.0, -2.0]))
    tensor([ 1., -2.])
    """

    def __call__(self, z: Tensor) -> Tensor:
        return z


@dataclass(frozen=True)
class Simplexes:
    """Consecutive parts of z are projected onto simplexes, where all numbers are non-negative with sum 1: the mixed strategies of a matrix game.

    Args:
        sizes: how many elements of z each part has.

    >>> Simplexes((2, 2))(torch.tensor([0.6, 0.0, 5.0, 1.0]))
    tensor([0.8000, 0.2000, 1.0000, 0.0000])
    """

    sizes: tuple[int, ...]

    def __call__(self, z: Tensor) -> Tensor:
        if sum(self.sizes) != z.numel() or min(self.sizes, default=0) < 1:
            raise ConfigurationError(f"{self} for {z.numel()} numbers: positive sizes with that sum are needed.")
        return torch.cat([_on_simplex(part) for part in torch.split(z, list(self.sizes))])


def _on_simplex(v: Tensor) -> Tensor:
    """Duchi et al., ICML 2008, figure 1; sums in double."""
    down = v.double().sort(descending=True).values
    over = (down.cumsum(0) - 1) / torch.arange(1, len(v) + 1, device=v.device)
    last = int((down > over).sum()) - 1
    return (v.double() - over[last]).clamp_(min=0.0).to(v.dtype)
