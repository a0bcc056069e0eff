"""What a round of gossip holds in memory."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.exchange.chunks import PIECE_NUMEL
from thinwire.lab.gossip.driver import GossipUpdate

WIDTH = 512


def rounds(strategy):
    """Bytes of the buffers of a round between two replicas, for each parameter, without the two of the decoder, which do not grow."""

    def replica(group):
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        member = tw.Replica(strategy, model, optimizer, group)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        buffers = member._driver._flights.buffers
        held = sum(one.nbytes for of in (*buffers._free.values(), buffers._lent.values()) for one in of)
        member.finish()
        return held

    return (tw.run_threads(2, replica, timeout=600.0)[0] - 2 * 4 * PIECE_NUMEL) / WIDTH**2


@pytest.mark.parametrize(("recipe", "nbytes"), [("noloco", 36), ("d_psgd", 20), ("choco", 13)])
def test_the_buffers_of_a_round_are_those_of_its_page(recipe, nbytes):
    """θ; for each vector the mean and the values in the own packet; packets, rounded up. What is said (noloco: 8, choco: 4) is in no buffer."""
    assert nbytes <= rounds(getattr(tw.lab.recipes, recipe)(every=1)) <= 1.13 * nbytes


def test_one_vector_is_encoded_where_it_lies(monkeypatch):
    encoded, signal = list[bool](), GossipUpdate.signal

    def seen(update, begin, end):
        part = signal(update, begin, end)
        encoded.append(part.untyped_storage().data_ptr() == update.round.delta.untyped_storage().data_ptr())
        return part

    monkeypatch.setattr(GossipUpdate, "signal", seen)
    rounds(tw.lab.recipes.d_psgd(every=1))
    assert encoded and all(encoded)
