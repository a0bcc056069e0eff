"""`exchange_gradients` before the step: gradients are the mean earlier, and must then be stepped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.testing.toy import adamw, batch, fill, own, same_bits, toy, weights


def attach(group):
    model = toy()
    optimizer = adamw(model)
    return model, optimizer, tw.Replica(tw.data_parallel(), model, optimizer, group)


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


def test_early_exchange_of_gradients_precedes_clipping():
    """Called before clipping, it makes gradients the mean, so the clip sees the same norm everywhere; `step` exchanges nothing more."""

    def replica(group):
        model, optimizer, attached = attach(group)
        norms = []
        with attached:
            for step in range(1, 5):
                optimizer.zero_grad()
                loss_of(model, *batch(0, group.rank, step)).backward()
                attached.exchange_gradients()
                attached.exchange_gradients()
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
            assert attached.state()[1]["rounds"] == [4]
        return norms, weights(model)

    (norms_a, a), (norms_b, b) = tw.run_threads(2, replica)
    assert norms_a == norms_b and same_bits(a, b)


def test_gradients_exchanged_early_must_be_stepped():
    """The next ones would be left out, and replicas would drift apart. With a GradScaler, or to leave out a step, the advice of the error
    works."""

    def replica(group, advised):
        model, optimizer, attached = attach(group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        with attached:
            for step in range(1, 9):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, *batch(0, group.rank, step))).backward()
                if step == 3 and group.rank == 0:
                    next(model.parameters()).grad.view(-1)[0] = torch.inf
                scaler.unscale_(optimizer)
                attached.exchange_gradients()
                norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
                if step == 5 and norm > 0:  # the same norm everywhere
                    optimizer.zero_grad()
                    if not advised:
                        continue
                if advised:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                scaler.update()
            assert attached.step == 8
        return weights(model)

    assert same_bits(*tw.run_threads(2, lambda group: replica(group, True)))
    with pytest.raises(
        tw.ModelError, match=r"has not stepped since the last call.*optimizer.step\(\) in place of scaler.step"
    ):
        tw.run_threads(2, lambda group: replica(group, False))


class Gated(nn.Module):
    """A parameter behind a gate of zero, as an adapter's first factor: its gradient is exactly zero, or None if it is left out."""

    def __init__(self):
        super().__init__()
        self.head, self.late = nn.Linear(3, 1), nn.Parameter(torch.ones(4))
        fill(self)

    def forward(self, x, gate=0.0, left_out=False):
        return self.head(x) + (0 if left_out else gate * self.late.sum())


def steps_of(model, optimizer, rank=0, left_out=False):
    for step, gate in enumerate((0.0, 1.0, 0.0, 0.0), start=1):
        x, y = batch(0, rank, step)
        ((model(x, gate, left_out and step > 2) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "strategy", [tw.data_parallel(), tw.lab.recipes.ef14(codec=tw.codecs.Identity(), momentum=0.9)]
)
def test_a_gradient_of_zeros_is_a_gradient(strategy):
    """The optimizer's momentum and weight decay go on, as without a Replica."""
    bare, model, (group,) = Gated(), Gated(), tw.ThreadGroup.create(1)
    with tw.Replica(strategy, model, optimizer := own(strategy, model), group):
        steps_of(model, optimizer)
    steps_of(bare, own(strategy, bare))
    assert same_bits(weights(model), weights(bare))


def test_momentum_goes_on_where_a_codec_sends_nothing():
    """From the first value that is sent of a tensor, SGD moves it in every step."""
    strategy = tw.lab.recipes.ef14(codec=tw.codecs.TopK(0.01), momentum=0.9)

    def replica(group):
        model = fill(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1)))
        optimizer, sent, rested = own(strategy, model), set(), 0
        with tw.Replica(strategy, model, optimizer, group) as attached:
            for step in range(1, 13):
                loss_of(model, *batch(0, group.rank, step)).backward()
                attached.exchange_gradients()
                now = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
                rested, sent = rested + len(sent - now), sent | now
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
                assert not any(torch.equal(before[name], p) for name, p in model.named_parameters() if name in sent)
        return rested

    assert min(tw.run_threads(2, replica)) > 0, "some tensors were not sent in each step"


def test_parameters_without_a_gradient_are_skipped_on_all_replicas():
    """One replica leaves a parameter out, on the other its gradient is zero."""

    def replica(group):
        model = Gated()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        late = []
        optimizer.register_step_post_hook(lambda *_: late.append(model.late[0].item()))
        with tw.Replica(tw.data_parallel(), model, optimizer, group):
            steps_of(model, optimizer, group.rank, left_out=group.rank == 1)
        return weights(model), late

    (first, late), (second, _) = tw.run_threads(2, replica)
    assert same_bits(first, second) and late[0] != late[1] == late[2] == late[3]
