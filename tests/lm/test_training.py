"""The language model's training, end to end: real text, real checkpoints, threads and processes."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import addresses, tree
from safetensors import SafetensorError

from thinwire.checkpoint import read
from thinwire.comm import Link, ThreadGroup, run_threads
from thinwire.errors import CheckpointError, ConfigurationError, DataError, DisagreementError, LinkError
from thinwire.lm import export as stored
from thinwire.lm import job, launch, watch
from thinwire.lm.place import Place
from thinwire.lm.run import Run
from thinwire.records.events import EventLog, read_events
from thinwire.records.run_record import RunRecord
from thinwire.records.units import text_of_nbytes
from thinwire.report.report import write_report
from thinwire.simulate.replicas import simulate
from thinwire.simulate.scenario import Scenario

STEPS = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(600.0)
            assert not thread.is_alive(), thread


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    return str(file)


def small_run(text: str, **changes: object) -> Run:
    """Returns a run with rounds of both fragments in the air at most checkpoints: H = 6, τ = 4."""
    settings: dict[str, object] = dict(
        text=(text,), steps=STEPS, every=6, delay=4, batch=2, sequence=32, checkpoint_every=5, keep=9, eval_batches=2,
        carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | changes))  # type: ignore[arg-type]


def run_in(folder: Path, run: Run, resume: bool = False) -> None:
    launch.new_folder(run, folder, resume)
    if run.placement.carrier == "threads":
        launch.train_threads(run, folder, resume, lambda: None)
    else:
        launch.train_processes(run, folder, resume, lambda: None)


def model_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def events_of(folder: Path, kind: str, replica: int = 0) -> list[dict[str, object]]:
    return [event for event in read_events(folder / f"events/replica-{replica}.jsonl") if event["event"] == kind]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "whole"
    run_in(folder, small_run(text))
    return folder


@pytest.fixture
def whole(trained: Path, tmp_path: Path) -> Path:
    """A run that was never stopped; each test gets a copy."""
    return shutil.copytree(trained, tmp_path / "whole")


def cut_back(folder: Path, copy: Path, step: int) -> Path:
    """Reduces `folder` to what a kill right after `step` would have left."""
    shutil.copytree(folder, copy)
    (copy / "model.safetensors").unlink()
    for path in copy.glob("checkpoints/*/step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    return copy


def test_training_learns_and_its_summary_adds_up(whole: Path) -> None:
    summary = events_of(whole, "end")[0]["summary"]
    losses = [event["loss"] for event in events_of(whole, "eval")]
    assert losses[-1] < losses[0] - 1  # type: ignore[operator]
    assert summary["tokens"] == 2 * STEPS * 2 * 32
    packets = sum(event["nbytes"] for event in events_of(whole, "depart"))  # type: ignore[misc]
    assert packets <= summary["wire_bytes_sent"] < packets + 10_000  # the rest is the introduction
    assert summary["bits_per_parameter_per_step"] == 8 * summary["wire_bytes_sent"] / summary["parameters"] / STEPS
    assert 0 < summary["compute_utilization"] <= 1 and summary["provenance"] == "measured"
    counted = [count["nbytes"] for count in summary["ledger"]["sent"]["packet"].values()]
    assert sum(counted) == packets  # predicted = counted, to the byte


def test_every_replica_evaluates_the_same_anchors(whole: Path) -> None:
    first, second = (events_of(whole, "eval", replica) for replica in (0, 1))
    assert [event["loss"] for event in first] == [event["loss"] for event in second]


@pytest.mark.parametrize("step", [5, 10, 20])
def test_resume_equals_never_having_stopped(whole: Path, tmp_path: Path, text: str, step: int) -> None:
    folder = cut_back(whole, tmp_path / "resumed", step)
    flights = read(folder / f"checkpoints/replica-0/step-{step:08d}").manifest["facts"]["flights"]
    assert flights or step != 10  # the case that this test is about
    run_in(folder, small_run(text), resume=True)
    assert events_of(folder, "resume")[0]["from_step"] == step
    assert model_of(folder) == model_of(whole)


@pytest.mark.parametrize(
    "strategy",
    [
        *("data_parallel", "local_sgd(every=5)", "diloco(every=5)", "one_bit_adam(freeze=6)"),
        *("eager_diloco(every=6)", "co2(every=6)"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("dgc", "muloco(every=5)", "demo", "power_sgd", "ef21")
        ),
    ],
)
def test_resume_is_exact_for_every_recipe(tmp_path: Path, text: str, strategy: str) -> None:
    run = small_run(text, strategy=strategy, every=None, delay=None, checkpoint_every=8, steps=16)
    run_in(tmp_path / "whole", run)
    folder = cut_back(tmp_path / "whole", tmp_path / "resumed", 8)
    run_in(folder, run, resume=True)
    assert [event["from_step"] for event in events_of(folder, "resume")] == [8]
    assert model_of(folder) == model_of(tmp_path / "whole")
    for run_folder in (tmp_path / "whole", folder):
        saved = {path.name for path in run_folder.glob("checkpoints/replica-1/*")}
        assert saved == {"step-00000008", "step-00000016"} and not events_of(run_folder, "warning")


@pytest.mark.parametrize(("steps", "departs"), [(12, [6, 12]), (13, [6, 12, 13])])
def test_no_last_round_follows_a_scheduled_one_without_steps(
    tmp_path: Path, text: str, steps: int, departs: list[int]
) -> None:
    """The simulator's bytes equal those counted, and the last evaluation is of the final model."""
    run = small_run(text, strategy="diloco", delay=None, steps=steps, eval_every=6)
    run_in(tmp_path / "run", run)
    assert [event["step"] for event in events_of(tmp_path / "run", "depart")] == departs
    summary = events_of(tmp_path / "run", "end")[0]["summary"]
    (packets,) = summary["ledger"]["sent"]["packet"].values()  # type: ignore[index]
    strategy, numel = run.make_strategy(), summary["parameters"]  # type: ignore[index]
    foreseen = simulate(strategy, [numel], Scenario.alike(2, 0.1, Link(1e9)), steps)
    assert packets["nbytes"] == foreseen.nbytes_sent[0] == len(departs) * strategy.nbytes_per_period([numel], 2)


