"""`thinwire train --elastic` and related commands: real processes, killed and interrupted from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from listening import addresses
from run_folders import read_events

from thinwire.app.records.run_record import RunRecord
from thinwire.membership.channel import secret_in
from thinwire.membership.lighthouse import Lighthouse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (procps) is not installed"),
]
PATIENCE = 1200.0  # seconds after which a test counts as hung
NAMES = ["replica-0", "replica-1", "replica-2"]

Train = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Runs `thinwire train` on a small model with more options; its output goes to FOLDER.txt. At the end it is killed with its replicas."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(4000)))
    small = [
        "--text",
        str(text),
        "--model",
        "nano",
        "--batch",
        "2",
        "--sequence",
        "64",
        "--every",
        "20",
        "--delay",
        "4",
    ]
    running = []

    def start(folder: Path, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "thinwire", "train", *small, *options, "--out", str(folder)]
        with folder.with_suffix(".txt").open("a") as out:
            running.append(subprocess.Popen(command, stdout=out, stderr=out, text=True, cwd=tmp_path))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
    for number in replicas_of(tmp_path):
        os.kill(number, signal.SIGKILL)


def replicas_of(folder: Path, name: str = "") -> list[int]:
    """Returns the process ids of the replicas in `folder`."""
    listed = subprocess.run(
        ["pgrep", "-f", f"thinwire.app.trainer.supervisor {folder}.*{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [int(line) for line in listed.stdout.split()]


def until(true: Callable[[], object], folder: Path) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < PATIENCE, folder.with_suffix(".txt").read_text()
        time.sleep(0.05)


def saved(folder: Path, name: str) -> int:
    """Returns the step of the newest checkpoint."""
    return max((int(path.name[5:]) for path in folder.glob(f"checkpoints/{name}/step-*")), default=0)


def ends(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    """Returns the last event of each replica."""
    last = [read_events(folder / f"events/{name}.jsonl")[-1] for name in names]
    assert all(event["event"] == "end" for event in last), folder.with_suffix(".txt").read_text()
    return [event["summary"] for event in last]


def test_a_replica_killed_with_sigkill_is_restarted_and_all_models_are_equal(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = train(folder, "--elastic", "--replicas", "3", "--steps", "2500", "--checkpoint-every", "100")
    until(lambda: saved(folder, "replica-1") >= 200, folder)
    assert set(addresses(command.pid, *replicas_of(folder))) == {"127.0.0.1"}
    (victim,) = replicas_of(folder, "replica-1")
    os.kill(victim, signal.SIGKILL)
    assert command.wait(PATIENCE) == 0
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    said = folder.with_suffix(".txt").read_text()
    assert "replica-1 died at step" in said and "SIGKILL" in said and "replica-1 is started again" in said, said
    assert "replica-1 is back at step" in said and "3 of 3 are there" in said, said
    assert len({end["weights"] for end in ends(folder, NAMES)}) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 2500
    assert 2.0 < summary["living"] < 3.0 and 1.5 < summary["taking_part"] <= 3.0
    numbers = {
        event["round"]
        for name in NAMES
        for event in read_events(folder / f"events/{name}.jsonl")
        if event["event"] == "round" and event["committed"] and event["fragment"] >= 0
    }
    assert summary["rounds_committed"] == len(numbers) > 20
    record = RunRecord.load(folder)
    assert [replica.sessions for replica in record.replicas] == [1, 2, 1]
    assert {"away", "left", "joined", "back"} <= {note.kind for note in record.notes}
    page = (folder / "report.html").read_text()
    assert "not living" in page and "taking part" in page


def test_replicas_killed_together_resume_from_their_checkpoints(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = train(folder, "--elastic", "--replicas", "2", "--steps", "1200", "--checkpoint-every", "100")
    until(lambda: min(saved(folder, name) for name in NAMES[:2]) >= 200, folder)
    for number in [command.pid, *replicas_of(folder)]:
        os.kill(number, signal.SIGKILL)
    command.wait()
    assert not (folder / "model.safetensors").exists()
    assert train(folder, "--resume").wait(PATIENCE) == 0, folder.with_suffix(".txt").read_text()
    assert len({end["weights"] for end in ends(folder, NAMES[:2])}) == 1
    for name in NAMES[:2]:
        (back,) = [event for event in read_events(folder / f"events/{name}.jsonl") if event["event"] == "back"]
        assert back["round"] > 0 and back["step"] >= 200 and back["path"].startswith(f"checkpoints/{name}/step-")
        assert (
            f"{name} is back at step {back['step']}, from round {back['round']}"
            in folder.with_suffix(".txt").read_text()
        )


def test_ctrl_c_leaves_a_checkpoint_of_every_replica(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = train(folder, "--elastic", "--steps", "100000", "--checkpoint-every", "0")
    logs = [folder / f"events/{name}.jsonl" for name in NAMES[:2]]
    until(lambda: all(log.exists() and '"event":"step"' in log.read_text() for log in logs), folder)
    for number in replicas_of(folder):  # as a service manager does, which signals all processes
        os.kill(number, signal.SIGTERM)
    command.send_signal(signal.SIGINT)
    assert command.wait(PATIENCE) == 130
    said = folder.with_suffix(".txt").read_text()
    assert "each replica ends its inner step and leaves a checkpoint" in said and "to resume: thinwire resume " in said
    assert all(end["stopped"] and saved(folder, name) > 0 for name, end in zip(NAMES, ends(folder, NAMES[:2])))
    assert not replicas_of(folder)


def test_replicas_of_two_commands_train_together_and_strangers_are_refused(train: Train, tmp_path: Path) -> None:
    """One stranger belongs to another run, and one has no secret."""
    lighthouse = Lighthouse("127.0.0.1", 0, secret=secret_in(tmp_path / "secret", make=True))
    try:
        here = ["--steps", "2500", "--lighthouse", lighthouse.address, "--secret", str(tmp_path / "secret"), "--name"]
        two = {name: train(tmp_path / name, *here, name) for name in ("oslo", "paris")}
        stranger = train(tmp_path / "rome", "--seed", "7", *here, "rome")
        without = train(tmp_path / "oslo2", "--timeout", "5", *here[:4], "--name", "oslo2")
        assert without.wait(PATIENCE) == 1
        assert "another run secret, or none" in (tmp_path / "oslo2.txt").read_text()
        assert stranger.wait(PATIENCE) == 1
        assert "seed: 7 there, 0 at '" in (tmp_path / "rome.txt").read_text()
        assert [command.wait(PATIENCE) for command in two.values()] == [0, 0]
    finally:
        lighthouse.close()
    oslo, paris = (ends(tmp_path / name, [name])[0] for name in two)
    assert oslo["weights"] == paris["weights"]
    assert (tmp_path / "oslo/model.safetensors").read_bytes() == (tmp_path / "paris/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "oslo/summary.json").read_text())["living"] == pytest.approx(2.0, abs=0.3)


def stopped(folder: Path, name: str) -> int:
    """Freezes the replica and returns its process id."""
    (number,) = replicas_of(folder, name)
    os.kill(number, signal.SIGSTOP)
    return number


def logged(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    path = folder / f"events/{name}.jsonl"
    return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []


def test_a_replica_frozen_past_the_end_takes_the_final_model_or_reports_an_error(train: Train, tmp_path: Path) -> None:
    """oslo keeps the final state for paris and rome. paris thaws in time, rome after it is no longer kept."""
    lighthouse = Lighthouse("127.0.0.1", 0)
    try:
        here = [
            "--replicas",
            "4",
            "--steps",
            "800",
            "--checkpoint-every",
            "50",
            "--lighthouse",
            lighthouse.address,
            "--name",
        ]
        names = ["berne", "oslo", "paris", "rome"]
        folders = {name: tmp_path / name for name in names}
        runs = {name: train(folders[name], *here, name) for name in names}
        begun = []
        for name in names:  # they train together, however long each takes to start
            until(lambda name=name: logged(folders[name], name, "start"), folders[name])  # type: ignore[misc]
            begun.append(stopped(folders[name], name))
        for number in begun:
            os.kill(number, signal.SIGCONT)
        frozen = {}
        for name in ("paris", "rome"):
            until(
                # without a checkpoint it would not know at its resume which run it was in
                lambda name=name: (
                    saved(folders[name], name)
                    and any(e["members"] == names for e in logged(folders[name], name, "round"))
                ),
                folders[name],
            )  # type: ignore[misc]
            frozen[name] = stopped(folders[name], name)
        until(lambda: logged(folders["berne"], "berne", "end"), folders["berne"])
        assert logged(folders["berne"], "berne", "keeps")[0]["late"] == ["paris", "rome"]
        assert runs["oslo"].wait(PATIENCE) == 0
        os.kill(frozen["paris"], signal.SIGCONT)
        assert runs["paris"].wait(PATIENCE) == 0, folders["paris"].with_suffix(".txt").read_text()
        assert runs["berne"].poll() is None
        runs["berne"].send_signal(signal.SIGINT)
        assert runs["berne"].wait(PATIENCE) == 0
        os.kill(frozen["rome"], signal.SIGCONT)
        assert runs["rome"].wait(PATIENCE) == 1
        again = train(folders["rome"], "--resume", *here, "rome")
        assert again.wait(PATIENCE) == 1
    finally:
        lighthouse.close()
    model = (folders["berne"] / "model.safetensors").read_bytes()
    assert all((folders[name] / "model.safetensors").read_bytes() == model for name in ("oslo", "paris"))
    assert not list(folders["rome"].glob("*.safetensors"))
    *_, last = folders["rome"].with_suffix(".txt").read_text().strip().splitlines()
    assert "EndedError: the run has ended without replica 'rome'" in last, last
    assert "keeps the final weights for paris, rome" in folders["berne"].with_suffix(".txt").read_text()
    retries = [event["reason"] for event in logged(folders["rome"], "rome", "retry")]
    assert not any("no other replica called" in reason for reason in retries), retries


def test_one_machine_waits_for_a_frozen_replica_for_a_bounded_time(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = train(folder, "--elastic", "--replicas", "3", "--steps", "300", "--timeout", "5")
    until(lambda: len(logged(folder, "replica-2", "round")) >= 6, folder)
    stopped(folder, "replica-2")
    assert command.wait(PATIENCE) == 0, folder.with_suffix(".txt").read_text()
    said = folder.with_suffix(".txt").read_text()
    assert "replica-0 has finished, and keeps the final weights for replica-2: 5.0 s at most" in said, said
    assert "replica-2 was silent for 5 s, and the others have finished: it is ended" in said, said
    assert (folder / "model.safetensors").exists() and not replicas_of(folder)
