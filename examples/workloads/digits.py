"""A convolutional net with batch norm on drawn digits; replicas have digits of unlike contrast and noise (federated learning's task).

thinwire train --job examples/workloads/digits.py --steps 120
thinwire compare --job examples/workloads/digits.py --steps 120

It tests running statistics, which are not parameters, and differ between replicas (--buffers mean | local).
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

FONT = (
    *("111101101101111", "010110010010111", "111001111100111", "111001011001111", "101101111001001"),
    *("111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111"),
)
SIDE, BATCH = 12, 32


def draw(count, contrast, noise, generator):
    """Digits of random size and place on a noisy ground."""
    font = torch.tensor([[float(dot) for dot in one] for one in FONT]).view(10, 1, 5, 3)
    which = torch.randint(10, (count,), generator=generator)
    images = noise * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    for image, digit in zip(images, which):
        wide, high = (int(torch.randint(low, 10, (), generator=generator)) for low in (6, 8))
        left = int(torch.randint(SIDE - wide + 1, (), generator=generator))
        top = int(torch.randint(SIDE - high + 1, (), generator=generator))
        drawn = interpolate(font[digit][None], (high, wide), mode="bilinear")[0]
        image[:, top : top + high, left : left + wide] += contrast * drawn
    return images, which


class Net(nn.Sequential):
    """Three convolutions, each with a batch norm."""

    def __init__(self):
        layers = []
        for before, after in ((1, 12), (12, 24), (24, 32)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(32 * 4, 10))


def model():
    return Net()


def batches(share):
    """Each replica has 3,000 digits of its own, fainter and noisier from replica to replica."""
    generator = torch.Generator().manual_seed(share.seed % 2**63 + share.index)
    faint = share.index / max(1, share.count - 1)
    images, digits = draw(3000, 2.0 - faint, 0.2 + 0.2 * faint, generator)
    while True:
        for rows in torch.randperm(3000).split(BATCH)[:-1]:
            yield images[rows], digits[rows]


def loss(model, batch):
    images, digits = batch
    return cross_entropy(model(images), digits)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=4e-3)


def evaluate(model):
    """Evaluate on digits with the contrasts of all replicas."""
    generator = torch.Generator().manual_seed(1)
    parts = [draw(200, 2.0 - faint, 0.2 + 0.2 * faint, generator) for faint in (0.0, 0.5, 1.0)]
    images, digits = (torch.cat(one).to(next(model.parameters()).device) for one in zip(*parts))
    said = model(images)
    return {"error": (said.argmax(1) != digits).float().mean(), "cross entropy": cross_entropy(said, digits)}
