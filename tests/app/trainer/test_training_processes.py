"""Replicas that are processes: how they are ended, and what is reported of their failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from listening import addresses, tree
from small_runs import STEPS, events_of, model_of, run_in, small_run

from thinwire.app.cli import main
from thinwire.app.trainer import launch, run_folder, supervisor
from thinwire.app.trainer.run import Run
from thinwire.errors import LinkError

OWN = Path(__file__).parents[3] / "examples" / "own_pieces.py"


def test_only_the_cause_of_a_failure_is_reported_and_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, said in enumerate(["old\n", "old\n", "old\nLinkError: replica 0 is gone\n", "old\nDataError: no text\n"]):
        (tmp_path / f"logs/replica-{rank}.txt").write_text(said)
    words = {rank: launch.last_words(tmp_path / f"logs/replica-{rank}.txt", 4) for rank in range(4)}
    last = {rank: said or "it ended without a message" for rank, said in words.items()}
    told = launch.post_mortem({rank: last[rank] for rank in (0, 1, 2)}, [-9, -9, 1, 0], Run(), tmp_path)
    assert told.startswith(
        "replicas 0, 1 (killed by signal 9): it ended without a message\nAll that the replicas printed"
    )
    assert "resume" not in told  # there is no checkpoint to resume from
    for rank in range(4):
        assert "resume" not in launch.post_mortem({3: last[3]}, [0, 0, 0, 1], Run(), tmp_path)  # not all have one
        (tmp_path / f"checkpoints/replica-{rank}/step-00000005").mkdir(parents=True)
    assert launch.post_mortem({3: last[3]}, [0, 0, 0, 1], Run(), tmp_path).splitlines() == [
        "replica 3 (exit code 1): DataError: no text",
        f"All that the replicas printed is in {tmp_path / 'logs'}. To resume: thinwire resume {tmp_path}",
    ]


JOB = """\
import os, threading, time
from pathlib import Path
import torch

def model():
    return torch.nn.Linear(8, 1)

def batches(share):
    while True:
        yield torch.randn(4, 8)

def loss(model, batch):
    if threading.current_thread().name.startswith("replica-"):
        Path("began").touch()
    return model(batch).square().mean()
"""
SLOW = """
calls = []

def begun():
    calls.append(None)
    if len(calls) <= 200:  # of two replicas
        return False
    time.sleep(1.0)
    return True
"""
LATE = f"""\
{JOB}
def evaluate(model):
    if os.environ.get("RANK") == "1":
        while not Path("run/model.safetensors").exists():
            time.sleep(0.01)
        os._exit(5)
    return 0.0
"""


def test_a_run_that_has_ended_without_a_replica_is_not_to_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replica ends when the other one has written the model; `thinwire resume` would do nothing."""
    monkeypatch.chdir(tmp_path)
    Path("late.py").write_text(LATE)
    assert main(["train", "--job", "late.py", "--steps", "1", "--every", "1", "--delay", "0", "--out", "run"]) == 1
    told = capsys.readouterr().err
    assert "replica 1 (exit code 5)" in told and "The run has ended: its trained model is in run." in told
    assert "resume" not in told and any(Path("run/checkpoints/replica-1").glob("step-*"))


def processes_of(folder: Path) -> list[int]:
    """Returns the process ids of the replicas that `train_processes` started for `folder`."""
    listed = subprocess.run(
        ["pgrep", "-f", f"thinwire.app.trainer.supervisor {folder}"], capture_output=True, text=True, check=False
    )
    return [int(line) for line in listed.stdout.split()]


def wait_for_step(folder: Path, step: int) -> None:
    """Waits until both replicas have saved `step`."""
    for _ in range(12_000):
        if len(list(folder.glob(f"checkpoints/*/step-{step:08d}"))) == 2:
            return
        time.sleep(0.05)
    raise AssertionError(f"no checkpoint of step {step}")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (procps) is not installed")
