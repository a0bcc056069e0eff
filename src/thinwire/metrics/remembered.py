"""Under which name a tracker knows a run: kept in its folder, so that a resumed run goes on under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thinwire.records.files import contents


def remembered(path: Path, make: Callable[[], str]) -> str:
    """The line in the file at `path`; one that `make` makes, and that is written there, where there is none."""
    if path.exists():
        return contents(path).strip()
    made = make()
    path.write_text(made + "\n")
    return made
