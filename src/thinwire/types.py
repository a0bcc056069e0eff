"""Two types that all packages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

State = Mapping[str, Tensor]
"""State kept beside a piece: tensors by name, so that it can be saved, handed over and compared."""


class Observer(Protocol):
    """Hears the events of a run: called with each event, which happened at inner step `step`."""

    def __call__(self, event: str, step: int, **fields: Any) -> None: ...