def test_an_entropy_stage_changes_bytes_only(tmp_path: Path, text: str) -> None:
    """The weights are the same, also after a resume with rounds in the air. Fewer bytes are sent than predicted, and the record has both."""
    whole = tmp_path / "whole"
    run_in(whole, small_run(text, strategy="streaming_diloco"))
    coded, killed = tmp_path / "coded", tmp_path / "killed"
    run_in(coded, small_run(text, strategy="streaming_diloco", codec="Entropy(E3M0(128))"))
    cut_back(coded, killed, 10)
    run_in(killed, small_run(text, strategy="streaming_diloco", codec="Entropy(E3M0(128))"), resume=True)
    assert model_of(coded) == model_of(killed) == model_of(whole)
    record = RunRecord.load(coded)
    [counted] = events_of(coded, "end")[0]["summary"]["ledger"]["sent"]["packet"].values()  # type: ignore[index]
    foreseen = sum(event["nbytes"] for event in events_of(coded, "depart"))  # type: ignore[misc]
    assert record.replicas[0].nbytes_sent == counted["nbytes"] < 0.95 * foreseen == 0.95 * record.replicas[0].foreseen
    assert ("foreseen at most", text_of_nbytes(record.summary.wire_bytes_foreseen)) in record.summary.figures()
    page = write_report([coded], tmp_path / "report.html").read_text()
    assert "the codec's sizes depend on the values, and the most they can be was foreseen" in page


