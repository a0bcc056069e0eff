"""Graph convolution with sampled neighbours over features that lie in a file; each replica has the nodes of its own communities.

thinwire train --job examples/workloads/graph.py --steps 150
thinwire compare --job examples/workloads/graph.py --steps 150

It tests shares that differ (non-IID: a replica trains on some classes only), and batches that take their time to gather rows
from a memory-mapped store, which all replicas of a machine share without a copy (unified tensors: docs/zoo.md).
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

NODES, CLASSES, FEATURES, DEGREE, FANOUT, BATCH = 4000, 6, 32, 12, 5, 64


def graph():
    """Classes and neighbours: eight of ten neighbours are of a node's own class. The graph itself is small, its features are not."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(CLASSES, (NODES,), generator=generator)
    members = [(kind == one).nonzero()[:, 0] for one in range(CLASSES)]
    near = torch.randint(NODES, (NODES, DEGREE), generator=generator)
    own = torch.rand(NODES, DEGREE, generator=generator) < 0.7
    for one, its in enumerate(members):
        rows = kind == one
        picked = its[torch.randint(len(its), (int(rows.sum()), DEGREE), generator=generator)]
        near[rows] = torch.where(own[rows], picked, near[rows])
    return kind, near


def store():
    """The features, read only, from a file that the first process writes; a single node's features show little of its class."""
    path = Path(tempfile.gettempdir()) / f"thinwire-graph-{os.getuid()}-{NODES}x{FEATURES}.float32"
    if not path.exists():
        generator = torch.Generator().manual_seed(2)
        center = torch.randn(CLASSES, FEATURES, generator=generator)
        features = 0.2 * center[KIND] + torch.randn(NODES, FEATURES, generator=generator)
        draft = path.with_suffix(f".{os.getpid()}-{torch.randint(1 << 30, (1,)).item()}")
        features.numpy().tofile(draft)
        draft.replace(path)  # readers see the whole file or none
    return np.memmap(path, np.float32, "r", shape=(NODES, FEATURES))


KIND, NEAR = graph()
HELD_OUT = torch.arange(NODES) % 5 == 0


def gathered(features, rows):
    """Rows of the store, as a tensor: the only copy on their way."""
    return torch.from_numpy(features[rows.reshape(-1).numpy()]).view(*rows.shape, FEATURES)


def neighbourhood(features, nodes, generator=None):
    """Features of `nodes`, of FANOUT neighbours of each, and of FANOUT neighbours of each of these."""

    def picked(rows):
        slots = torch.randint(DEGREE, (*rows.shape, FANOUT), generator=generator)
        return NEAR[rows].gather(-1, slots)

    first = picked(nodes)
    return gathered(features, nodes), gathered(features, first), gathered(features, picked(first))


class Sage(nn.Module):
    """Two layers: a node's own, beside the mean of its neighbours'."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = nn.Linear(2 * FEATURES, width), nn.Linear(2 * width, width)
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, own, near, far):
        near = relu(self.first(torch.cat([near, far.mean(2)], -1)))
        own = relu(self.first(torch.cat([own, far.mean((1, 2))], -1)))
        return self.leave(relu(self.second(torch.cat([own, near.mean(1)], -1))))


def model():
    return Sage()


def batches(share):
    """Replica n of N trains on nodes of the classes n, n + N, n + 2N, ... and one node in ten of the others."""
    features = store()
    own = (KIND % share.count == share.index) | (torch.arange(NODES) % 10 == 1)
    nodes = (own & ~HELD_OUT).nonzero()[:, 0]
    while True:
        for rows in torch.randperm(len(nodes)).split(BATCH)[:-1]:
            yield neighbourhood(features, nodes[rows]), KIND[nodes[rows]]


def loss(model, batch):
    told, kind = batch
    return cross_entropy(model(*told), kind)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def evaluate(model):
    """Evaluate on nodes of all classes on which no replica has trained."""
    nodes, here = HELD_OUT.nonzero()[:, 0], next(model.parameters()).device
    told = neighbourhood(store(), nodes, torch.Generator().manual_seed(1))
    said, kind = model(*(one.to(here) for one in told)), KIND[nodes].to(here)
    return {"error": (said.argmax(1) != kind).float().mean(), "cross entropy": cross_entropy(said, kind)}
