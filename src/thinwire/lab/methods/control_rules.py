"""The vector that a sampled replica sends: rules of FedAvg, SCALLION and SCAFCOM (control_variates.py explains the symbols)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, nested
from thinwire.errors import ConfigurationError


def check_unbiased(codec: Codec, method: str, instead: str) -> None:
    """Raise `ConfigurationError` if `codec` is biased; `instead` is the method for biased codecs."""
    if any(c.biased for c in nested(codec)):
        raise ConfigurationError(
            f"{method} with {codec}: an unbiased codec is needed, such as RandomK, or rounding='stochastic'; for this codec use {instead}."
        )


def check_contractive(codec: Codec, method: str, instead: str) -> None:
    """Raise `ConfigurationError` if `codec` samples; `instead` is the method for codecs that do."""
    if any(c.samples for c in nested(codec)):
        raise ConfigurationError(
            f"{method} with {codec}: a contractive codec is needed, such as TopK; for RandomK use {instead}."
        )


@runtime_checkable
class Rule(Protocol):
    """The vector that a sampled replica sends. If `controls` is false, c and the cᵢ stay zero."""

    @property
    def controls(self) -> bool: ...

    def check(self, codec: Codec) -> None:
        """Raise `ConfigurationError` if `codec` does not fit."""

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """sᵢ and the next vᵢ (empty if the rule has no vᵢ)."""


@dataclass(frozen=True)
class Plain:
    """FedAvg: a replica sends its mean gradient, and there are no control variates.

    >>> from thinwire.codecs import Identity
    >>> Plain().check(Identity())
    """

    controls = False

    def check(self, codec: Codec) -> None: ...

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return a, v


@dataclass(frozen=True)
class Gain:
    """SCALLION: a replica sends α·(aᵢ − c). With α = 1 and exact values it is SCAFFOLD.

    Args:
        alpha: factor α, (0, 1]; near 1/(1 + ω) for a codec of variance ω, so 0.1 for a tenth of the values.

    Raises:
        ConfigurationError: alpha is out of range.

    >>> Gain(alpha=0.1).alpha
    0.1
    """

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
    """SCAFCOM: a replica sends the difference between a running mean of its gradient and the value that the others have of it.

        vᵢ ← (1 − β)·vᵢ + β·(aᵢ + cᵢ − c),   sᵢ = vᵢ − cᵢ

    With β = 1 and exact values it is SCAFFOLD.

    Args:
        beta: factor β of the newest gradient, (0, 1].

    Raises:
        ConfigurationError: beta is out of range.

    >>> Averaged(beta=0.2).beta
    0.2
    """

    beta: float = 0.2
    controls = True

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise ConfigurationError(f"{self}: beta in (0, 1] is needed; 0.2 is usual.")

    def check(self, codec: Codec) -> None:
        check_contractive(codec, f"{self}", "scallion")

    def signal(self, a: Tensor, c: Tensor, own: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = (a + own - c).mul_(self.beta).add_(v if v.numel() else torch.zeros_like(a), alpha=1 - self.beta)
        return v - own, v
