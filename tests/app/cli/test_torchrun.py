"""The same run file under torchrun: replicas of one process, and replicas of two (FSDP2)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import read_events
from safetensors.torch import load_file

from thinwire.app.cli import main
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.run import Run

OWN = Path(__file__).parents[3] / "examples" / "own_pieces.py"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    file = tmp_path / "run.toml"
    Run.of(
        model="nano",
        text=(str(text),),
        steps=12,
        every=4,
        delay=2,
        batch=2,
        sequence=32,
        eval_batches=2,
        checkpoint_every=5,
    ).save(file)
    return file


def torchrun(processes: int, *arguments: str) -> dict[str, object]:
    """The summary that `thinwire train --json` prints last, from `processes` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, "-m", "thinwire", "train", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return summary


@pytest.mark.slow
def test_torchrun_gives_the_bytes_of_a_run_in_threads(run_file: Path, tmp_path: Path) -> None:
    """A codec and an exchange are of a user's own file, which each process finds by its full path in the run file. Processes that the
    command starts get the same environment: tests/app/trainer/test_training_processes.py.
    """
    own = {"codec": f"'{OWN}':Truncated(2)", "exchange": f"'{OWN}':DirectBelow(1000)"}
    Run.load(run_file).changed(**own).save(run_file)
    summary = torchrun(2, str(run_file), "--out", str(tmp_path / "torchrun"))
    assert summary["steps"] == 12 and summary["replicas"] == 2
    threads = Run.load(run_file).changed(carrier="threads")
    run_folder.new_folder(threads, tmp_path / "own", resume=False)
    launch.train_threads(threads, tmp_path / "own", False, lambda: None)
    assert (tmp_path / "torchrun/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()


@pytest.mark.slow
def test_replicas_of_two_ranks_train_the_same_model(run_file: Path, tmp_path: Path) -> None:
    """2 replicas of 2 shards against 2 of 1: the same sums in another order."""
    torchrun(2, str(run_file), "--out", str(tmp_path / "whole"), "--codec", "Identity")
    summary = torchrun(4, str(run_file), "--out", str(tmp_path / "sharded"), "--codec", "Identity")
    assert summary["replicas"] == 2
    for replica in range(2):
        whole = losses(tmp_path / f"whole/events/replica-{replica}.jsonl")
        halves = [losses(tmp_path / f"sharded/events/replica-{replica}.shard-{shard}.jsonl") for shard in range(2)]
        assert [sum(pair) / 2 for pair in zip(*halves)] == pytest.approx(whole, rel=1e-3)
    exported = load_file(tmp_path / "sharded/model.safetensors")
    assert {n: t.shape for n, t in load_file(tmp_path / "whole/model.safetensors").items()} == {
        n: t.shape for n, t in exported.items()
    }


@pytest.mark.parametrize(
    ("held", "world", "here"),
    [
        ("replica-0.shard-0", 2, "and replica-0 would"),
        ("replica-0", 4, "and replica-0.shard-0 would"),
        ("replica-0.shard-0", 0, "and replicas of one rank would"),
    ],
)
def test_a_resume_with_another_number_of_ranks_is_refused_at_once(
    run_file: Path, tmp_path: Path, held: str, world: int, here: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without torchrun (a world of 0) the command starts replicas of one rank."""
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "events" / f"{held}.jsonl").touch()
    run_file.rename(folder / "run.toml")
    if world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    assert main(["train", "--resume", "--out", str(folder), "--timeout", "1"]) == 2
    said = capsys.readouterr().err
    assert f"holds a run of {held}, {here} resume it; start as many ranks" in said
    assert [path.stem for path in folder.glob("events/*")] == [held]


def test_a_rank_that_is_signalled_twice_stops_as_after_once(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch system signals all processes of a job, and torchrun its ranks again."""
    stopped: list[bool] = []

    def train(run: Run, folder: Path, resume: bool, stop: launch.Stop) -> dict[str, bool]:
        with launch.stopping(stop):
            stop.heed()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            stopped.append(stop.is_set())  # and writes a checkpoint
        return {"stopped": True}

    monkeypatch.setattr(launch, "train_as_rank", train)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert main(["train", str(run_file), "--out", str(tmp_path / "run")]) == 143 and stopped == [True]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def losses(events: Path) -> list[float]:
    return [event["loss"] for event in read_events(events) if event["event"] == "step"]


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "tcp://10.96.0.1:29500"}, "MASTER_PORT='tcp://10.96.0.1:29500' in"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29999999"}, "MASTER_PORT='29999999' in"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29 500"}, "MASTER_PORT='29 500' in"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "tcp://10.96.0.1:29500"}, "MASTER_ADDR='tcp://10.96.0.1:29500' in"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.96.0.1:29500"}, "MASTER_ADDR='10.96.0.1:29500' in"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 and WORLD_SIZE=2 in"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0' in"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "WORLD_SIZE=3, 3 processes for 2 replicas"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' in"),
    ],
)  # fmt: skip
def test_variables_that_no_rank_can_have_are_named(
    variables: dict[str, str], says: str, run_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(run_file), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert says in said and "unset RANK and WORLD_SIZE" in said and said.count("\n") == 1


def test_empty_variables_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.setenv(name, " " * name.startswith("MASTER"))
    assert launch.torchrun_place() is None and launch.local_rank() == 0 and launch.master() == ("127.0.0.1", 29500)


JOB = """
import os
import torch
from torch import nn
from pathlib import Path

def model():
    return nn.Linear(8, 1)

def batches(share):
    while True:
        x = torch.randn(4, 8)
        yield x, x.sum(1, keepdim=True)

def loss(model, batch):
    killed = Path(__file__).with_name("killed")
    saved = Path(__file__).with_name("run") / "checkpoints/replica-1/SAVED"
    if saved.exists() and os.environ["RANK"] == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["step-00000010", "."], ids=["after a checkpoint", "before the first one"])
def test_the_same_torchrun_command_continues_after_a_kill(saved: str, tmp_path: Path) -> None:
    """Without --resume an attempt that torchrun starts again continues, and does not take over an older run; with it so does the command."""
    job, run = tmp_path / "job.py", tmp_path / "run"
    job.write_text(
        JOB.replace("checkpoints/replica-1/SAVED", f"checkpoints/replica-1/{saved}" if saved != "." else ".")
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [
        "-m",
        "thinwire",
        "train",
        "--job",
        str(job),
        "--steps",
        "40",
        "--checkpoint-every",
        "10",
        "--out",
        str(run),
    ]

    def done(*more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, *more], capture_output=True, text=True, timeout=900, check=False, env=environment
        )

    first = done()
    assert first.returncode == 0, first.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    resumed = [event for event in read_events(run / "events/replica-0.jsonl") if event["event"] == "resume"]
    assert bool(resumed) == (saved != ".")
    again = done()
    assert again.returncode and "holds a run already" in again.stderr and "resume: from" not in again.stdout
    assert done("--resume", "--steps", "50").returncode == 0
