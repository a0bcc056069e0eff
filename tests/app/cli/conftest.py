"""A cache of texts for the tests of a file, and a copy of the file's `trained` run for each test."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def one_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: cache)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def terminal() -> Iterator[None]:
    """Let SIGHUP do what it does by default, in child processes too; under nohup it would be ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
