"""Saving and loading the state of fragments; state that does not fit is refused by name. tests/test_checkpoint.py tests whole runs."""

from __future__ import annotations

import pytest
import torch
from strategies import METHODS

import thinwire as tw
from thinwire.pieces.partition import Whole
from thinwire.runtime.fragment_state import hold
from thinwire.runtime.saved_state import restore, saved
from thinwire.testing.toy import same_bits, toy


def test_a_checkpoint_without_its_anchor_is_refused() -> None:
    """This includes a fragment of one value."""
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


def test_all_state_of_every_method_is_saved_and_loaded() -> None:
    names = set()
    for strategy in METHODS.values():
        one, other = (
            [hold(strategy, fragment, i, 0, 2) for i, fragment in enumerate(strategy.partition.fragments(toy(seed)))]
            for seed in (0, 1)
        )
        for fragment in one:
            for memory in (
                fragment.state,
                fragment.feedback,
                fragment.exchange,
                fragment.aggregate,
                fragment.policy,
                *fragment.filtered,
            ):
                for value in memory.values():
                    value.fill_(7)
        restore(other, saved(one), {"rounds": [3] * len(one), "since": [2] * len(one)}, strategy.outer)
        due, found = saved(one), saved(other)
        assert due.keys() == found.keys() and all(same_bits(found[name], due[name]) for name in due), strategy
        names |= {name.split(".")[1] for name in due}
    assert names == {"anchor", "outer", "feedback", "exchange", "aggregate", "filter", "policy", "guard"}
