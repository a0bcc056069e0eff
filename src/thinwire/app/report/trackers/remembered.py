"""The name of a run at a tracker, kept in the run's folder, so that a resumed run continues under it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thinwire.files import contents


def remembered(path: Path, make: Callable[[], str]) -> str:
    """The line in the file at `path`. If there is none, write the one that `make` returns."""
    if path.exists():
        return contents(path).strip()
    made = make()
    path.write_text(made + "\n")
    return made
