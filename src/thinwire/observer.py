"""Who listens to a run: called with each event; times are the caller's."""

from __future__ import annotations

from typing import Any, Protocol


class Observer(Protocol):
    def __call__(self, event: str, step: int, **fields: Any) -> None: ...
