"""Documents of different length, packed into batches of about equal cost; the loss is over all tokens (docs/jobs.md).

thinwire train --job examples/jobs/documents.py --steps 100
thinwire train --job examples/jobs/documents.py --elastic --replicas 3 --steps 100
"""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CAPACITY = 32, 48, 3, 256


def corpus(count=600):
    """Returns documents that count upwards, each in its own steps. A few are long, most are short."""
    generator = torch.Generator().manual_seed(7)
    lengths = (4 + torch.empty(count).log_normal_(2.5, 1.0, generator=generator)).long().clamp(max=CAPACITY)
    first, step = torch.randint(0, VOCABULARY, (2, count), generator=generator)
    return [(first[n] + step[n] * torch.arange(length)) % VOCABULARY for n, length in enumerate(lengths.tolist())]


class Counting(nn.Module):
    """A model with one block of attention."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CAPACITY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, VOCABULARY))

    def forward(self, tokens, places, document):
        """All inputs are one-dimensional. `places` begin with 0 in each `document`."""
        x = self.tokens(tokens) + self.places(places)
        q, k, v = self.qkv(x).view(len(tokens), 3, HEADS, -1).permute(1, 2, 0, 3)
        alike = document[:, None] == document  # a document attends only to itself
        y = functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=alike.tril())
        return self.head(x + self.out(y[0].transpose(0, 1).flatten(1)))


def model():
    return Counting()


def batches(share):
    """Yields one packed batch after another. Resumed and elastic runs continue at their place in the data ledger."""
    documents = corpus()
    for rows in share.packed([len(one) - 1 for one in documents], CAPACITY, WIDTH):
        some = [documents[row] for row in rows]
        inputs, targets = torch.cat([one[:-1] for one in some]), torch.cat([one[1:] for one in some])
        places = torch.cat([torch.arange(len(one) - 1) for one in some])
        document = torch.cat([torch.full((len(one) - 1,), number) for number, one in enumerate(some)])
        yield inputs, targets, places, document


def loss(model, batch):
    """Returns the sum of losses and the number of tokens, because a mean of means would overweight tokens of small batches."""
    inputs, targets, places, document = batch
    return functional.cross_entropy(model(inputs, places, document), targets, reduction="sum"), len(targets)
