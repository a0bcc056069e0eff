"""Faults around a training: damaged checkpoints, full disks, wrong settings and folders."""

from __future__ import annotations

import copy
import errno
import io
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from small_runs import cut_back, events_of, model_of, run_in, small_run

from thinwire import checkpoint
from thinwire.app.cli import capacity, main
from thinwire.app.records.events import EventLog
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer import export as stored
from thinwire.app.trainer import final, job, launch, run_folder, watch
from thinwire.app.trainer.place import Place, Stop
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.text_job import TextJob
from thinwire.checkpoint import read
from thinwire.comm import ThreadGroup, run_threads
from thinwire.errors import CheckpointError, ConfigurationError, DataError, DisagreementError


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
        raise OSError(errno.ENOSPC, "No space left on device")

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
        (RuntimeError("Some tensors share memory"), "The disk is not the cause: this state cannot be written"),
        (PermissionError(errno.EACCES, "Permission denied"), "not a lack of space: check that the folder"),
        (OSError(errno.EROFS, "Read-only file system"), "not a lack of space: check that the folder"),
    ],
)
def test_a_failed_save_is_reported_by_cause_and_fails_a_stop(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, refusal: Exception, says: str
) -> None:
    def refused(*arguments: object) -> None:
        raise copy.copy(refusal)  # its traceback would keep the run alive as long as pytest keeps the parameter

    monkeypatch.setattr("thinwire.checkpoint.save_file", refused)
    folder, run, asked = tmp_path / "run", small_run(text, steps=2000), Stop()
    asked.set()
    with pytest.raises(CheckpointError, match=says):
        run_threads(2, lambda group: launch.train_here(run, Place(group, folder, stop=asked)))
    warnings = [str(event["message"]) for event in events_of(folder, "warning")]
    assert warnings and all(says in warning and "free some space" not in warning for warning in warnings)
    assert events_of(folder, "stop") and events_of(folder, "end")


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_replica_that_cannot_save_says_how_long_the_run_can_resume(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """Replica 1 has the checkpoint of step 5 only. Replica 0 deletes that with its save number `keep` after it."""
    save_file, drop, saves, dropped = checkpoint.save_file, checkpoint.drop, list[Path](), dict[str, int]()

    def full(tensors: object, path: Path, metadata: object = None) -> None:
        if path.parts[-3] == "replica-1" and path.parts[-2] != ".step-00000005.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        if path.parts[-3] == "replica-0" and path.name == "model.safetensors":
            saves.append(path)
        save_file(tensors, path, metadata)

    def note(path: Path) -> None:
        dropped[path.name] = len(saves) - 1
        drop(path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    monkeypatch.setattr(checkpoint, "drop", note)
    run_in(tmp_path / "run", small_run(text, keep=keep))
    assert len(saves) == 5 and dropped["step-00000005"] == keep
    told = [str(event["message"]) for event in events_of(tmp_path / "run", "warning", replica=1)]
    for missed, message in enumerate(told, 1):
        left = keep - missed
        assert (f"until the others have saved {left} more checkpoint" in message) == (left > 0)
        assert ("have deleted step 5" in message) == (left <= 0)
    assert len(told) == 4 and not events_of(tmp_path / "run", "warning", replica=0)


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


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3}, {"seed": 1}, {"model": "tiny"}, {"tokenizer": "bpe:300"},
        {"batch": 2}, {"accumulate": 2}, {"sequence": 8},
    ],
)  # fmt: skip
def test_resuming_without_a_fitting_checkpoint_is_refused(whole: Path, text: str, change: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=f"begun with other settings: {next(iter(change))} "):
        run_folder.new_folder(small_run(text, **change), whole, resume=True)
    run_folder.new_folder(small_run(text, steps=99, link="5mbit", lr=1e-3), whole, resume=True)


def test_two_runs_cannot_share_a_folder(whole: Path, text: str) -> None:
    with EventLog(whole / "events/replica-0.jsonl"), pytest.raises(ConfigurationError, match="a run is active in"):
        run_folder.new_folder(small_run(text), whole, resume=True)
    run_folder.new_folder(small_run(text), whole, resume=True)


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


