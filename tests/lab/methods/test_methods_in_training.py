"""`thinwire train` with methods that have their own training loop: folders, events, resumes and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from loops import METHODS
from run_folders import read_events

from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.report import write_report
from thinwire.app.trainer import launch, run_folder, supervisor
from thinwire.app.trainer.job import check
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError

SETTINGS: dict[str, dict[str, object]] = {
    "just_one_byte": {"strategy": "just_one_byte(samples=1)", "lr": 1e-3},
    "fedavg": {"every": 3, "lr": 0.1},
    "scaffold": {"every": 3, "lr": 0.1},
    "scallion": {"every": 3, "lr": 0.1},
    "scafcom": {"every": 3, "lr": 0.1},
    "flasc": {"strategy": "flasc(every=3, down=1)", "lr": 0.1},  # without LoRA only down=1 trains
}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    return str(file)


def run_of(text: str, strategy: str, **changes: object) -> Run:
    settings: dict[str, object] = dict(
        text=(text,), strategy=strategy, steps=7, model="nano", batch=2, sequence=16, checkpoint_every=3, keep=9,
        eval_batches=2, carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | SETTINGS[strategy] | changes))  # type: ignore[arg-type]


def run_in(folder: Path, run: Run, resume: bool = False) -> dict[str, Any]:
    check(run)
    run_folder.new_folder(run, folder, resume)
    if run.placement.carrier == "threads":
        launch.train_threads(run, folder, resume, lambda: None)
    else:
        supervisor.train_processes(run, folder, resume, lambda: None)
    return summary_of(folder)


def summary_of(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The summary in a replica's last `end` event."""
    events = list(read_events(folder / f"events/replica-{rank}.jsonl"))
    return next(event["summary"] for event in reversed(events) if event["event"] == "end")


def test_every_method_has_settings_here():
    assert set(SETTINGS) == set(METHODS)


@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(tmp_path: Path, text: str, strategy: str) -> None:
    run = run_of(text, strategy)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    summary = run_in(whole, run)
    method = run.make_method()
    assert method
    for rank in (0, 1):
        end = summary_of(whole, rank)
        packets = sum(count["nbytes"] for count in end["ledger"]["sent"]["packet"].values())
        periods = range(-(-run.optimizer.steps // method.every))
        assert packets == sum(method.nbytes_per_period(end["parameters"], 2, rank, period) for period in periods) > 0
    assert summary["provenance"] == "measured" and 0 < summary["compute_utilization"] <= 1
    assert write_report([RunRecord.load(whole)], whole / "report.html").stat().st_size > 10_000
    shutil.copytree(whole, copy)
    (copy / "model.safetensors").unlink()
    for path in copy.glob("checkpoints/*/step-*"):
        if int(path.name[5:]) > 3:
            shutil.rmtree(path)
    run_in(copy, run, resume=True)
    for rank in (0, 1):
        events = read_events(copy / f"events/replica-{rank}.jsonl")
        assert [event["from_step"] for event in events if event["event"] == "resume"] == [3]
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (whole / "model.safetensors").read_bytes()


def test_only_the_hub_evaluates_p_before_the_end(tmp_path: Path, text: str) -> None:
    run_in(tmp_path / "run", run_of(text, "flasc"))
    logs = [list(read_events(tmp_path / f"run/events/replica-{rank}.jsonl")) for rank in (0, 1)]
    hub, other = ([(e["step"], e["of"], e["loss"]) for e in log if e["event"] == "eval"] for log in logs)
    assert {of for _, of, _ in hub} == {"anchors"} and [of for _, of, _ in other] == ["start"] * 6 + ["anchors"]
    assert hub[-1] == other[-1] and hub[0] != other[0]
    record = RunRecord.load(tmp_path / "run")
    assert list(record.evaluations.loss) == [loss for _, _, loss in hub]
    assert [len(replica.evaluations.loss) for replica in record.replicas] == [7, 1]


def test_replicas_that_are_not_sampled_are_idle(tmp_path: Path, text: str) -> None:
    """They read no batch, and a report can be written of the run."""
    run = run_of(text, "fedavg", steps=12).changed(every=None, strategy="fedavg(every=2, sampled=1)")
    summary = run_in(tmp_path / "run", run)
    events = [list(read_events(tmp_path / f"run/events/replica-{rank}.jsonl")) for rank in (0, 1)]
    steps = [[event for event in its if event["event"] == "step"] for its in events]
    idle = [[event["step"] for event in its if event["loss"] != event["loss"]] for its in steps]
    assert sorted(idle[0] + idle[1]) == list(range(1, 13)) and idle[0] and idle[1]
    assert not any(event["tokens"] for its in steps for event in its if event["loss"] != event["loss"])
    assert summary["tokens"] == 12 * 2 * 16 and sum(e["tokens"] for its in steps for e in its) == 12 * 2 * 16
    assert write_report([RunRecord.load(tmp_path / "run")], tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SETTINGS)
def test_processes_train_the_bytes_of_threads(tmp_path: Path, text: str, strategy: str) -> None:
    run = run_of(text, strategy)
    run_in(tmp_path / "threads", run)
    run_in(tmp_path / "processes", run.changed(carrier="processes"))
    models = [(tmp_path / carrier / "model.safetensors").read_bytes() for carrier in ("threads", "processes")]
    assert models[0] == models[1]


def test_a_trained_model_can_be_trained_further(tmp_path: Path, text: str) -> None:
    first = run_of(text, "just_one_byte", steps=2)
    ended = run_in(tmp_path / "first", first)
    second = first.changed(model=str(tmp_path / "first" / "model.safetensors"), lr=1e-12, seed=5)
    assert abs(run_in(tmp_path / "second", second)["eval_loss"] - ended["eval_loss"]) < 1e-5


def test_invalid_runs_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="its samples are its micro-batches"):
        check(run_of(text, "just_one_byte", accumulate=2))
    with pytest.raises(ConfigurationError, match="sampled=3 of 2"):
        check(run_of(text, "fedavg").changed(every=None, strategy="fedavg(sampled=3)"))
    with pytest.raises(ConfigurationError, match=r"flasc\(every=3\) without lora: .* add --lora 8, or flasc\(down=1\)"):
        check(run_of(text, "flasc").changed(strategy="flasc", every=3))
    with pytest.raises(ConfigurationError, match=r"privacy=.* with flasc"):
        Run.of(strategy="flasc", privacy="Privacy()")
    with pytest.raises(ConfigurationError, match="carrier='elastic': a method with its own loop trains in a fixed"):
        Run.of(strategy="flasc", carrier="elastic")
    with pytest.raises(ConfigurationError, match=r"keep=3 with checkpoint_every=3 .* give --keep 5"):
        check(run_of(text, "fedavg").changed(every=None, strategy="fedavg(every=10, sampled=1)", keep=3))
    with pytest.raises(ConfigurationError, match="just_one_byte takes no every"):
        Run.of(strategy="just_one_byte", every=4)
    assert Run.of(strategy="just_one_byte(samples=9)").make_method().samples == 9  # type: ignore[union-attr]
