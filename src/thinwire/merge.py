"""How a moved anchor reaches a replica's own parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError


@dataclass(frozen=True)
class Mix:
    """θ ← α·θ + (1−α)·anchor (Streaming DiLoCo, arXiv 2501.18512, Algorithm 2, line 14).

    `alpha` 0 takes the anchor and throws away the steps made during the flight; 1 keeps the replica's own and so
    never lets it see the others.
    """

    alpha: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"merge={self.alpha}: between 0 (take the anchor) and 1 (keep the local values) is needed."
            )

    @torch.no_grad()
    def into(self, parameter: Tensor, anchor: Tensor) -> None:
        """Merge a slice of the anchor (fp32, same shape) into `parameter` in place, in the parameter's own dtype."""
        if self.alpha == 0:
            parameter.copy_(anchor)
        elif self.alpha < 1:
            parameter.copy_(torch.lerp(anchor, parameter.to(anchor), self.alpha))


@dataclass(frozen=True)
class Eager:
    """Own delta at once, the others' one round late: Δ̃_m(k) = Δ̄(k−1) + (Δ_m(k) − Δ_m(k−1)) / M   (arXiv
    2502.12996, §3).

    The exchange may take a whole period: `delay` must equal `every`. *Differs in form, not in result*: the outer
    step is linear, so it is taken twice, on Δ̄ for the anchor, which therefore stays bit-identical on all replicas,
    and on the rest for a `deviation` that is the replica's own; θ ← anchor + deviation is the paper's θ. Own deltas
    are not passed through the codec before they count locally. State: anchor and momentum twice, and the last own
    delta: 12 bytes per parameter more than `Mix`.
    """
