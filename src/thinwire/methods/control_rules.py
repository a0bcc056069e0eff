"""What a sampled replica has to say: the rules of FedAvg, SCALLION and SCAFCOM (see control_variates.py for the symbols)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, nested
from thinwire.errors import ConfigurationError


def check_unbiased(codec: Codec, method: str, instead: str) -> None:
    """Raise `ConfigurationError` if `codec` is biased; `instead` is the method for such a one."""
    if any(c.biased for c in nested(codec)):
        raise ConfigurationError(
            f"{method} with {codec}: an unbiased codec is needed, such as RandomK, or rounding='stochastic'; for this one take {instead}."
        )


@runtime_checkable
class Rule(Protocol):
    """What a sampled replica has to say. `controls`: c and the cᵢ move; else they stay zero."""

    @property
    def controls(self) -> bool: ...

    def check(self, codec: Codec) -> None:
        """Raise `ConfigurationError` if `codec` does not fit."""

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """sᵢ and the next vᵢ (empty where there is none)."""


@dataclass(frozen=True)
class Plain:
    """FedAvg: the mean gradient itself, and no control variates."""

    controls = False

    def check(self, codec: Codec) -> None: ...

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return a, v


@dataclass(frozen=True)
class Gain:
    """SCALLION: α·(aᵢ − c). α near 1/(1 + ω) for a codec of variance ω: 0.1 for a tenth of the values; 1 is SCAFFOLD's."""

    alpha: float = 0.1
    controls = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ConfigurationError(
                f"{self}: alpha in (0, 1] is needed; about the share of values that travel is usual."
            )

    def check(self, codec: Codec) -> None:
        check_unbiased(codec, f"{self}", "scafcom")

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (a - c).mul_(self.alpha), v


@dataclass(frozen=True)
class Averaged:
    """SCAFCOM: the gradient's running mean of weight β, against what the others know of it. β = 1 and exact values: SCAFFOLD."""

    beta: float = 0.2
    controls = True

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise ConfigurationError(f"{self}: beta in (0, 1] is needed; 0.2 is usual.")

    def check(self, codec: Codec) -> None:
        if any(c.samples for c in nested(codec)):
            raise ConfigurationError(
                f"{self} with {codec}: a contractive codec is needed, such as TopK; for RandomK take scallion."
            )

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = (a + own - c).mul_(self.beta).add_(v if v.numel() else torch.zeros_like(a), alpha=1 - self.beta)
        return v - own, v
