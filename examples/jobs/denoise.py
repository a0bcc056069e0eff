"""An autoencoder that removes noise from signals: a job with all six functions (docs/jobs.md).

thinwire train --job examples/jobs/denoise.py --steps 100 --batch 64
thinwire compare --job examples/jobs/denoise.py --steps 60
"""

import math

import torch
from torch import nn

LENGTH, NOISE = 64, 0.3


def model():
    """Returns an autoencoder with a bottleneck of eight numbers."""
    return nn.Sequential(
        nn.Linear(LENGTH, 128), nn.GELU(), nn.Linear(128, 8), nn.Linear(8, 128), nn.GELU(), nn.Linear(128, LENGTH)
    )


def signal():
    """Returns a sum of two waves, drawn from torch's generator."""
    t = torch.linspace(0, 2 * math.pi, LENGTH)
    (a, b), (p, q) = torch.rand(2), 2 * math.pi * torch.rand(2)
    return a * torch.sin(t + p) + b * torch.sin(3 * t + q)


def batches(share):
    """Yields clean signals without end. The stream differs from share to share."""
    while True:
        yield signal()


def collate(samples):
    """Returns `--batch` samples as one batch: noisy and clean."""
    clean = torch.stack(samples)
    return clean + NOISE * torch.randn_like(clean), clean


def loss(model, batch):
    noisy, clean = batch
    return nn.functional.mse_loss(model(noisy), clean)


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def evaluate(model):
    """Returns the share of the noise that is left; 1 is all of it."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noisy, clean = collate([signal() for _ in range(256)])
    here = next(model.parameters()).device
    return (nn.functional.mse_loss(model(noisy.to(here)), clean.to(here)) / NOISE**2).item()
