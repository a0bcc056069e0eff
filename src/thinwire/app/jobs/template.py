"""A job for Thinwire: the model, the data and the loss. It runs without changes:

    thinwire train --job my_job.py --steps 200

Three functions are needed: model(), batches(share) and loss(model, batch). Three more are optional: optimizer(model),
evaluate(model) and collate(samples). `thinwire docs jobs` explains them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from thinwire.app.jobs.base import Share

Batch = tuple[Tensor, Tensor]


def model() -> nn.Module:
    """The model. Its random numbers are the same on every replica, and follow from --seed."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def batches(share: "Share") -> Iterator[Batch]:
    """The training data of one replica: part `share.index` of `share.count`, in an order that follows from `share.seed`.

    A generator must yield without end. An iterable that can be iterated again, such as a DataLoader, begins again in every epoch. With
    state_dict and load_state_dict (torchdata's StatefulDataLoader) a resume continues at once; otherwise all batches are read again.
    """
    points, arms = spirals(3000)
    own = torch.arange(share.index, len(points), share.count)  # every replica has its own points
    while True:
        order = own[torch.randperm(len(own))]
        for first in range(0, len(order), 64):
            rows = order[first : first + 64]
            yield points[rows], arms[rows]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss to minimise, a scalar. The batch is on the model's device."""
    points, arms = batch
    return nn.functional.cross_entropy(model(points), arms)


def evaluate(model: nn.Module) -> float:
    """The number by which runs are compared; lower is better. Without it: the loss of batches in another order."""
    points, arms = spirals(600, seed=1)
    here = next(model.parameters()).device
    return nn.functional.cross_entropy(model(points.to(here)), arms.to(here)).item()


# def optimizer(model: nn.Module) -> torch.optim.Optimizer:
#     """Without it: AdamW with warm-up and cosine, and --optimizer, --lr, --warmup and --weight-decay. With it, its rates do not change."""
#     return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def spirals(count: int, seed: int = 0) -> Batch:
    """Points on three arms of a spiral, and the arm of each. Replace them by your own data."""
    generator = torch.Generator().manual_seed(seed)
    along, noise = torch.rand(count, generator=generator), torch.randn(count, generator=generator)
    arms = torch.randint(3, (count,), generator=generator)
    angle = 4 * along + arms * 2.094 + 0.1 * noise
    return torch.stack([along * angle.cos(), along * angle.sin()], 1), arms
