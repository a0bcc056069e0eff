"""The language model's training, end to end, by replicas in threads: real text, real checkpoints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from small_runs import STEPS, cut_back, events_of, model_of, run_in, small_run
from torch import Tensor

from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.report.report import write_report
from thinwire.app.trainer import start
from thinwire.app.trainer.data import Corpus
from thinwire.checkpoint import read
from thinwire.comm import Link
from thinwire.lab.simulate.replicas import simulate
from thinwire.lab.simulate.scenario import Scenario


def test_training_learns_and_its_summary_adds_up(whole: Path) -> None:
    summary = events_of(whole, "end")[0]["summary"]
    losses = [event["loss"] for event in events_of(whole, "eval")]
    assert losses[-1] < losses[0] - 1  # type: ignore[operator]
    assert summary["tokens"] == 2 * STEPS * 16
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
    page = write_report([RunRecord.load(coded)], tmp_path / "report.html").read_text()
    assert "sizes depend on the values, and the most they can be was foreseen" in page


def test_figures_of_machines_that_are_slowed_down_are_emulated(tmp_path: Path, text: str) -> None:
    run_in(tmp_path / "slow", small_run(text, slow=(1.0, 1.5), steps=4))
    assert events_of(tmp_path / "slow", "end")[0]["summary"]["provenance"] == "emulated"  # type: ignore[index]


def test_an_emulated_link_changes_no_weight(whole: Path, tmp_path: Path, text: str) -> None:
    run_in(tmp_path / "linked", small_run(text, link="20mbit,5ms"))
    assert model_of(tmp_path / "linked") == model_of(whole)
    summary = events_of(tmp_path / "linked", "end")[0]["summary"]
    assert summary["provenance"] == "emulated"  # type: ignore[index]
    (packets,) = summary["ledger"]["sent"]["packet"].values()  # type: ignore[index]
    assert packets["transfer_seconds"] == pytest.approx(8 * packets["nbytes"] / 20e6 + 5e-3 * packets["messages"])


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


def test_a_resumed_run_whose_text_became_shorter_reads_no_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, windows = tmp_path / "text.txt", list[tuple[int, int]]()
    cut = Corpus.cut

    def noted(self: Corpus, which: NDArray[np.int64], sequence: int) -> tuple[Tensor, Tensor]:
        windows.append((int(which.max()), self.windows(sequence)))
        return cut(self, which, sequence)

    monkeypatch.setattr(Corpus, "cut", noted)
    text.write_text("thin wires carry packets\n" * 400)
    run = small_run(str(text), steps=6, strategy="diloco", every=2, delay=None)
    run_in(tmp_path / "run", run)
    text.write_text("thin wires carry packets\n" * 20)
    run_in(tmp_path / "run", run.changed(steps=12), resume=True)
    assert len({count for _, count in windows}) == 2 and all(last < count for last, count in windows)
    [warning] = events_of(tmp_path / "run", "warning")
    assert str(warning["message"]).startswith("the data have 29 samples, and had 593: a new epoch of them begins here")


def test_a_machine_without_git_trains(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a small container."""
    monkeypatch.setenv("PATH", str(tmp_path))
    run_in(tmp_path / "run", small_run(text, steps=2, replicas=1))
    [begun] = events_of(tmp_path / "run", "start")
    assert begun["machine"]["commit"] is None  # type: ignore[index]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_copy_in_the_repository_of_something_else_has_not_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    monkeypatch.setattr(start, "__file__", str(tmp_path / "environment/start.py"))
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/start.py").touch()
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    assert start.machine()["commit"] is None
    subprocess.run([*git, "add", "environment/start.py"], check=True)
    told = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    assert start.machine()["commit"] == told.stdout.strip()
