"""`--batch 4 2 1`: replicas with micro-batches of different sizes train one model, and every sample counts alike."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.run import Run
from thinwire.data_ledger import LanesReader

JOB = """
import torch
from torch import nn

VALUES = torch.arange(7.0)  # their mean is 3

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

def model():
    return Mean()

def batches(share):
    for index in share.sampler(len(VALUES)):
        yield VALUES[index]

def collate(samples):
    return torch.stack(samples)

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)

def loss(model, batch):
    return 0.5 * (model.value - batch).square().mean()

def evaluate(model):
    return float((model.value - 3.0).square())
"""
Capture = pytest.CaptureFixture[str]
TEXT = "".join(f"line {i}: {i * i % 97} thin\n" for i in range(400))
SMALL = ["--model", "nano", "--sequence", "64", "--eval-batches", "1", "--carrier", "threads", "--text", "text.txt"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("text.txt").write_text(TEXT)
    return tmp_path


def mean_of(out: str, *options: str) -> float:
    """Trains one step on all seven samples: 4, 2 and 1 on three replicas. Returns the model, which is a mean of them."""
    job = ["train", "--job", "job.py", "--steps", "1", "--clip", "0", "--carrier", "threads", "--replicas", "3"]
    assert main([*job, "--batch", "4", "2", "1", "--out", out, *options]) == 0
    return float(load_file(f"{out}/model.safetensors")["value"])


@pytest.mark.parametrize("strategy", ["local_sgd(every=1)", "data_parallel"])
def test_every_sample_counts_alike(strategy: str, capsys: Capture) -> None:
    assert mean_of("run", "--strategy", strategy) == pytest.approx(3.0, abs=1e-5)
    told = "the weight of a delta is its number of tokens, because micro-batches differ; --weigh alike: all weigh 1"
    assert (told in capsys.readouterr().out) == strategy.startswith("local_sgd")
    record = RunRecord.load(Path("run"))
    assert [int(one.tokens.sum()) for one in record.replicas] == [4, 2, 1] and record.summary.tokens == 7


SITES = "halos(sites=(2, 1), every=1, outer_lr=1.0, outer_momentum=0.0, global_lr=1.0, global_momentum=0.0, codec=Identity(), slow=(1, 1, 1))"


@pytest.mark.parametrize(
    ("strategy", "weights"),
    [
        ("decoupled_diloco(every=1, codec=Identity(), slow=(1, 1, 1))", [4**2, 2**2, 1]),
        (SITES, [18 * 16 / 20, 18 * 4 / 20, 1]),  # the first site: 6 tokens in 2 steps, so 6²/2
    ],
    ids=["decoupled_diloco", "halos"],
)
def test_replicas_of_unequal_speed_weigh_by_tokens_and_tokens_a_step(strategy: str, weights: list[float]) -> None:
    """AdamW's first step has the length of the rate; the replica with four samples goes down, the others go up."""
    job = JOB.replace(
        "0.5 * (model.value - batch).square().mean()", "(model.value * (1 if len(batch) == 4 else -1)).sum()"
    )
    Path("job.py").write_text(job.replace("def optimizer", "def another"))
    rate = 0.05  # 5 % of the peak, at the last step
    options = ["--lr", "1", "--warmup", "0", "--weight-decay", "0", "--strategy", strategy]
    assert mean_of("run", *options) == pytest.approx(rate * (1 - 2 * weights[0] / sum(weights)), rel=1e-4)
    assert RunRecord.load(Path("run")).summary.tokens == 7


def test_without_weights_the_result_is_the_mean_of_three_means() -> None:
    alike = mean_of("alike", "--strategy", "local_sgd(every=1)", "--weigh", "alike")
    assert abs(alike - 3.0) > 0.01 and Run.load(Path("alike/run.toml")).data.batch == (4, 2, 1)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The windows of every micro-batch that is read from now on, with its number."""
    read, lock, micro_batch = list[tuple[int, list[int]]](), threading.Lock(), LanesReader.micro_batch

    def note(self: LanesReader, micro: int, number: int) -> Any:
        samples = micro_batch(self, micro, number)
        with lock:
            read.append((micro, samples.tolist()))
        return samples

    monkeypatch.setattr(LanesReader, "micro_batch", note)
    return read


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    method = ["--strategy", "streaming_sign", "--every", "3", "--delay", "1", "--replicas", "2", "--batch", "2", "1"]
    begin = ["train", *SMALL, *method, "--checkpoint-every", "4", "--lr", "0.01", "--warmup", "0"]
    assert main([*begin, "--steps", "8", "--out", "whole"]) == 0
    assert main([*begin, "--steps", "8", "--out", "again"]) == 0
    for rank in range(2):
        newest = sorted(Path(f"again/checkpoints/replica-{rank}").iterdir())
        assert [one.name for one in newest][-2:] == ["step-00000004", "step-00000008"]
        for one in newest[-1].iterdir():
            one.unlink()
        newest[-1].rmdir()
    Path("again/model.safetensors").unlink()
    assert main(["resume", "again"]) == 0
    whole, again = (load_file(f"{out}/model.safetensors") for out in ("whole", "again"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    record = RunRecord.load(Path("whole"))
    assert record.summary.tokens == 8 * 3 * 64


def test_other_numbers_of_replicas_read_each_window_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    read = noted(monkeypatch)
    begin = ["train", *SMALL, "--strategy", "diloco", "--every", "2", "--checkpoint-every", "50"]
    windows: list[list[int]] = []
    for command in (
        [*begin, "--replicas", "3", "--batch", "2", "1", "1", "--steps", "6", "--out", "run"],
        ["resume", "run", "--replicas", "2", "--batch", "2", "1", "--steps", "8"],
        ["resume", "run", "--replicas", "4", "--batch", "4", "2", "2", "2", "--steps", "11"],
    ):
        assert main(command) == 0
        windows.append([window for _, micro_batch in read for window in micro_batch])
        read.clear()
    assert [len(one) for one in windows] == [6 * 4, 2 * 3, 3 * 10]
    trained = Counter(window for session in windows for window in session)
    assert set(trained.values()) == {1}, "a window was read again before the end of the epoch"


REFUSED = {
    "batch=[4, 2] with replicas=3: one number for each is needed": ["--batch", "4", "2", "--replicas", "3"],
    "micro-batches differ in a fixed group only": ["--batch", "4", "2", "--carrier", "elastic"],
    "scaffold, which does not weigh replicas": ["--batch", "4", "2", "--strategy", "scaffold"],
    "which is not a mean: deltas cannot be weighed": ["--batch", "4", "2", "--aggregate", "Median()"],
    "whose rule weighs neighbours: deltas cannot": ["--batch", "4", "2", "--strategy", "noloco"],
    "batch=(4, 0): at least 1 is needed": ["--batch", "4", "0"],
}


@pytest.mark.parametrize(("told", "options"), [(told, options) for told, options in REFUSED.items()])
def test_what_cannot_weigh_is_refused(told: str, options: list[str], capsys: Capture) -> None:
    assert main(["train", *SMALL, "--steps", "1", "--out", "run", *options]) in (1, 2)
    assert told in " ".join(capsys.readouterr().err.split()) and not Path("run").exists()


def test_a_job_that_makes_its_own_batches_is_refused(capsys: Capture) -> None:
    Path("job.py").write_text(JOB.replace("def collate", "def another"))
    assert main(["train", "--job", "job.py", "--batch", "4", "2", "--steps", "1", "--out", "run"]) == 2
    assert "makes its own batches; write collate(samples)" in capsys.readouterr().err
