"""Replicas of unequal speed with feedback: what a replica had held back in its checkpoint counts once, or is lost with its later deltas."""

from __future__ import annotations

import pytest
import torch

from thinwire.codecs import Identity, TopK
from thinwire.comm import run_threads
from thinwire.drivers.unequal.method import Decoupled
from thinwire.pieces.outer import Average
from thinwire.pieces.staleness import Alike

SIZE, TRAINED = 5, 10


def begin(group, delay):
    method = Decoupled(
        every=5, outer=Average(), weigh=Alike(), quorum=2, slow=(1, 1), down=Identity(), correct=None, delay=delay,
        codec=TopK(density=0.2, values=Identity()),
    )  # fmt: skip
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, method.attach(model, optimizer, group)


def one_step(model, optimizer, learns):
    model.x.grad = -torch.arange(1.0, SIZE + 1) if learns else torch.zeros(SIZE)
    optimizer.step()


def kept(model, attached):
    tensors, facts = attached.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, facts, model.x.detach().clone()


def held_back(attached):
    return attached._states[0].feedback["residual"]


@pytest.mark.parametrize(
    ("delay", "first_saved", "last", "later"),
    [
        (0, 10, 10, False),
        (0, 10, 15, True),
        (0, 10, 60, True),
        (2, 11, 11, False),
        (2, 11, 13, False),
        (2, 11, 18, True),
    ],
)
def test_what_feedback_held_back_in_an_older_checkpoint_counts_once(delay, first_saved, last, later):
    """Replica 1 trains `TRAINED` steps, and saves at step `first_saved`. Replica 0, which brings zeros, saves at step `last`; whether a
    `later` delta of replica 1 has counted there. With a delay a delta is in flight at step 11. All resume from these.
    """

    def first(group):
        model, optimizer, attached = begin(group, delay)
        saved = None
        while attached.step < last:
            one_step(model, optimizer, group.rank == 1 and attached.step < TRAINED)
            if attached.step == (first_saved if group.rank else last):
                saved = kept(model, attached)
        lost = held_back(attached).clone()
        attached.finish()
        return saved, lost

    def second(group):
        model, optimizer, attached = begin(group, delay)
        tensors, facts, x = saved[group.rank]
        with torch.no_grad():
            model.x.copy_(x)
        attached.load_state(tensors, facts)
        while attached.progress < last + 60:
            one_step(model, optimizer, False)
        attached.finish()
        return attached.anchors()[0], held_back(attached)

    (zeros, _), (ones, lost) = run_threads(2, first, 600.0)
    saved = [zeros, ones]
    (anchor, _), (_, left) = run_threads(2, second, 600.0)
    trained = TRAINED * torch.arange(1.0, SIZE + 1)
    assert ones[0]["0.feedback.residual"].any() and not left.any()
    assert torch.equal(2 * anchor, trained + (lost if later else 0))  # a delta is anchor − parameters
