"""Agents that learn whom to ask: each sees a part, may hear from one other, and all are paid together (CommFormer, DAMCS).

thinwire train --job examples/workloads/agents.py --steps 100
thinwire compare --job examples/workloads/agents.py --steps 100

It tests on-policy data, which change with the weights: a replica acts with its own weights, and learns from its rewards (REINFORCE with
a baseline). The agents also learn which one to hear: each chooses one link (the budget). A message is eight numbers in [-1, 1].
All random draws are in the batch, as uniform noise, so that a resumed run acts as the uninterrupted one.
"""

import torch
from torch import nn

AGENTS, ACTIONS, MESSAGE, WIDTH, BATCH = 6, 6, 8, 32, 48
ORDER = torch.tensor([2, 3, 5, 0, 1, 4])  # agent n is paid for doing what agent ORDER[n] alone has seen


class Team(nn.Module):
    def __init__(self):
        super().__init__()
        self.links = nn.Parameter(0.1 * torch.randn(AGENTS, AGENTS))
        self.see = nn.Embedding(ACTIONS, WIDTH)
        self.speak = nn.Linear(WIDTH, MESSAGE)
        self.act = nn.Sequential(nn.Linear(WIDTH + MESSAGE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, ACTIONS))

    def forward(self, seen, noise=None):
        """Logits of links [AGENTS, AGENTS] and of actions [batch, AGENTS, ACTIONS]; `noise` explores links."""
        links = self.links.masked_fill(torch.eye(AGENTS, dtype=torch.bool, device=seen.device), -1e9)
        scores = links.expand(len(seen), -1, -1) if noise is None else links + gumbel(noise)
        heard = scores.argmax(-1)  # the budget: one link each
        own = self.see(seen)
        said = torch.tanh(self.speak(own))
        message = said.gather(1, heard[..., None].expand(-1, -1, MESSAGE))
        return links, heard, self.act(torch.cat([own, message], -1))


def gumbel(noise):
    return -torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6)))


def model():
    return Team()


def batches(share):
    """Observations, and the noise of exploration."""
    while True:
        shown = torch.randint(ACTIONS, (BATCH, AGENTS))
        yield shown, torch.rand(BATCH, AGENTS, AGENTS), torch.rand(BATCH, AGENTS, ACTIONS)


def paid(shown, done):
    """The reward: half for an agent's own action, half for the whole team's."""
    right = (done == shown[:, ORDER.to(shown.device)]).float()
    return right + right.mean(1, keepdim=True)


def loss(model, batch):
    """−(reward − mean) times the log probability of both choices, minus a share of the entropy."""
    shown, for_links, for_actions = batch
    links, heard, logits = model(shown, for_links)
    with torch.no_grad():
        done = (logits + gumbel(for_actions)).argmax(-1)
        reward = paid(shown, done)
        more = reward - reward.mean(0)
    chance = logits.log_softmax(-1)
    likely = (
        chance.gather(-1, done[..., None])[..., 0]
        + links.log_softmax(-1).expand(len(shown), -1, -1).gather(-1, heard[..., None])[..., 0]
    )
    entropy = -(chance.exp() * chance).sum(-1).mean()
    return -(more * likely).mean() - 0.005 * entropy


def optimizer(model):
    return torch.optim.AdamW(
        [
            {"params": [model.links], "lr": 2e-2, "weight_decay": 0.0},
            {"params": [p for name, p in model.named_parameters() if name != "links"]},
        ],
        lr=4e-3,
    )


def evaluate(model):
    """The share of wrong actions if each agent takes its most likely one, and the share of wrong links."""
    shown = torch.randint(ACTIONS, (512, AGENTS), generator=torch.Generator().manual_seed(1)).to(model.links.device)
    links, _, logits = model(shown)
    order = ORDER.to(shown.device)
    wrong = (logits.argmax(-1) != shown[:, order]).float().mean()
    return {"wrong actions": wrong, "wrong links": (links.argmax(-1) != order).float().mean()}
