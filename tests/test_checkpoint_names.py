"""A checkpoint is that of a model with the same parameters in the same order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire import checkpoint
from thinwire.membership.testing.cluster import SimulatedCluster


class Pair(nn.Module):
    """Two parameters of one shape, in the order of their names."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("elastic", [False, True])
def test_a_checkpoint_of_a_model_with_its_parameters_in_another_order_is_refused_by_name(elastic, tmp_path):
    """Its anchors are flat, so they would be those of other parameters."""

    def attached(group, names, resume=None):
        model = Pair(*names)
        return tw.Replica(tw.diloco(every=2), model, torch.optim.SGD(model.parameters()), group, resume=resume)

    def saving(group, folder):
        replica = attached(group, ["first", "second"])
        checkpoint.save(folder, replica, {})
        replica.close()

    def resuming(group, folder):
        def load(replica):
            checkpoint.load(checkpoint.newest(folder)[0], replica)

        with pytest.raises(tw.CheckpointError, match="parameter first in the checkpoint where this model has second"):
            attached(group, ["second", "first"], load)

    def play(one):
        if not elastic:
            tw.run_threads(2, lambda group: one(group, tmp_path / str(group.rank)))
            return
        cluster = SimulatedCluster()
        told = cluster.play({n: lambda n: one(cluster.membership(n), tmp_path / n) for n in "abc"})
        assert not any(told.values()), told

    play(saving)
    play(resuming)