def test_a_replica_killed_with_sigkill_is_named_and_the_run_resumes_exactly(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "killed"
    run = small_run(text, carrier="processes", steps=150)
    run_in(tmp_path / "whole", small_run(text, steps=150))
    outcome: list[BaseException] = []

    def train() -> None:
        try:
            run_in(folder, run)
        except LinkError as error:
            outcome.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    wait_for_step(folder, 10)
    killed = processes_of(folder)[1]
    os.kill(killed, signal.SIGKILL)
    thread.join(900)
    assert not thread.is_alive() and "thinwire resume" in str(outcome[0]) and "killed by signal 9" in str(outcome[0])
    run_in(folder, run, resume=True)
    assert events_of(folder, "resume")[-1]["from_step"] >= 10  # type: ignore[operator]
    assert model_of(folder) == model_of(tmp_path / "whole")


def test_a_hanging_replica_is_ended_and_the_error_of_its_peer_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The kill by the launcher itself must not be reported as the cause."""
    hangs = "import os, sys, time; rank = os.environ['RANK']; time.sleep(3600 * int(rank)); sys.exit('LinkError: 1 is late')"
    start, given = subprocess.Popen, []
    monkeypatch.setattr(supervisor, "_GRACE", 0.5)

    def instead(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return start([sys.executable, "-c", hangs], **options)

    monkeypatch.setattr(launch.subprocess, "Popen", instead)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    run_folder.new_folder(small_run(text), tmp_path / "run", resume=False)
    with pytest.raises(LinkError) as caught:
        supervisor.train_processes(small_run(text), tmp_path / "run", False, lambda: None)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "replica 1 did not end in 0.5 s and was killed",
        "replica 0 (exit code 1): LinkError: 1 is late",
    ]
    assert [(env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"]) for env in given] == [("3", "PASSIVE")] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    asked = launch.sharing_cores(2)
    assert (asked["OMP_NUM_THREADS"], asked["OMP_WAIT_POLICY"]) == ("5", "ACTIVE")


def test_a_run_that_goes_on_without_lost_replicas_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Replica 1 of two sites fails; replica 0 ends long after the time in which those of another method must end."""
    go, started, looks = tmp_path / "go", list[subprocess.Popen[bytes]](), [0]
    program = f"""
import os, sys, time
if os.environ["RANK"] == "1": sys.exit("LinkError: the server of this site is lost")
while not os.path.exists({str(go)!r}): time.sleep(0.01)
"""
    start = subprocess.Popen
    monkeypatch.setattr(supervisor, "_GRACE", 0.0)

    def instead(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(start([sys.executable, "-c", program], **options))
        return started[-1]

    def tick() -> None:
        looks[0] += len(started) == 2 and started[1].poll() is not None
        if looks[0] == 3:
            go.touch()

    monkeypatch.setattr(launch.subprocess, "Popen", instead)
    run = small_run(text, strategy="halos", delay=None)
    run_folder.new_folder(run, tmp_path / "run", resume=False)
    with pytest.raises(LinkError) as caught:
        supervisor.train_processes(run, tmp_path / "run", False, tick)
    assert str(caught.value).splitlines()[:2] == [
        "The run ended without lost replicas, on replica 0.",
        "replica 1 (exit code 1): LinkError: the server of this site is lost",
    ]


ENDS = """
import os, signal
from thinwire.app.trainer.launch import Stop, stopping


class Late:
    def __del__(self, kill=os.kill, own=os.getpid(), number=signal.SIGINT):
        kill(own, number)


late = Late()
with stopping(Stop(launched=True)):
    pass
"""


def test_a_signal_while_python_ends_does_not_end_a_replica() -> None:
    """Python has replaced its handlers by the default when it deletes modules. The exit code would be that of a replica that had not begun."""
    assert subprocess.run([sys.executable, "-c", ENDS]).returncode == 0


@pytest.fixture
def a_late_signal_is_harmless() -> Iterator[None]:
    """A SIGINT that comes when the command has ended is ignored, and so ends no other test."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("a_late_signal_is_harmless")
def test_ctrl_c_stops_cleanly_and_the_run_resumes_exactly(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replicas have sessions of their own, so a terminal's SIGINT reaches the command alone, which forwards it. A service manager
    signals all processes, so a replica may get two signals; it stops as after one. Threads resume the run to the model of
    uninterrupted threads. Each process finds the user's file, which holds a codec and an exchange, by its full path in the run file.
    """
    folder, listening = tmp_path / "stopped", set[str]()
    run = small_run(text).changed(codec=f"'{OWN}':Truncated(2)", exchange=f"'{OWN}':DirectBelow(1000)")
    run.changed(carrier="processes").save(tmp_path / "run.toml")

    def interrupt() -> None:
        wait_for_step(folder, 5)
        listening.update(addresses(*tree(os.getpid())))
        replicas = [one for one in tree(os.getpid()) if _is_replica(one)]
        assert len(replicas) == 2 and {os.getsid(one) for one in replicas} == set(replicas)
        for one in replicas:
            os.kill(one, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = main(["train", str(tmp_path / "run.toml"), "--out", str(folder), "--json"])
    thread.join()
    out, said = capsys.readouterr()
    assert listening == {"127.0.0.1"}, "nobody else's business"
    summary = json.loads(out.strip().splitlines()[-1])
    stopped = summary["steps"] < STEPS  # a fast machine may have finished before the signal
    assert code == (130 if stopped else 0), said
    if stopped:
        assert events_of(folder, "stop") and (folder / f"checkpoints/replica-1/step-{summary['steps']:08d}").is_dir()
        run_in(folder, Run.load(folder / "run.toml").changed(carrier="threads"), resume=True)
        assert events_of(folder, "resume")[-1]["from_step"] == summary["steps"]
    run_in(tmp_path / "whole", run)
    assert model_of(folder) == model_of(tmp_path / "whole")


def test_a_second_ctrl_c_ends_threads_within_a_step(tmp_path: Path) -> None:
    """All steps but the first ones have long micro-batches. Threads that were left running would abort the process."""
    (tmp_path / "endless.py").write_text(JOB.replace('"began").touch()', '"began").touch() if begun() else None'))
    with (tmp_path / "endless.py").open("a") as job:
        job.write(SLOW)
    given = ["--job", "endless.py", "--carrier", "threads", "--accumulate", "100", "--out", "run"]
    command = [sys.executable, "-m", "thinwire", "train", *given]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    while not (tmp_path / "began").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert any(launch.STOPPING in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "thinwire train: interrupted\n" and process.returncode == 130


def _is_replica(process: int) -> bool:
    return b"thinwire.app.trainer." in Path(f"/proc/{process}/cmdline").read_bytes()


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def _end_after_their_launcher(run: Run, folder: Path, awaited: Callable[[int], bool]) -> list[int]:
    """Kill the command that trains `run` when `awaited` is true of its process, and wait until all that it started have ended; returns them."""
    path = folder.with_suffix(".toml")
    run.save(path)
    command = [sys.executable, "-m", "thinwire", "train", str(path), "--out", str(folder)]
    launcher, others = subprocess.Popen(command, stdout=subprocess.DEVNULL), list[int]()
    try:
        while not awaited(launcher.pid):
            time.sleep(0.01)
        others = tree(launcher.pid)[1:]
        launcher.kill()
        launcher.wait()
        while any(map(_lives, others)):
            time.sleep(0.1)
    finally:
        for process in (launcher.pid, *others):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return others


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["processes", "elastic"])
def test_replicas_end_if_their_launcher_is_killed_before_they_begin(tmp_path: Path, text: str, carrier: str) -> None:
    """They load their modules meanwhile, and have another parent when they begin to watch for it."""
    run, folder = small_run(text, carrier=carrier, steps=1_000_000), tmp_path / "run"
    _end_after_their_launcher(run, folder, lambda launcher: sum(map(_is_replica, tree(launcher)[1:])) >= 2)
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"carrier": "processes"}, {"carrier": "secure"}, {"carrier": "secure", "exchange": 'Star("hub")'}], ids=str
)
def test_all_processes_end_if_their_launcher_is_killed_in_training(
    tmp_path: Path, text: str, more: dict[str, str]
) -> None:
    """Over the secure carrier the hub dies with it, so that the replicas cannot agree on a step any more; none waits for the time-out. A resume
    before they have ended names them.
    """
    run, folder = small_run(text, steps=1_000_000, **more), tmp_path / "run"

    def trains(launcher: int) -> bool:
        return len({path.parent for path in folder.glob("checkpoints/*/step-*")}) == 2

    assert len(_end_after_their_launcher(run, folder, trains)) == 2 + ("exchange" in more)


def test_a_refused_resume_names_the_process_that_holds_the_run(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command was killed, and a replica still lives."""
    folder = tmp_path / "run"
    run_in(folder, small_run(text, steps=6))
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    log = folder / "events/replica-0.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", hold, log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline()
        assert main(["resume", str(folder), "--steps", "12"]) != 0
        assert f"a run is active in {folder} (process {holder.pid}); wait" in capsys.readouterr().err
        holder.communicate("\n")
