"""`exchange_gradients` before the step: gradients are the mean earlier, and must then be stepped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.testing.toy import adamw, batch, same_bits, toy, weights


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
