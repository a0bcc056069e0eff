"""Parameters of bf16 hold less than the anchors of fp32: what they round off stays in the anchors, and is in no delta."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.drivers.unequal.method import Decoupled, decoupled_diloco
from thinwire.pieces.merge import Mix
from thinwire.pieces.partition import Whole

REPLICAS, STEPS = 4, 32
LAST_BIT = 2.0**-7  # of bf16, from 1 to 2

EXACT = {"codec": Identity(), "down": Identity(), "feedback": None, "correct": None}
METHODS: dict[str, tw.Strategy | Decoupled] = {
    "local_sgd": tw.local_sgd(every=1),
    "streaming_sign": tw.streaming_sign(every=2, delay=1, partition=Whole(), codec=Identity(), feedback=None),
    "streaming_diloco": tw.Strategy(schedule=tw.pieces.schedule.Every(2, delay=1), merge=Mix(0.0)),
    "decoupled_diloco": replace(decoupled_diloco(), **EXACT, every=2, quorum=REPLICAS, slow=(1,) * REPLICAS),
}


class Weight(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5, dtype=dtype))


def trained(method: tw.Strategy | Decoupled, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The anchor and the weight of each replica. One of them moves in each step, by the last bit: the mean of a round is less."""

    def replica(group: tw.Group) -> tuple[Tensor, Tensor]:
        model = Weight(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        attach: Any = method.attach if isinstance(method, Decoupled) else partial(tw.Replica, method)
        attached = attach(model, optimizer, group)
        for step in range(STEPS):
            model.weight.grad = torch.full_like(model.weight, -LAST_BIT * (step % REPLICAS == group.rank))
            optimizer.step()
        attached.finish()
        (anchor,) = attached.anchors()
        attached.close()
        return anchor, model.weight.detach().clone()

    return tw.run_threads(REPLICAS, replica)


@pytest.mark.parametrize("name", METHODS)
def test_what_parameters_round_off_stays_in_the_anchors(name: str) -> None:
    """Replicas of bf16 agree on the anchors of replicas of fp32."""
    (due, _), *_ = trained(METHODS[name], torch.float32)
    assert not torch.equal(due, torch.full((8,), 1.5))
    for anchor, weight in trained(METHODS[name], torch.bfloat16):
        assert torch.equal(anchor, due) and torch.equal(weight, due.bfloat16())
