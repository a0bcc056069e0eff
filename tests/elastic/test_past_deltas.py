"""What a replica sent before: which histories of others have counted it."""

from __future__ import annotations

import pytest
import torch
from elastic_toy import RecordedRun, Toy

from thinwire.elastic.global_state import GlobalState
from thinwire.elastic.messages import Ready
from thinwire.elastic.past_deltas import UNKNOWN, Doubt, PastDeltas
from thinwire.membership.testing.cluster import SimulatedCluster

COUNTED = {number: (0, ("oslo",), "") for number in (0, 1)}


def doubt(number: int) -> Doubt:
    return Doubt(number, Ready(0, torch.zeros(1), 1.0, 0, {}), {})


@pytest.mark.parametrize("number", [0, 1])
def test_only_a_doubted_round_that_others_counted_is_past(number: int) -> None:
    past, agreed = PastDeltas(), GlobalState([], [], round=9, counted={number: COUNTED[number]})
    assert not past.counted_in(agreed, {}, "oslo", 0)
    past.doubted(of := doubt(number))
    assert past.counted_in(agreed, {}, "oslo", 0) is of and not past.counted_in(agreed, agreed.counted, "oslo", 0)
    assert not past.counted_in(agreed, {}, "bern", 0) and not past.counted_in(agreed, {}, "oslo", 1)


def test_two_doubted_rounds_or_one_that_may_be_dropped_are_not_known() -> None:
    past, agreed = PastDeltas(), GlobalState([], [], round=9, counted=COUNTED)
    past.doubted(doubt(0))
    past.start_again()
    assert past.counted_in(agreed, {}, "oslo", 0) == UNKNOWN
    past.forget(0)
    past.doubted(doubt(0))
    past.doubted(doubt(1))
    assert past.counted_in(agreed, {}, "oslo", 0) == UNKNOWN


def test_a_round_since_the_checkpoint_counts_until_it_is_forgotten() -> None:
    past, agreed = PastDeltas([0], since=1), GlobalState([], [], round=9, counted=COUNTED)
    assert past.counted_in(agreed, {}, "oslo", 0) and not past.counted_in(agreed, {}, "oslo", 0, own=[1])
    past.forget(0)
    past.forget(0)
    assert not past.counted_in(agreed, {}, "oslo", 0)


def test_an_earlier_delta_without_which_a_later_one_is_held_is_not_known() -> None:
    """It was recalled when the later one was undone, so of the later one this replica holds the rest alone."""
    past, agreed = PastDeltas(), GlobalState([], [], round=9, counted=COUNTED)
    past.doubted(doubt(0), whole=False)
    assert past.counted_in(agreed, {}, "oslo", 0) == UNKNOWN


def test_what_feedback_held_back_is_dropped_if_a_history_counted_it_after_others_took_the_samples() -> None:
    """A round of unknown result; then the progress is dropped, and its feedback is not; then a member comes in whose history has that round."""
    toy = Toy(SimulatedCluster(), "oslo", RecordedRun())
    loop, outcomes = toy.elastic.rounds.loop, toy.elastic.rounds._mail.outcomes
    loop._past.doubted(doubt(0))
    loop._drop()
    assert [(outcome.anew, outcome.spent) for outcome in outcomes] == [(True, False)] * 2
    outcomes.clear()
    loop.agreed.round, loop.agreed.counted, loop._known = 1, {0: COUNTED[0]}, {}
    loop._take_over("rome")
    assert [(outcome.anew, outcome.spent) for outcome in outcomes] == [(True, True), (False, False)]
