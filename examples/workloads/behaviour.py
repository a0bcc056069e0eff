"""A language model on content with what its receivers did: views and likes are words behind the text (Large Content and Behavior Models).

thinwire train --job examples/workloads/behaviour.py --steps 200
thinwire compare --job examples/workloads/behaviour.py --steps 200

It tests a data recipe, and a loss for each field. Few words of a text are behaviour, so one mean loss hides how well they are
learned; `evaluate` reports both fields. Texts are synthetic: topics have words, and topic and length determine views and likes.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

TOPICS, WORDS, LENGTH, BATCH, WEIGHT = 6, 60, 24, 16, 3.0
VIEWS, LIKES = 8, 5  # buckets, as words: <views 3> <likes 1>
FIRST_VIEW = WORDS
FIRST_LIKE = FIRST_VIEW + VIEWS
VOCABULARY = FIRST_LIKE + LIKES + 1
END = VOCABULARY - 1


def corpus(count, generator=None):
    """Texts [count, LENGTH + 2]: words, an end and filling, then views and likes."""
    topic = torch.randint(TOPICS, (count, 1), generator=generator)
    length = torch.randint(LENGTH // 2, LENGTH, (count, 1), generator=generator)
    own = torch.rand(count, LENGTH, generator=generator) < 0.7
    any_word = torch.randint(WORDS, (count, LENGTH), generator=generator)
    words = torch.where(own, (any_word + topic * 10) % 10 + topic * 10, any_word)
    words[:, 1::2] = torch.where(own[:, 1::2], (words[:, ::2] * 7 + 3) % 10 + topic * 10, words[:, 1::2])  # a grammar
    words = torch.where(torch.arange(LENGTH) < length, words, END)
    luck = torch.rand(count, 2, generator=generator)
    views = (topic[:, 0] + (length[:, 0] < 18).long() + (luck[:, 0] < 0.2).long()).clamp(max=VIEWS - 1)
    likes = (views // 2 + (luck[:, 1] < 0.2).long()).clamp(max=LIKES - 1)
    return torch.cat([words, FIRST_VIEW + views[:, None], FIRST_LIKE + likes[:, None]], 1)


class LanguageModel(nn.Module):
    """Two layers of attention."""

    def __init__(self, width=48):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH + 2, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        nn.init.normal_(self.words.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, text):
        places = torch.arange(text.shape[1], device=text.device)
        mask = torch.ones(len(places), len(places), dtype=torch.bool, device=text.device).triu(1)
        return self.leave(self.norm(self.layers(self.words(text) + self.places(places), mask=mask)))


def model():
    return LanguageModel()


def batches(share):
    while True:
        yield corpus(BATCH)


def fields(model, text):
    """The loss of content and that of behaviour, each a mean over its own words."""
    losses = cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
    content, behaviour = losses[:, : LENGTH - 1], losses[:, LENGTH - 1 :]
    told = (text[:, :LENGTH][:, :-1] != END).float()  # padding is not content
    return (content * told).sum() / told.sum(), behaviour.mean()


def loss(model, batch):
    content, behaviour = fields(model, batch)
    return (content + WEIGHT * behaviour) / (1 + WEIGHT)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=4e-3)


def evaluate(model):
    text = corpus(256, torch.Generator().manual_seed(1)).to(next(model.parameters()).device)
    content, behaviour = fields(model, text)
    return {"loss": (content + WEIGHT * behaviour) / (1 + WEIGHT), "content": content, "behaviour": behaviour}
