"""A single round without training."""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire.exchange import SendContext
from thinwire.exchange.one_round import once
from thinwire.packet import REFUSED
from thinwire.rng import Key


def test_once_gives_the_mean_or_none_where_one_refuses():
    def replica(group):
        context, rank, own = SendContext(group), group.rank, torch.tensor([1.0, 3.0]) * group.rank
        estimate, arrival = once(tw.exchange.Direct(), context, tw.codecs.Identity(), own, Key(sender=rank), {})
        sick = own / rank if rank == 0 else own  # NaN
        refused, other = once(tw.exchange.Direct(), context, tw.codecs.Identity(), sick, Key(0, 0, 1, rank), {})
        context.close()
        return estimate.tolist(), arrival.flags, refused, other.flags

    assert tw.run_threads(2, replica) == [([0.5, 1.5], (0, 0), None, (REFUSED, 0))] * 2
