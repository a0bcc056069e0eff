"""Gossip exchanges, by hand: the neighbours over which the mean is taken, and what each replica sends."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import cut, packets_nbytes
from thinwire.exchange.two_shot import reduction_nbytes
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.rules import AdaptThenCombine, NoLoCo
from thinwire.lab.topology import Listed, MoshpitGrid, Ring
from thinwire.rng import Key


@pytest.mark.parametrize(("topology", "size"), [(Ring(), 4), (MoshpitGrid(4), 4), (MoshpitGrid(3), 6)], ids=str)
def test_both_vectors_are_averaged_over_the_neighbours_in_all_their_ranges(topology, size, small):
    """On a ring the mean is over three of four replicas; in a group that averages together, over all of the group."""
    numel, exchange = 50, Gossip(topology, NoLoCo())
    x = torch.randn(size, 2 * numel, generator=torch.Generator().manual_seed(0))
    share = torch.from_numpy(topology.edges(size)).float() + torch.eye(size)

    def replica(group):
        context, said = SendContext(group), torch.full((2, 2 * numel), torch.nan)
        round_ = Round(context, Identity(), numel, Key(sender=group.rank), lambda begin, end: x[group.rank, begin:end])
        for begin, mean, own in exchange.arrive(exchange.depart(round_, {})):
            said[0, begin : begin + len(mean)], said[1, begin : begin + len(mean)] = mean, own
        round_.close()
        context.close()
        return said

    assert len(cut(Identity(), 0, numel)) > 1
    for rank, (mean, own) in enumerate(tw.run_threads(size, replica, timeout=600.0)):
        torch.testing.assert_close(mean, share[rank] @ x / share[rank].sum())
        assert torch.equal(own, x[rank])


def test_each_replica_sends_to_its_neighbours_or_group():
    """It sends to each neighbour, or in a group the share that its position requires."""
    nbytes = packets_nbytes(cut(Identity(), 0, 10))
    star = Gossip(Listed(((0, 1), (0, 2), (0, 3))), AdaptThenCombine())
    assert [star.nbytes_sent(Identity(), 10, 4, rank) for rank in (None, 0, 1)] == [3 * nbytes, 3 * nbytes, nbytes]
    together = Gossip(MoshpitGrid(4), AdaptThenCombine())
    each = [reduction_nbytes(Identity(), 10, 4, place, marks=4) for place in range(4)]
    assert [together.nbytes_sent(Identity(), 10, 4, rank) for rank in range(4)] == each
    assert together.nbytes_sent(Identity(), 10, 4) == max(each) > min(each)
    assert together.nbytes_sent(Identity(), 10, 5, 4) == nbytes  # alone in one round, and one of two in the next


@pytest.mark.parametrize(
    ("name", "given"), [("topology", (3, NoLoCo())), ("rule", (Ring(), 3)), ("rule", (Ring(), NoLoCo))], ids=str
)
def test_invalid_gossip_settings_are_refused(name, given):
    with pytest.raises(tw.ConfigurationError, match=rf"Gossip\({name}=.*: a topology such as Ring\(\) and a rule"):
        Gossip(*given)
