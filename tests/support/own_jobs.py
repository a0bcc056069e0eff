"""Two jobs of a user, and small runs that train them; the fixture `here` of tests/app/jobs writes their files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord

JOB = '''\
"""Points on a plane, and which side of a line they lie on."""
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

class Points:
    """Saves itself, as torchdata's loaders do."""
    def __init__(self, share):
        self.share, self.generator = share, torch.Generator().manual_seed(share.seed % 2**63 + share.index)
    def __iter__(self):
        return self
    def __next__(self):
        x = torch.randn(8, 4, generator=self.generator)
        return {"x": x, "y": (x.sum(1) > 0).long()}
    def state_dict(self):
        return {"generator": self.generator.get_state()}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

def batches(share):
    return Points(share)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def evaluate(model):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
'''
# A job without a state of its own, with samples to collate and its own optimizer.
PLAIN = """\
import torch
from torch import nn

def model():
    return nn.Linear(4, 1)

def batches(share):
    while True:
        x = torch.randn(4)
        yield x, x.sum()

def collate(samples):
    x, y = zip(*samples)
    return torch.stack(x), torch.stack(y)

def loss(model, batch):
    x, y = batch
    return (model(x)[:, 0] - y).square().mean()

def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
"""
SMALL = ["--every", "4", "--delay", "2", "--checkpoint-every", "5", "--keep", "9", "--eval-every", "6"]


def train(out: str, *arguments: str, job: str = "job.py", small: Sequence[str] = SMALL) -> int:
    return main(["train", "--job", job, "--out", out, *small, "--carrier", "threads", *arguments])


def weights(out: str) -> bytes:
    return (Path(out) / "model.safetensors").read_bytes()


def last_losses(out: str) -> list[float]:
    return [float(replica.loss[-1]) for replica in RunRecord.load(out).replicas]


def drop_checkpoints(out: str, after: int) -> None:
    for path in Path(out).glob("checkpoints/*/step-*"):
        if path.name > f"step-{after:08d}":
            shutil.rmtree(path)
    (Path(out) / "model.safetensors").unlink()
