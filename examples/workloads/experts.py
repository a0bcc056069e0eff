"""A recommender: a mixture of experts over sparse embeddings, of which most rows are never looked up.

thinwire train --job examples/workloads/experts.py --steps 200
thinwire compare --job examples/workloads/experts.py --steps 200

It tests sparse gradients with an optimizer for them, beside AdamW for the rest, of one loss; experts that few samples reach; and
whether rows that no sample reads keep their values.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

USERS, ITEMS, WIDTH, EXPERTS, BATCH = 2000, 4000, 16, 4, 128
SEEN = ITEMS // 4  # items that are in samples; the others are in the catalogue alone
PLACES = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(5))  # rows of seen and unseen items lie mixed


def taste(generator):
    """The true factors of each user and of each item, which the model learns."""
    users = torch.nn.functional.normalize(torch.randn(USERS, 3, generator=generator), dim=1)
    return users, torch.nn.functional.normalize(torch.randn(ITEMS, 3, generator=generator), dim=1)


TRUE = taste(torch.Generator().manual_seed(0))


def clicks(count, generator=None):
    """Users, items and whether they fit: few items are popular (Zipf), and few users busy."""
    users = (USERS * torch.rand(count, generator=generator) ** 3).long()
    items = (SEEN ** torch.rand(count, generator=generator)).long().clamp(max=SEEN) - 1
    items = PLACES[items]
    fit = 6 * (TRUE[0][users] * TRUE[1][items]).sum(1)
    return users, items, (torch.rand(count, generator=generator) < fit.sigmoid()).float()


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.gate = nn.Linear(2 * WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(EXPERTS)
        )
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)
        # where the rows of items began: constant, so it is the same on all replicas and never travels
        self.register_buffer("begun", self.items.weight.detach().clone())

    def forward(self, users, items):
        """The logit, and how unevenly experts are used (Switch: 1 is even)."""
        u, i = self.users(users), self.items(items)
        x = torch.cat([u, i, u * i], 1)
        weight = self.gate(x[:, : 2 * WIDTH]).softmax(1)
        most, chosen = weight.max(1)
        logit = torch.zeros(len(x), device=x.device)
        for number, expert in enumerate(self.experts):  # each sample goes to one
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                logit = logit.index_add(0, rows, most[rows] * expert(x[rows])[:, 0])
        share = torch.nn.functional.one_hot(chosen, EXPERTS).float().mean(0)
        return logit, EXPERTS * (share * weight.mean(0)).sum()


def model():
    return Recommender()


def batches(share):
    while True:
        yield clicks(BATCH)


def loss(model, batch):
    users, items, clicked = batch
    logit, uneven = model(users, items)
    return binary_cross_entropy_with_logits(logit, clicked) + 0.01 * uneven


def optimizer(model):
    sparse = [model.users.weight, model.items.weight]
    dense = [p for p in model.parameters() if all(p is not one for one in sparse)]
    return [torch.optim.SparseAdam(sparse, lr=2e-2), torch.optim.AdamW(dense, lr=3e-3)]


def evaluate(model):
    """Log loss, what could be reached, and how far rows have moved that no sample has: of the distance that trained rows have."""
    users, items, clicked = (one.to(model.begun.device) for one in clicks(4096, torch.Generator().manual_seed(1)))
    best = 6 * (TRUE[0].to(users.device)[users] * TRUE[1].to(users.device)[items]).sum(1)
    moved = (model.items.weight - model.begun).square().mean(1).sqrt()
    return {
        "log loss": binary_cross_entropy_with_logits(model(users, items)[0], clicked),
        "at best": (softplus(best) - clicked * best).mean(),
        "untouched moved": moved[PLACES[SEEN:]].mean() / moved[PLACES[:100]].mean().clamp(min=1e-9),
    }
