"""What a replica sent before: which histories of others have counted it."""

from __future__ import annotations

import pytest
import torch
from elastic_toy import RecordedRun, Toy

from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.past_deltas import UNKNOWN, Doubt, PastDeltas
from thinwire.drivers.elastic.states import Event, State
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
    past, agreed = PastDeltas({0: 1}), GlobalState([], [], round=9, counted=COUNTED)
    assert past.counted_in(agreed, {}, "oslo", 0) and not past.counted_in(agreed, COUNTED, "oslo", 0)
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
    assert [(outcome.anew, outcome.spent) for outcome in outcomes[0]] == [(True, False)] * 2
    outcomes.clear()
    loop.agreed.round, loop.agreed.counted, loop._known = 1, {0: COUNTED[0]}, {}
    loop._take_over("rome")
    assert [(outcome.anew, outcome.spent) for outcome in outcomes[0]] == [(True, True), (False, False)]


def test_a_delta_in_doubt_whose_progress_was_dropped_is_not_taken_out_of_the_parameters() -> None:
    """While its round is not decided, others get its samples, so it goes back to the anchors. Then a member comes whose history counted it."""
    toy = Toy(SimulatedCluster(), "oslo", RecordedRun())
    elastic, loop = toy.elastic, toy.elastic.rounds.loop
    elastic._trained = 4.0
    toy.parameters[0].data += 4.0
    ready = elastic._bring(0, 4)
    loop._state = State.IN_DOUBT
    loop._remember(0, ready, {})
    loop._drop()
    loop.agreed.anchors[0] = loop.agreed.anchors[0] + 2.0
    loop.agreed.round, loop.agreed.counted, loop._known = 1, {0: COUNTED[0]}, {}
    loop._on(Event.CAUGHT_UP, "rome")
    elastic._pick_up(9)
    assert torch.equal(toy.parameters[0], loop.agreed.anchors[0]) and elastic.facts()["travelled"] == [4.0, 4.0]
    assert not elastic._waiting and not loop._past.held_since(None)


def test_what_a_checkpoint_says_of_sent_deltas_is_in_the_next_one_too() -> None:
    elastic = Toy(SimulatedCluster(), "oslo", RecordedRun()).elastic
    elastic.load(elastic.facts() | {"round": 9, "held_since": {"0": 3}})
    assert elastic.facts()["held_since"] == {"0": 3, "1": 9}


def test_a_doubt_is_held_from_its_round_on() -> None:
    past = PastDeltas({0: 4, 1: 4})
    past.doubted(doubt(1))
    past.doubted(doubt(2))
    assert past.held_since(None) == {0: 1, 1: 4} and past.held_since(doubt(0)) == {0: 0, 1: 4}
