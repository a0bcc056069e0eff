"""What a strategy asks of a piece that bounds what a replica's packets reveal; thinwire.lab.privacy has one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Privacy(Protocol):
    """Bounds what the packets of a replica reveal, by what it does to each delta before the codec."""

    @property
    @abstractmethod
    def needs_fixed_group(self) -> str:
        """See `Piece`."""

    @abstractmethod
    def apply(self, x: Tensor, size: int) -> Tensor:
        """Flat fp32 `x` as it may be sent by one of `size` replicas; in place. NaN and infinities become NaN."""

    @abstractmethod
    def check(self) -> None:
        """Raise `ConfigurationError` if `spent` could not be computed at the end."""

    @abstractmethod
    def spent(self, rounds: int, size: int) -> Mapping[str, Any]:
        """What `rounds` rounds among `size` replicas have revealed, for a summary."""
