"""Optimizers that hold the weights a second time: a landing is not undone. Equal data and unlike optimizers are named."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, sgd, toy, weights


class Copying(torch.optim.SGD):
    """Holds the weights in state, in a list of its own, or in one flat tensor, in fp32; steps there, and writes them back."""

    def __init__(self, parameters, place):
        super().__init__(parameters, lr=0.01)
        self.place, self.masters = place, []
        held = self.param_groups[0]["params"]
        if place == "list":
            self.masters = [p.detach().float().clone() for p in held]
        if place == "flat":
            self.masters = torch.cat([p.detach().float().reshape(-1) for p in held])

    @torch.no_grad()
    def step(self, closure=None):
        held = self.param_groups[0]["params"]
        if self.place == "state":
            copies = [self.state[p].setdefault("master", p.float().clone()) for p in held]
        elif self.place == "flat":
            copies = self.masters.split([p.numel() for p in held])
        else:
            copies = self.masters
        for p, copy in zip(held, copies):
            if p.grad is None:
                continue
            copy.view_as(p).add_(p.grad.float(), alpha=-0.01)
            p.copy_(copy.view_as(p))


@pytest.mark.parametrize("place", ["state", "list", "flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_of_the_weights_move_with_a_landing(place, dtype):
    """One step after each landing the replicas are as far apart as after one step, not as before the landing."""

    def replica(group):
        model, after = toy().to(dtype), []
        optimizer = Copying(model.parameters(), place)
        with tw.Replica(tw.local_sgd(every=8), model, optimizer, group):
            for step in range(1, 26):
                x, y = batch(0, group.rank, step)
                inner_step(model, optimizer, x.to(dtype), y.to(dtype) + group.rank)
                after.append(weights(model).float().clone())
        return after, weights(model)

    (a, end), (b, other) = tw.run_threads(2, replica)
    gaps = [float((p - q).norm()) for p, q in zip(a, b)]
    assert gaps[7] < 0.1 * gaps[6] and gaps[8] < 0.5 * gaps[6] and gaps[16] < 0.5 * gaps[14] and torch.equal(end, other)


@pytest.mark.parametrize("same", [True, False])
def test_equal_deltas_and_unlike_optimizers_are_named_once(same):
    heard = []

    def replica(group):
        model = toy()
        optimizer = adamw(model) if same or group.rank else sgd(model)

        def observer(event, step, **fields):
            if event == "warning" and group.rank == 0:
                heard.append(fields["message"])

        with tw.Replica(tw.diloco(every=2), model, optimizer, group, observer=observer):
            for step in range(1, 9):
                inner_step(model, optimizer, *batch(0, 0 if same else group.rank, step))

    tw.run_threads(2, replica)
    assert sum("train on the same data" in text for text in heard) == same
    assert sum("train unlike: optimizer" in text for text in heard) == (not same)
