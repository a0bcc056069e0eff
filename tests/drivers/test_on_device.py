"""Rounds on a GPU: with the anchors there, parameters have the bits that they have with the anchors in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire import recipes
from thinwire.codecs import TopK
from thinwire.drivers.fragment import stays_on_device
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, toy

STRATEGIES = {
    "streaming_sign": recipes.streaming_sign,
    "streaming_diloco": recipes.streaming_diloco,
    "streaming_sparse": recipes.streaming_sparse,
    "sparse_loco": recipes.sparse_loco,
    "top_k": lambda **at: recipes.streaming_diloco(codec=TopK(0.2), **at),
}


def trained(strategy: tw.Strategy, stream: torch.cuda.Stream | None) -> list[Tensor]:
    """The weights of two replicas on one GPU; their threads queue their work on `stream`."""

    def replica(group: tw.Group) -> Tensor:
        model = toy().cuda()
        optimizer = adamw(model)
        with torch.cuda.stream(stream), tw.Replica(strategy, model, optimizer, group):
            for step in range(1, 40):
                x, y = batch(0, group.rank, step)
                inner_step(model, optimizer, x.cuda(), y.cuda())
        return torch.cat([one.detach().cpu().reshape(-1) for one in model.parameters()])

    return tw.run_threads(2, replica, timeout=600.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_rounds_on_a_gpu_have_the_bits_of_rounds_in_host_memory(name: str, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else None
    here, there = (trained(STRATEGIES[name](every=4, anchors=place), stream) for place in ("host", "device"))
    assert all(same_bits(one, here[0]) for one in (*here, *there))


def test_rounds_of_whole_fragments_stay_on_the_device() -> None:
    assert stays_on_device(recipes.streaming_sign(anchors="device"))
    for other in (
        recipes.streaming_sign(),
        recipes.streaming_diloco(anchors="device"),  # cut into pieces, each of which would be a call
        recipes.streaming_sign(anchors="device", exchange=tw.exchange.TwoShot()),
        tw.lab.recipes.outer_dgc(anchors="device"),  # its filter keeps state in host memory
    ):
        assert not stays_on_device(other), other
