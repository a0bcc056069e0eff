"""A job for Thinwire: what is trained, and on what. It runs as it is:

    thinwire train --job my_job.py --steps 200

Three functions are needed: model(), batches(share) and loss(model, batch); three more may be there: optimizer(model),
evaluate(model) and collate(samples). `thinwire docs jobs` says the rest.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from thinwire.jobs.base import Share

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """The model. What it draws is the same on every replica, and follows from --seed."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def batches(share: "Share") -> Iterator[Batch]:
    """What one replica trains on: part `share.index` of `share.count`, in an order that follows from `share.seed`.

    A generator must go on for ever. What can be iterated again, such as a DataLoader, is begun again for every epoch. With
    state_dict and load_state_dict (torchdata's StatefulDataLoader) a resume goes on at once; else what was read is read again.
    """
    points, arms = spirals(3000)
    own = torch.arange(share.index, len(points), share.count)  # every replica has points of its own
    while True:
        order = own[torch.randperm(len(own))]
        for first in range(0, len(order), 64):
            rows = order[first : first + 64]
            yield points[rows], arms[rows]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """What is made smaller: a scalar. The batch is on the model's device."""
    points, arms = batch
    return nn.functional.cross_entropy(model(points), arms)


def evaluate(model: nn.Module) -> float:
    """By what runs are compared, the lower the better. Without it: the loss of batches in another order."""
    points, arms = spirals(600, seed=1)
    here = next(model.parameters()).device
    return nn.functional.cross_entropy(model(points.to(here)), arms.to(here)).item()


# def optimizer(model: nn.Module) -> torch.optim.Optimizer:
#     """Without it: AdamW with warm-up and cosine, and --optimizer, --lr, --warmup and --weight-decay. With it, its rates stay."""
#     return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def spirals(count: int, seed: int = 0) -> Batch:
    """Points on three arms of a spiral, and the arm of each: put your own data here."""
    generator = torch.Generator().manual_seed(seed)
    along, noise = torch.rand(count, generator=generator), torch.randn(count, generator=generator)
    arms = torch.randint(3, (count,), generator=generator)
    angle = 4 * along + arms * 2.094 + 0.1 * noise
    return torch.stack([along * angle.cos(), along * angle.sin()], 1), arms
