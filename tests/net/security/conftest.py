"""A hub whose audit log a test can wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.net import Hub


class Lines:
    """The lines of the audit log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._changed:
            self.said.append(line)
            self._changed.notify_all()

    def wait(self, *parts: str, nth: int = 1) -> str:
        """Waits for the nth line that contains all `parts`, and returns it."""
        found: list[str] = []

        def there() -> bool:
            found[:] = [line for line in self.said if all(part in line for part in parts)]
            return len(found) >= nth

        with self._changed:
            assert self._changed.wait_for(there, 600.0), self.said
        return found[nth - 1]


@pytest.fixture
def audit() -> Lines:
    return Lines()


@pytest.fixture
def hub(tmp_path: Path, audit: Lines) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", say=audit) as hub:
        yield hub
