"""What is saved of fragments and read back; what does not fit is refused by name. Whole runs: tests/test_checkpoint.py."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.pieces.partition import Whole
from thinwire.runtime.fragment_state import hold
from thinwire.runtime.saved_state import restore, saved


def test_a_checkpoint_without_its_anchor_is_refused() -> None:
    """Also of a fragment of one value."""
    strategy = tw.diloco(every=2)
    model = torch.nn.Linear(1, 1, bias=False)
    one = hold(strategy, Whole().fragments(model)[0], 0, 0, 1)
    tensors, facts = saved([one]), {"rounds": [3], "since": [2]}
    restore([one], tensors, facts, strategy.outer)
    assert (one.rounds, one.since) == (3, 2)
    del tensors["0.anchor"]
    with pytest.raises(tw.CheckpointError, match="has 0 elements in the checkpoint, 1 in this model"):
        restore([one], tensors, facts, strategy.outer)
    with pytest.raises(tw.CheckpointError, match="the checkpoint has 2 fragments, this strategy makes 1"):
        restore([one], tensors, {"rounds": [3, 3], "since": [2, 2]}, strategy.outer)