def test_scarce_open_files_are_reported_before_they_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    limits = [(4, 5)]
    monkeypatch.setattr(watch.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(watch.resource, "setrlimit", lambda which, both: limits.append(both))
    run_in(tmp_path, small_run(text, replicas=1, steps=1))
    assert limits == [(4, 5), (5, 5)]
    (told,) = [event for event in events_of(tmp_path, "warning") if "files" in event["message"]]
    assert "of at most 5 files" in told["message"] and "thinwire doctor --firewall" in told["message"]


def test_an_emulated_link_changes_no_weight(whole: Path, tmp_path: Path, text: str) -> None:
    run_in(tmp_path / "linked", small_run(text, link="20mbit,5ms"))
    assert model_of(tmp_path / "linked") == model_of(whole)
    summary = events_of(tmp_path / "linked", "end")[0]["summary"]
    assert summary["provenance"] == "emulated"  # type: ignore[index]
    (packets,) = summary["ledger"]["sent"]["packet"].values()  # type: ignore[index]
    assert packets["transfer_seconds"] == pytest.approx(8 * packets["nbytes"] / 20e6 + 5e-3 * packets["messages"])


def test_a_damaged_checkpoint_is_skipped_by_name(whole: Path, tmp_path: Path, text: str) -> None:
    folder = cut_back(whole, tmp_path / "damaged", 15)
    file = folder / "checkpoints/replica-1/step-00000015/outer.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    run_in(folder, small_run(text), resume=True)
    resumed = events_of(folder, "resume", replica=1)[0]
    assert resumed["from_step"] == 10 and "outer.safetensors" in resumed["skipped"][0]["reason"]  # type: ignore[index]
    assert "another replica" in events_of(folder, "resume", replica=0)[0]["skipped"][0]["reason"]  # type: ignore[index]
    assert model_of(folder) == model_of(whole)


@pytest.mark.parametrize("damage", ["empty manifest", "missing file", "truncated file", "no manifest"])
def test_every_kind_of_checkpoint_damage_is_found(whole: Path, damage: str) -> None:
    path = whole / "checkpoints/replica-0/step-00000005"
    file = path / "inner.safetensors"
    match damage:
        case "empty manifest":
            (path / "manifest.json").write_text("")
        case "no manifest":
            (path / "manifest.json").unlink()
        case "missing file":
            file.unlink()
        case "truncated file":
            os.truncate(file, 100)
    with pytest.raises(CheckpointError, match="is damaged"):
        read(path)


def test_a_full_disk_loses_a_checkpoint_only(
    whole: Path, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("thinwire.checkpoint.save_file", full)
    run_in(tmp_path / "full", small_run(text))
    monkeypatch.undo()
    assert model_of(tmp_path / "full") == model_of(whole)
    warnings = [str(event["message"]) for event in events_of(tmp_path / "full", "warning")]
    assert "No space left" in warnings[0] and "free some space" in warnings[0]
    assert not list((tmp_path / "full").glob("checkpoints/*/*"))


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (RuntimeError("Some tensors share memory"), "not the disk's fault: this state cannot be written"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "not for want of space: see that the folder"),
        (OSError(errno.EROFS, "Read-only file system"), "not for want of space: see that the folder"),
    ],
)
def test_a_failed_save_is_reported_by_cause_and_fails_a_stop(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, refusal: Exception, says: str
) -> None:
    def refused(*arguments: object) -> None:
        raise copy.copy(refusal)  # its traceback would keep the run alive as long as pytest keeps the parameter

    monkeypatch.setattr("thinwire.checkpoint.save_file", refused)
    folder, run, asked = tmp_path / "run", small_run(text, steps=2000), threading.Event()
    asked.set()
    with pytest.raises(CheckpointError, match=says):
        run_threads(2, lambda group: launch.train_here(run, Place(group, folder, stop=asked)))
    warnings = [str(event["message"]) for event in events_of(folder, "warning")]
    assert warnings and all(says in warning and "free some space" not in warning for warning in warnings)
    assert events_of(folder, "stop") and events_of(folder, "end")


