"""A start: whom it waits for, and that a signal ends it wherever it waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from listening import tree
from torch.distributed import HashStore

import thinwire.comm.torch as comm
from thinwire.app.trainer.signals import ending_in_time

# A wait that no signal interrupts, as torch's and gRPC's are: for a lock that this thread holds itself.
JOB = """\
import ctypes, os, threading
from pathlib import Path
import torch

def model():
    return torch.nn.Linear(8, 1)

def wait():
    system, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    system.pthread_mutex_lock(lock)
    Path("waits").touch()
    system.pthread_mutex_lock(lock)

def batches(share):
    if WHERE:
        wait()
    while True:
        yield torch.randn(4, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""
WHERE = {
    "the command": "True",
    "threads": "threading.current_thread().name.startswith('replica-')",
    "processes": "os.environ.get('RANK') == '1'",
    "elastic": "'supervisor' in ' '.join(__import__('sys').orig_argv)",
}


def started(tmp_path: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thinwire", "train", *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment | variables
    )


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("the command", signal.SIGTERM),
        pytest.param("the command", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("threads", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("processes", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("elastic", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_start_that_waits_outside_python(tmp_path: Path, where: str, number: signal.Signals) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("WHERE", WHERE[where]))
    carrier = ["--carrier", where] if where != "the command" else []
    process = started(tmp_path, "--job", "job.py", "--out", "run", *carrier)
    assert process.stderr is not None
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    processes = tree(process.pid)
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "thinwire train: interrupted" and "Traceback" not in said
    while any(map(lives, processes)):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_to_one_replica_that_has_not_trained_ends_the_run(tmp_path: Path) -> None:
    """The other waits for it, and would do so until the launcher counts it as lost."""
    (tmp_path / "job.py").write_text(JOB.replace("WHERE", WHERE["processes"]))
    process = started(tmp_path, "--job", "job.py", "--out", "run", "--carrier", "processes")
    while not (tmp_path / "waits").exists():
        assert process.poll() is None
        time.sleep(0.01)
    processes = tree(process.pid)
    (alone,) = (one for one in processes if b"RANK=1" in Path(f"/proc/{one}/environ").read_bytes().split(b"\0"))
    os.kill(alone, signal.SIGTERM)
    assert process.communicate()[1].splitlines()[-1] == "thinwire train: interrupted"
    assert process.returncode == 128 + signal.SIGTERM
    while any(map(lives, processes)):
        time.sleep(0.05)


def test_a_signal_to_a_fork_is_not_one_to_its_parent() -> None:
    """The processes of a loader are forks, and are ended by SIGTERM."""
    with ending_in_time("interrupted"):
        fork = os.fork()
        if not fork:
            os._exit(signal.set_wakeup_fd(-1) != -1)
        assert os.waitpid(fork, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "other", "number"), [("0", "1", signal.SIGTERM), ("1", "0", signal.SIGINT)])
def test_a_rank_alone_names_whom_it_waits_for_and_ends(
    tmp_path: Path, rank: str, other: str, number: signal.Signals
) -> None:
    (tmp_path / "job.py").write_text(JOB.replace("WHERE", "False"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = started(tmp_path, "--job", "job.py", "--out", "run", "--json", **place)
    assert process.stderr is not None
    assert any(f"waiting for rank {other} of 2 at 127.0.0.1:{port}" in line for line in process.stderr)
    process.send_signal(number)
    said = process.communicate()[1]
    assert said.endswith("thinwire train: interrupted\n") and "Traceback" not in said
    assert process.returncode == 128 + number


def test_ranks_that_meet_name_those_that_have_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "_QUIET_SECONDS", 0.0)
    store, said, waits = HashStore(), list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    def meet(rank: int, place: str = "world", seconds: float = 600.0) -> None:
        comm._meet(store, place, rank, 3, "here", seconds, comm._Patience(say if rank == 0 else said.append))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    threads[0].start()
    waits.wait()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == "waiting for ranks 1, 2 of 3 at here" and "all 3 ranks are at here" in said
    with pytest.raises(RuntimeError, match="ranks 1, 2 of 3 did not come"):
        meet(0, "group-1", 0.0)
