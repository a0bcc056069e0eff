"""Optimizers that hold the weights a second time: a landing is not undone. Equal data and unlike optimizers are named."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, sgd, toy, weights


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


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_the_average_of_a_schedule_free_optimizer_is_the_model(kind):
    """One replica that averages with itself has the bare loop's losses and ends with its average; of two, all points end equal."""
    made = getattr(pytest.importorskip("schedulefree", reason="pip install 'thinwire[optimizers]'"), kind)

    def loop(group, attach, method):
        model, losses = toy(), []
        optimizer = made([p for p in model.parameters() if p.requires_grad], lr=0.05)
        optimizer.train()
        with attach(method, model, optimizer, group) as replica:
            for step in range(1, 13):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                if step % 2 == 0:
                    optimizer.eval()
                    losses.append(float(model(batch(1, 0, step)[0]).detach().square().mean()))
                    with replica.anchored() if replica else nullcontext():
                        pass
                    optimizer.train()
        points = [weights(model).clone()]
        for mode in (optimizer.eval, optimizer.train, optimizer.eval):
            mode()
            points.append(weights(model).clone())
        return losses, points

    average = tw.local_sgd(every=3)
    ((bare, due),) = tw.run_threads(1, lambda group: loop(group, lambda *_: nullcontext(), average))
    ((attached, got),) = tw.run_threads(1, lambda group: loop(group, tw.Replica, average))
    assert bare == attached and same_bits(due[1], got[1])
    streaming = tw.streaming_diloco(every=4, fragments=2, delay=1)
    (_, first), (_, second) = tw.run_threads(2, lambda group: loop(group, tw.Replica, streaming))
    assert all(same_bits(one, other) for one, other in zip(first, second))


def test_gradients_may_be_sparse():
    """Dense state of sparse gradients is compared with them, too: it is no copy of the weights."""

    def replica(group):
        model = torch.nn.Embedding(8, 4, sparse=True)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SparseAdam(model.parameters())
        with tw.Replica(tw.local_sgd(every=2), model, optimizer, group):
            for step in range(4):
                optimizer.zero_grad()
                model(torch.tensor([step, group.rank])).square().mean().backward()
                optimizer.step()
        return model.weight.detach()

    assert same_bits(*tw.run_threads(2, replica))
