"""Replicas with different models, through the path of the public command: trained, resumed, and each exported separately."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
from run_folders import read_events
from safetensors.torch import load_file

from thinwire.app.cli import main
from thinwire.app.cli.summary import summary_of
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.report import write_report
from thinwire.app.trainer import launch, run_folder, supervisor
from thinwire.app.trainer.job import check
from thinwire.app.trainer.resuming import complete
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.trained import trained_model
from thinwire.errors import ConfigurationError

TALK = "codistill(every=3, delay=2, probe=32, warmup=2, top=4)"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}: {i * i % 97} unlike models say {i % 13} words\n" for i in range(2000)))
    return str(file)


def run_of(text: str, **changes: object) -> Run:
    settings: dict[str, object] = dict(
        text=(text,), strategy=TALK, models=("nano", "tiny"), steps=8, batch=2, sequence=16, checkpoint_every=4, keep=9,
        eval_batches=1, eval_every=8, carrier="threads", timeout=600.0,
    )  # fmt: skip
    return Run.of(**(settings | changes))  # type: ignore[arg-type]


def run_in(folder: Path, run: Run, resume: bool = False) -> Path:
    run = run.absolute()
    run_folder.new_folder(run, folder, resume)
    if run.placement.carrier == "threads":
        launch.train_threads(run, folder, resume, lambda: None)
    else:
        supervisor.train_processes(run, folder, resume, lambda: None)
    return folder


def models_in(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("models/*/model.safetensors"))]


def test_a_run_names_each_model_and_is_resumed_bit_for_bit(tmp_path: Path, text: str) -> None:
    run = run_of(text)
    assert sum(p.numel() for p in check(run).parameters()) == 492_640  # of the largest model
    whole, copy = run_in(tmp_path / "whole", run), tmp_path / "copy"
    record = RunRecord.load(whole)
    losses = summary_of(record)["losses"]
    assert list(losses) == ["replica-0 (nano)", "replica-1 (tiny)"] and len(set(losses.values())) == 2
    assert [what for what, _ in record.summary.figures()][:2] == [f"evaluation: {name}" for name in losses]
    assert record.summary.eval_loss == pytest.approx(sum(losses.values()) / 2) and not record.remarks
    assert record.replicas[0].start.parameters < record.replicas[1].start.parameters
    method = run.make_method()
    assert method
    bound = sum(method.nbytes_per_period(0, 2, period=period) for period in range(2))
    for replica in record.replicas:
        sent = replica.end["ledger"]["sent"]["packet"] if replica.end else {}
        assert 2 * 48 < sum(count["nbytes"] for count in sent.values()) < replica.foreseen == bound
    assert write_report([RunRecord.load(whole)], whole / "report.html").stat().st_size > 10_000 and complete(run, whole)

    of_each = [trained_model(whole / "models" / f"replica-{rank}") for rank in (0, 1)]
    assert [one.spec.model for one in of_each] == ["nano", "tiny"]
    with pytest.raises(
        ConfigurationError, match=r"holds a model of each replica: give one of .*replica-0, .*replica-1"
    ):
        trained_model(whole)

    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "models")
    for path in copy.glob("checkpoints/*/step-00000008"):
        shutil.rmtree(path)
    assert load_file(copy / "checkpoints/replica-0/step-00000004/outer.safetensors").keys() == {"flying"}
    run_in(copy, run, resume=True)
    resumed = [e["from_step"] for e in read_events(copy / "events/replica-1.jsonl") if e["event"] == "resume"]
    assert resumed == [4] and models_in(copy) == models_in(whole)


def test_one_replica_trains_as_its_model_alone(tmp_path: Path, text: str) -> None:
    one = run_in(tmp_path / "one", run_of(text, models=(), model="nano", replicas=1))
    other = run_in(tmp_path / "alone", run_of(text, models=(), model="nano", replicas=1, strategy="local_sgd"))
    weights = [load_file(one / "models/replica-0/model.safetensors"), load_file(other / "model.safetensors")]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[1])


def test_unlike_models_without_common_predictions_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match="whose replicas hold one model; choose --strategy codistill"):
        run_of(text, strategy="diloco")
    with pytest.raises(ConfigurationError, match="one for each is needed; give --replicas 3"):
        run_of(text, models=("nano", "tiny", "mini"))
    with pytest.raises(ConfigurationError, match="give one of them"):
        run_of(text, model="nano")
    with pytest.raises(ConfigurationError, match=r"32 positions of a step need .* write codistill\(probe=24\)"):
        check(run_of(text, sequence=24))
    with pytest.raises(ConfigurationError, match="top=256 of 256 tokens"):
        check(run_of(text, strategy="codistill(probe=32, top=256)"))
    first = run_in(tmp_path / "first", run_of(text, models=(), model="nano", replicas=1, steps=1, tokenizer="bpe:300"))
    stored = str(first / "models/replica-0/model.safetensors")
    with pytest.raises(ConfigurationError, match=r"different tokenizers \(.*model.safetensors bpe-.*, nano bytes"):
        check(run_of(text, models=(stored, "nano")))
    check(run_of(text, models=(stored, stored)))


@pytest.mark.slow
def test_the_carrier_changes_no_model(tmp_path: Path, text: str) -> None:
    found = [
        models_in(run_in(tmp_path / carrier, run_of(text, carrier=carrier)))
        for carrier in ("threads", "processes", "secure")
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


def test_a_comparison_with_one_model_shows_each_loss_under_its_name(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--model", "nano", "--steps", "8", "--batch", "2", "--sequence", "16", "--eval-batches", "1"]
    asked = ["--strategies", "diloco(every=4)", TALK, "--text", text, "--carrier", "threads", *small]
    capsys.readouterr()
    assert main(["compare", *asked, "--out", str(tmp_path / "two"), "--json"]) == 0
    said = capsys.readouterr()
    one, unlike = json.loads(said.out)["strategies"]
    rows = [line for line in said.err.splitlines() if "measured" in line and "step " not in line]
    assert [row["eval_loss"] for row in (one, unlike)] == pytest.approx(
        [one["eval_losses"][0], statistics.fmean(unlike["losses"].values())]
    )
    told = [[f"{loss:.4f}" for loss in (row["eval_loss"], *row["losses"].values())] for row in (one, unlike)]
    assert len(told[1]) == 3 and all(loss in row for row, losses in zip(rows, told, strict=True) for loss in losses)
    head = next(line for line in said.err.splitlines() if line.startswith("strategy"))
    assert head.index("evaluation loss") < head.index("replica-0 (nano)") < head.index("replica-1 (nano)")