def test_a_model_that_the_run_folder_cannot_hold_is_saved_elsewhere(
    tmp_path: Path, whole: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the folder; if there is none, the checkpoint to resume from; it advises no resume that cannot work."""
    folder, save_file = tmp_path / "full [1]", stored.save_file

    def save(tensors: object, path: Path, *more: object) -> None:
        if folder in path.parents:
            raise SafetensorError("No space left on device (os error 28)")
        save_file(tensors, path, *more)

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(stored, "save_file", save)
    monkeypatch.setattr(final.tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(final.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(
        CheckpointError, match=r"cannot be written to .*No space left .*It is in .* instead: free .*not resume"
    ) as said:
        run_in(folder, small_run(text))
    (spare,) = (tmp_path / "tmp").iterdir()
    assert model_of(spare) == model_of(whole) and f"It is in {spare} instead" in str(said.value)
    assert final.of_full_disk(folder) == (
        f"The disk of {folder} is full. The trained model is in {spare}: {final._move(folder)}.",
        True,
    )
    shutil.rmtree(spare)
    assert final.of_full_disk(folder) == (f"The disk of {folder} is full. Free some space.", False)
    for says in (
        "then resume: the run goes on from the checkpoint of step 24",
        "no checkpoint either, so the training is lost",
    ):
        with pytest.raises(CheckpointError, match=says):
            final.store(small_run(text), _Unwritten(), torch.nn.Linear(1, 1), {}, folder, "replica-0", "")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    assert "there is no checkpoint" in final.of_full_disk(folder)[0] and not list((tmp_path / "tmp").iterdir())


class _Unwritten(TextJob):
    """A job whose model can be written nowhere."""

    def __init__(self) -> None: ...
    def keep(self, folder: Path, writer: str) -> None: ...

    def store(self, *arguments: object) -> None:
        raise CheckpointError("the disk is full.")


def test_a_disk_that_is_too_small_is_told_before_training(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = [700_000]
    monkeypatch.setattr(capacity.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    assert main(["train", "--text", text, "--model", "nano", "--out", str(tmp_path / "run")]) == 2
    assert "700 kB of the disk are free, and the trained model needs 723 kB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    run, free[0], out = small_run(text, keep=2), 12_000_000, io.StringIO()
    capacity.room_on_disk(run, job.check(run), 2, tmp_path / "run", Console(file=out))
    assert "needs 27.4 MB (predicted): 723 kB for the model" in out.getvalue()
    assert "for a checkpoint, of which 6 are there at once" in out.getvalue()
    assert "Free some space, or --keep fewer, or choose another --out." in " ".join(out.getvalue().split())
    (saved := tmp_path / "run/checkpoints/replica-0/step-00000001").mkdir(parents=True)
    (saved / "model.safetensors").write_bytes(bytes(500_000))
    capacity.room_on_disk(run, job.check(run), 2, tmp_path / "run", Console(file=out))
    assert "12.5 MB of the disk are free or have its checkpoints, and" in (told := " ".join(out.getvalue().split()))
    assert told.endswith("Free some space, or --keep fewer."), "a run that has begun stays in its folder"


def test_replicas_with_other_settings_are_named(tmp_path: Path, text: str) -> None:
    def train(group: ThreadGroup) -> object:
        run = small_run(text, lr=1e-3 if group.rank else 2e-3)
        return launch.train_here(run, Place(group, tmp_path / "run"))

    with pytest.raises(
        DisagreementError, match=r"replica 1 does not fit replica 0: lr: 0.001 there, 0.002 on replica 0"
    ):
        run_threads(2, train)


def test_a_model_of_another_size_is_named_before_the_learning_rate_that_follows_from_it(
    tmp_path: Path, text: str
) -> None:
    def train(group: ThreadGroup) -> object:
        run = small_run(text, model=("nano", "tiny")[group.rank])
        return launch.train_here(run, Place(group, tmp_path / "run"))

    with pytest.raises(DisagreementError, match="replica 1 does not fit replica 0: model: tiny there, nano on"):
        run_threads(2, train)


def test_a_run_that_was_refused_before_its_first_step_may_begin_again_in_its_folder(tmp_path: Path, text: str) -> None:
    rates = [2e-3, 1e-3]

    def train(group: ThreadGroup) -> object:
        run, folder = small_run(text, lr=rates[group.rank]), tmp_path / f"{group.rank}"
        run_folder.new_folder(run, folder, resume=False)
        return launch.train_here(run, Place(group, folder, alone=True))

    with pytest.raises(DisagreementError):
        run_threads(2, train)
    rates[1] = rates[0]
    run_threads(2, train)
    record = RunRecord.load(tmp_path / "1")
    assert record.status == "finished" and record.replicas[0].sessions == 1 and not record.notes
    with pytest.raises(ConfigurationError, match="holds a run already"):
        run_threads(2, train)


def test_a_run_whose_folder_cannot_be_written_is_not_resumed_elsewhere(whole: Path, text: str) -> None:
    (whole / ".run.toml").mkdir()  # of that name the run file of a resume is written first
    with pytest.raises(ConfigurationError, match=r"cannot be written \(Is a directory.*; check its permissions"):
        run_folder.new_folder(small_run(text), whole, resume=True)


def test_a_run_folder_is_never_overwritten(whole: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigurationError, match="holds a run already; choose another --out, or continue it with --resume"
    ):
        run_folder.new_folder(small_run(text), whole, resume=False)
    with pytest.raises(ConfigurationError, match="holds no run to resume"):
        run_folder.new_folder(small_run(text), tmp_path / "nothing", resume=True)
