"""Jobs with several optimizers and losses, and with sparse gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_jobs import train
from safetensors.torch import load_file

from thinwire.app.jobs.several import routed
from thinwire.app.records.run_record import RunRecord

MIN_MAX = """\
import torch
from torch import nn

def model():
    return nn.ModuleDict({"x": nn.Linear(1, 3, bias=False), "y": nn.Linear(3, 1, bias=False)})

def batches(share):
    while True:
        yield torch.randn(8, 1)

def loss(model, batch):
    worth = model["y"](torch.tanh(model["x"](batch))).mean()
    return [worth + model["x"].weight.square().sum(), model["y"].weight.square().sum() - worth]

def optimizer(model):
    return [torch.optim.SGD(model["x"].parameters(), lr=0.1), torch.optim.Adam(model["y"].parameters(), lr=0.1)]

def evaluate(model):
    return {"square": model["x"].weight.square().sum(), "largest": float(model["y"].weight.max())}
"""
SPARSE = """\
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(30, 4, sparse=%s), nn.Linear(4, 1))

def batches(share):
    while True:
        yield torch.randint(10, (8,))

def loss(model, batch):
    return (model(batch)[:, 0] - batch).square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""


def test_each_optimizer_descends_only_its_own_loss() -> None:
    """For example, a generator's loss passes through the discriminator and does not train it."""
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in (x, y)]
    worth = x * y
    shown = routed([worth.sum(), 5 * y.sum() - worth.sum()], optimizers)
    (shown / 2).backward()
    assert shown.item() == 6 and x.grad.item() == 3 / 2 and y.grad.item() == (5 - 2) / 2


@pytest.mark.parametrize("strategy", ["streaming_sign", "qsgd"])
def test_a_job_with_two_optimizers_trains(here: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "two.py").write_text(MIN_MAX)
    assert train("whole", "--steps", "12", "--strategy", strategy, job="two.py", small=[]) == 0
    summary = RunRecord.load("whole").summary
    assert list(summary.losses) == ["square", "largest"] and summary.losses["square"] == summary.eval_loss
    (here / "two.py").write_text(MIN_MAX[: MIN_MAX.index("def evaluate")] + f"# {strategy}\n")
    assert train("none", "--steps", "4", job="two.py") == 1
    assert "returns 2 losses, and no single number to compare runs; write evaluate(model)" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["diloco(every=4)", "data_parallel", "qsgd"])
def test_sparse_gradients_train_like_dense_ones(here: Path, strategy: str) -> None:
    for sparse in (True, False):
        (here / f"{sparse}.py").write_text(SPARSE % sparse)
        arguments = ["--steps", "9", "--clip", "0.5", "--strategy", strategy]
        assert train(str(sparse).lower(), *arguments, job=f"{sparse}.py", small=[]) == 0
    one, other = (load_file(f"{sparse}/model.safetensors") for sparse in ("true", "false"))
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in other)
