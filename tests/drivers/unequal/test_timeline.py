"""What replicas of given speeds do after which inner step, in virtual time."""

from __future__ import annotations

import pytest

from thinwire.drivers.unequal.rounds import HeldRound
from thinwire.drivers.unequal.timeline import Actions, Timeline, done

NOTHING = Actions((), (), ())


def actions(line, steps):
    """The actions after each of the first `steps` inner steps, without those steps after which there are none."""
    told = {step: line.actions(step) for step in range(1, steps + 1)}
    return {step: one for step, one in told.items() if one != NOTHING}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_lands_after_the_first_step_that_ends_a_delay_later(rank):
    """Replica 0 takes two steps while replica 1 takes one. Each departs at 4, 8, ...; a mean step takes 4/3, so rounds land at 6, 10, ..."""
    first, second = (HeldRound(0, at, ((0, 0.0), (1, 0.0))) for at in (4.0, 8.0))
    line = Timeline((1.0, 2.0), every=3, fragments=1, quorum=2, grace=0.0, delay=1, own=rank)
    assert line.every == [4, 2] and line.latency == 4 / 3
    sent, one, again, other = ((4, 6, 8, 10), (2, 3, 4, 5))[rank]
    assert actions(line, other) == {
        sent: Actions((), (0,), ()),
        one: Actions(((0, first),), (), ()),
        again: Actions((), (0,), ()),
        other: Actions(((1, second),), (), ()),
    }


def test_without_a_delay_a_round_lands_after_the_step_in_which_it_departs():
    line = Timeline((1.0, 1.0), every=4, fragments=2, quorum=2, grace=0.0, delay=0, own=1)
    both = ((0, 0.0), (1, 0.0))
    assert actions(line, 8) == {
        4: Actions((), (0,), ((0, HeldRound(0, 4.0, both)),)),
        6: Actions((), (1,), ((1, HeldRound(1, 6.0, both)),)),
        8: Actions((), (0,), ((2, HeldRound(0, 8.0, both)),)),
    }


def test_a_delta_in_flight_departs_again_only_after_it_has_landed_and_later_by_the_time_that_it_waited():
    """Replica 0's first delta waits from 2 to 4 for that of replica 1, whose step takes 4. So the next one departs 2 later, at 6."""
    line = Timeline((1.0, 4.0), every=1, fragments=1, quorum=2, grace=0.0, delay=0, own=0)
    assert line.every == [2, 1]
    told = actions(line, 8)
    assert [step for step, one in told.items() if one.departs] == [2, 6]
    waited = [(number, held.waited) for one in told.values() for number, held in (*one.before, *one.after)]
    assert waited == [(0, ((0, 2.0), (1, 0.0))), (1, ((0, 2.0), (1, 0.0)))]


def test_a_round_may_be_held_between_two_steps_at_the_end_of_its_grace():
    """Replica 0's delta took 12 until it departed; its round waits for a quarter of that, and lands after the step that ends at 16."""
    line = Timeline((2.0, 100.0), every=3, fragments=1, quorum=1, grace=0.25, delay=0, own=0)
    assert line.every == [6, 1]
    held = HeldRound(0, 15.0, ((0, 3.0),))
    assert actions(line, 13) == {6: Actions((), (0,), ()), 8: Actions(((0, held),), (), ())}
    assert line.actions(14).departs == (0,)  # 6 steps later, and 1.5 for the wait, rounded


def test_progress_counts_the_steps_that_end_before_the_next_one_can():
    assert [done((1.0, 2.0, 4.0), 0, step) for step in (0, 1, 2, 3, 4)] == [0, 1, 3, 4, 7]
    assert [done((1.0, 2.0, 4.0), 2, step) for step in (0, 1)] == [4, 11]
    assert done((0.5, 2.0), 1, 1) == 1 + 7
