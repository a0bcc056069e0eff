"""What several files of tests use: a text, a run that has ended, of which each test gets a copy, and an elastic run in virtual time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from elastic_runs import elastic_run, simulated
from small_runs import run_in, small_run

from thinwire.app.trainer.run import Run
from thinwire.membership.testing.cluster import SimulatedCluster


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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An elastic run of three replicas."""
    return elastic_run(tmp_path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimulatedCluster:
    """Where its replicas meet, in virtual time."""
    return simulated(monkeypatch)
