"""A text and a run that has ended, which several files of tests read; each test gets a copy of the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_runs import run_in, small_run


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    return str(file)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "whole"
    run_in(folder, small_run(text))
    return folder


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A run that was never stopped; each test gets a copy."""
    return shutil.copytree(trained, tmp_path / "whole")
