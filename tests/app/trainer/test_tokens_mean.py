"""Micro-batches and replicas with different numbers of tokens: the gradient is that of the mean over all tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from thinwire.app.cli import main
from thinwire.app.jobs.own import OwnJob

SIZES = ((3, 40, 17, 5, 11, 2), (31, 1, 4, 50, 6, 23))  # tokens of each micro-batch, of each replica
STEPS, RATE = 3, 0.3

JOB = """
import torch
from torch import nn

SIZES = {sizes}

def model():
    return nn.Linear(3, 1)

def points(replica, micro):
    generator = torch.Generator().manual_seed(100 * replica + micro)
    x = torch.randn(SIZES[replica][micro], 3, generator=generator)
    return x, x.sum(1, keepdim=True) * (1 + micro) + replica  # what few tokens say differs from what many say

def batches(share):
    micro = 0
    while True:
        yield points(share.index % 2, micro % 6)
        micro += 1

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr={rate})

def loss(model, batch):
    x, y = batch
    squares = (model(x) - y).square()
    return {returned}

def evaluate(model):
    return 1.0
"""
SUM, MEAN = "(squares.sum(), len(x))", "squares.mean()"


def trained(returned: str, *options: str) -> torch.Tensor:
    """Returns the weights after three steps of two micro-batches with `thinwire train`."""
    job = Path(f"job{len(list(Path().iterdir()))}.py")
    job.write_text(JOB.format(sizes=SIZES, rate=RATE, returned=returned))
    out = job.stem
    run = [
        "train",
        "--job",
        str(job),
        "--steps",
        str(STEPS),
        "--accumulate",
        "2",
        "--clip",
        "0",
        "--carrier",
        "threads",
    ]
    assert main([*run, "--out", out, *options]) == 0
    return torch.cat([value.flatten() for _, value in sorted(load_file(f"{out}/model.safetensors").items())])


def alone(replicas: tuple[int, ...]) -> torch.Tensor:
    """Trains one process with all tokens of these replicas in one batch."""
    names: dict[str, object] = {}
    exec(JOB.format(sizes=SIZES, rate=RATE, returned=MEAN), names)
    Path("alone.py").write_text(JOB.format(sizes=SIZES, rate=RATE, returned=MEAN))
    model = OwnJob("alone.py", 0).make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        parts = [names["points"](replica, 2 * step + micro) for replica in replicas for micro in range(2)]  # type: ignore[operator]
        x, y = (torch.cat(of) for of in zip(*parts))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.detach().flatten() for _, value in sorted(model.state_dict().items())])


def test_gradients_are_the_mean_over_all_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both, one = alone((0, 1)), alone((0,))
    parallel = ["--strategy", "data_parallel", "--replicas", "2"]
    assert torch.allclose(trained(SUM, *parallel), both, atol=1e-5)
    # The bias: a token counts more if its micro-batch has fewer.
    assert (trained(MEAN, *parallel) - both).abs().max() > 0.1
    single = ["--strategy", "local_sgd(every=3)", "--replicas", "1"]
    assert torch.allclose(trained(SUM, *single), one, atol=1e-5)
    assert (trained(MEAN, *single) - one).abs().max() > 0.1


def test_an_invalid_token_count_names_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong in ("(squares.sum(), 0)", "(squares.sum(), 'ten')", "(squares.sum(), 1e13)"):
        Path("job.py").write_text(JOB.format(sizes=SIZES, rate=RATE, returned=wrong))
        assert main(["train", "--job", "job.py", "--out", "run"]) == 1
        assert "a number of tokens above 0" in capsys.readouterr().err
