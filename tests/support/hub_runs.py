"""Runs of `thinwire hub` and `thinwire join` as processes, and waiting for their progress."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_process import HubProcess
from run_folders import read_events


def joining(token: str, name: str, folder: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "thinwire", "join", token, "--name", name, "--out", str(folder / name)]
    return [*command, "--keys", str(folder / "keys"), *more]


def started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def joiner(token: str, name: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return started(joining(token, name, folder, *more))


@contextmanager
def ending(hub: HubProcess) -> Iterator[list[subprocess.Popen[str]]]:
    """Ends the hub, and the processes in the list, at the end of the block."""
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        hub.close()


def until(enough: Callable[[], bool], what: str, processes: list[subprocess.Popen[str]]) -> None:
    """Waits for `what`. Fails if a process has ended, because then it will not come, and after ten minutes."""
    for _ in range(6000):
        if enough():
            return
        ended = [process.communicate()[0] for process in processes if process.poll() is not None]
        assert not ended or enough(), f"before {what}, somebody has ended: {ended}"
        threading.Event().wait(0.1)
    pytest.fail(f"ten minutes without {what}")


def reached(folder: Path, step: int, processes: list[subprocess.Popen[str]]) -> None:
    """Waits until the replica in `folder` has started."""

    def there() -> bool:
        return any(event["step"] >= step for path in folder.glob("events/*.jsonl") for event in read_events(path))

    until(there, f"step {step} of {folder.name}", processes)