def test_only_the_last_checkpoints_are_kept(tmp_path: Path, text: str) -> None:
    run_in(tmp_path / "run", small_run(text, checkpoint_every=4, keep=2))
    names = sorted(path.name for path in (tmp_path / "run/checkpoints/replica-1").iterdir())
    assert names == ["step-00000020", "step-00000024"]


def test_a_short_run_leaves_a_checkpoint_to_train_longer_from(tmp_path: Path, text: str) -> None:
    run = small_run(text, checkpoint_every=100)
    run_in(tmp_path / "run", run)
    run_in(tmp_path / "run", run.changed(steps=STEPS + 3), resume=True)
    assert [event["from_step"] for event in events_of(tmp_path / "run", "resume")] == [STEPS]
    assert events_of(tmp_path / "run", "step")[-1]["step"] == STEPS + 3


def test_resuming_with_another_strategy_is_refused(whole: Path, tmp_path: Path, text: str) -> None:
    folder = cut_back(whole, tmp_path / "other", 15)
    other = small_run(text, every=8)
    with pytest.raises(
        ConfigurationError, match=r"strategy .*every=6.* there, .*every=8.* given. Resume with the run's own"
    ):
        run_in(folder, other, resume=True)
    assert Run.load(folder / "run.toml") == small_run(text)  # a later resume reads this
    with pytest.raises(CheckpointError, match="resume with the run's own strategy"):
        launch.train_threads(other, folder, True, lambda: None)


@pytest.mark.parametrize("change", [{"replicas": 3}, {"seed": 1}, {"model": "nano"}, {"tokenizer": "bpe:300"}])
def test_resuming_without_a_fitting_checkpoint_is_refused(whole: Path, text: str, change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"begun with other settings: {next(iter(change))} "):
        launch.new_folder(small_run(text, **change), whole, resume=True)
    launch.new_folder(small_run(text, steps=99, link="5mbit", lr=1e-3), whole, resume=True)


def test_two_runs_cannot_share_a_folder(whole: Path, text: str) -> None:
    with EventLog(whole / "events/replica-0.jsonl"), pytest.raises(ConfigurationError, match="a run is active in"):
        launch.new_folder(small_run(text), whole, resume=True)
    launch.new_folder(small_run(text), whole, resume=True)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "huge"}, ConfigurationError, "model='huge'"),
        ({"tokenizer": "words"}, ConfigurationError, "tokenizer='words'"),
        ({"fragments": 99}, ConfigurationError, "fragments=99 for a model of"),
        ({"offsets": (1,)}, ConfigurationError, "give one offset a fragment"),
        ({"sequence": 50_000}, DataError, "each needs a window of 50000 tokens"),
        ({"sequence": 9_000}, DataError, "held-out tokens"),
    ],
)
def test_invalid_settings_are_refused_before_a_replica_starts(
    text: str, change: dict[str, object], error: type[Exception], says: str
) -> None:
    job.check(small_run(text))
    with pytest.raises(error, match=says):
        job.check(small_run(text, **change))


