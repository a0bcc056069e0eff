"""What the command says about a run that has diverged, and where its time, its samples and its evaluations went."""

import json
import math
import time

import pytest

from thinwire.app.cli import main
from thinwire.app.records.losses import outcome
from thinwire.app.records.replica_record import Evaluations, smoothed
from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.replica_progress import ReplicaProgress
from thinwire.app.trainer.settings import DataSpec

np = pytest.importorskip("numpy")


def train(folder, *options):
    text = folder.parent / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    size = [
        "--model",
        "nano",
        "--carrier",
        "threads",
        "--replicas",
        "2",
        "--batch",
        "2",
        "--sequence",
        "16",
        "--checkpoint-every",
        "5",
    ]
    code = main(["train", "--out", str(folder), "--text", str(text), *size, *options])
    return code, json.loads((folder / "summary.json").read_text())


def evaluations(*losses, first=1):
    steps = np.arange(first, first + len(losses))
    return Evaluations(steps, steps * 1.0, steps, np.array(losses))


@pytest.mark.parametrize("lr", ["1e9", "300"])
def test_a_run_that_diverged_says_so(tmp_path, capfd, lr):
    code, summary = train(tmp_path / "run", "--steps", "12", "--lr", lr)
    assert code == 3 and summary["status"].startswith(("diverged", "no result"))
    assert summary["score"]["value"] == 0
    capfd.readouterr()
    main(["sample", str(tmp_path / "run"), "--tokens", "1"])
    assert "diverged" in capfd.readouterr().err


def test_time_and_samples_close(tmp_path):
    began = time.time()
    code, summary = train(tmp_path / "run", "--steps", "10")
    lasted = time.time() - began
    assert code == 0 and summary["status"] == "finished"
    record = RunRecord.load(tmp_path / "run")
    of_a_replica = max(replica.time["elapsed"] for replica in record.replicas)
    assert of_a_replica < summary["time"]["elapsed"] <= lasted  # of the command
    assert record.summary.time == summary["time"]
    assert math.isclose(summary["time"]["stalled"], summary["stall_seconds"])
    parts = dict(summary["time"])
    elapsed = parts.pop("elapsed")
    assert set(parts) == {"start", "training", "stalled", "evaluation", "saving", "end"}
    assert math.isclose(sum(parts.values()), elapsed) and min(parts.values()) >= 0
    assert parts["evaluation"] > 0 and parts["saving"] > 0
    assert summary["samples_trained"] + summary["samples_lost"] + summary["samples_in_flight"] == 40
    assert summary["samples_waiting"] > 0


@pytest.mark.parametrize(
    ("loss", "seen", "skipped", "diverged"),
    [
        (5.0, evaluations(5.0), 0.0, False),
        (7.0, evaluations(7.0), 0.0, True),
        (3.0, evaluations(0.2, 3.0), 0.0, True),
        (2.5, evaluations(2.4, 2.5, first=0), 0.0, True),
        (1e-9, evaluations(1.0, 1e-11, 1e-9), 0.0, False),
        (5.5, evaluations(5.5), 0.9, True),
    ],
)
def test_what_diverged_means(loss, seen, skipped, diverged):
    assert outcome("finished", loss, seen, math.log(256), skipped).startswith("diverged") == diverged
    assert outcome("stopped: why", loss, seen, math.log(256), skipped) == "stopped: why"


@pytest.mark.parametrize(
    ("loss", "trained", "diverged"),
    [
        (2e18, [(1.2, 9e17)], True),
        (2e18, [(1.2, 0.4)], False),  # the evaluation has a scale of its own
        (0.4, [(1e-9, 0.3)], False),  # policies that were equal
        (0.4, [], False),
        (0.4, [(1.2, 2e9)], True),  # an error rate that is no better than at first
        (0.1, [(1.2, 2e9)], False),
    ],
)
def test_a_job_of_ones_own_is_judged_by_its_first_step(loss, trained, diverged):
    """Nobody knows the loss of its untrained model."""
    told = outcome("finished", loss, evaluations(0.2 if loss < 1 else loss / 2, loss), math.nan, 0.0, trained)
    assert told.startswith("diverged") == diverged


def test_no_older_loss_stands_for_one_that_is_nan():
    shown = ReplicaProgress()
    for step, loss in enumerate((2.0, math.nan), 1):
        shown.take({"event": "step", "step": step, "loss": loss, "begin": 0.0, "compute_seconds": 1.0, "tokens": 1})
    assert math.isnan(shown.loss) and math.isnan(smoothed([2.0, math.nan])[-1])


@pytest.mark.parametrize("steps", [1, 3, 24, 100, 800, 10000])
@pytest.mark.parametrize("batch", [1, 8])
def test_evaluation_is_at_most_a_tenth_of_the_work_by_default(steps, batch):
    every, batches = DataSpec(batch=batch).evaluations(steps)
    count = -(-steps // every)
    assert batches >= 1
    assert count * batches == 1 or 8 * count * batches <= 0.3 * steps * batch
    assert DataSpec(eval_every=3, eval_batches=5).evaluations(steps) == (3, 5)