def test_a_final_model_that_cannot_be_saved_is_named(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*No space left .*Free some space"):
        run_in(tmp_path / "full", small_run(text))


def test_only_the_cause_of_a_failure_is_reported_and_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, said in enumerate(["old\n", "old\n", "old\nLinkError: replica 0 is gone\n", "old\nDataError: no text\n"]):
        (tmp_path / f"logs/replica-{rank}.txt").write_text(said)
    last = {rank: launch._last_words(tmp_path / f"logs/replica-{rank}.txt", 4) for rank in range(4)}
    told = launch._post_mortem({rank: last[rank] for rank in (0, 1, 2)}, [-9, -9, 1, 0], tmp_path)
    assert told.startswith(
        "replicas 0, 1 (killed by signal 9): it ended without a message\nAll that the replicas printed"
    )
    assert "resume" not in told  # there is no checkpoint to resume from
    (tmp_path / "checkpoints/replica-0/step-00000005").mkdir(parents=True)
    assert launch._post_mortem({3: last[3]}, [0, 0, 0, 1], tmp_path).splitlines() == [
        "replica 3 (exit code 1): DataError: no text",
        f"All that the replicas printed is in {tmp_path / 'logs'}. `thinwire resume {tmp_path}` continues from the last checkpoint.",
    ]


def test_replicas_with_other_settings_are_named(tmp_path: Path, text: str) -> None:
    def train(group: ThreadGroup) -> object:
        run = small_run(text, lr=1e-3 if group.rank else 2e-3)
        return launch.train_here(run, Place(group, tmp_path / "run"))

    with pytest.raises(
        DisagreementError, match=r"replica 1 does not fit replica 0: lr: 0.001 there, 0.002 on replica 0"
    ):
        run_threads(2, train)


def test_a_run_folder_is_never_overwritten(whole: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="holds a run already; choose another --out, or continue it with --resume"
    ):
        launch.new_folder(small_run(text), whole, resume=False)
    with pytest.raises(ConfigurationError, match="holds no run to resume"):
        launch.new_folder(small_run(text), tmp_path / "nothing", resume=True)


def processes_of(folder: Path) -> list[int]:
    """Returns the process ids of the replicas that `train_processes` started for `folder`."""
    listed = subprocess.run(
        ["pgrep", "-f", f"thinwire.lm.launch {folder}"], capture_output=True, text=True, check=False
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
    monkeypatch.setattr(launch, "_GRACE", 0.5)

    def instead(_: list[str], **options: Any) -> subprocess.Popen[bytes]:
        given.append(options["env"])
        return start([sys.executable, "-c", hangs], **options)

    monkeypatch.setattr(launch.subprocess, "Popen", instead)
    monkeypatch.setattr(launch.os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    launch.new_folder(small_run(text), tmp_path / "run", resume=False)
    with pytest.raises(LinkError) as caught:
        launch.train_processes(small_run(text), tmp_path / "run", False, lambda: None)
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


def test_ctrl_c_stops_cleanly_and_the_run_resumes_exactly(whole: Path, tmp_path: Path, text: str) -> None:
    """SIGINT goes to the whole process group, as from a terminal. Threads resume the run to the model of uninterrupted threads."""
    folder = tmp_path / "stopped"
    command = [sys.executable, "-m", "thinwire", "train", str(tmp_path / "run.toml"), "--out", str(folder), "--json"]
    run = small_run(text, carrier="processes")
    run.save(tmp_path / "run.toml")
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_step(folder, 5)
    assert set(addresses(*tree(process.pid))) == {"127.0.0.1"}, "nobody else's business"
    os.killpg(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=900)
    summary = json.loads(out.decode().strip().splitlines()[-1])
    stopped = summary["steps"] < STEPS  # a fast machine may have finished before the signal
    assert process.returncode == (130 if stopped else 0), said.decode()
    if stopped:
        assert events_of(folder, "stop") and (folder / f"checkpoints/replica-1/step-{summary['steps']:08d}").is_dir()
        run_in(folder, Run.load(folder / "run.toml").changed(carrier="threads"), resume=True)
        assert events_of(folder, "resume")[-1]["from_step"] == summary["steps"]
    assert model_of(folder) == model_of(whole)


@pytest.mark.slow
def test_repeated_ctrl_c_stops_thread_replicas_cleanly(tmp_path: Path, text: str) -> None:
    """Threads cannot be killed, and leaving them running would abort the process."""
    folder = tmp_path / "stopped"
    small_run(text, steps=3000).save(tmp_path / "run.toml")
    command = [sys.executable, "-m", "thinwire", "train", str(tmp_path / "run.toml"), "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_step(folder, 5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 130, said.decode()
    assert events_of(folder, "stop") and events_of(folder, "end")
