"""When a round of unequal replicas is held, and with whose deltas."""

from __future__ import annotations

import math

from thinwire.drivers.unequal.rounds import HeldRound, Interval, Quorum, ReportPace, own_every


def held_at(rounds, *arrivals):
    """When and with whom a round was held as these (time, rank) came, each after the deadline before it."""
    told = []
    for now, rank in [*arrivals, (math.inf, None)]:
        deadline = rounds.deadline()
        if deadline is not None and deadline < now:
            told += [(deadline, tuple(dict(one.waited))) for one in rounds.due(deadline)]
        if rank is not None:
            rounds.arrived(now, rank, 0)
            told += [(now, tuple(dict(one.waited))) for one in rounds.due(now)]
    return told


def test_the_first_round_waits_a_grace_for_replicas_that_have_not_sent_and_later_ones_do_not():
    """Without the others it would count a third of the first delta, and drop the rest from its replica."""
    assert held_at(Quorum(3, 1, 0.5), (8.0, 0), (10.0, 2), (11.0, 1)) == [(11.0, (0, 1, 2))]
    assert held_at(Quorum(3, 1, 0.0), (8.0, 0)) == [(8.0, (0,))]
    dead = held_at(Quorum(3, 1, 0.5), (8.0, 0), (8.0, 2), (15.5, 0), (16.0, 2), (23.0, 0), (24.0, 2))
    assert dead == [(12.0, (0, 2)), (16.0, (0, 2)), (24.0, (0, 2))]


def test_the_first_round_waits_no_longer_again_than_its_first_delta_took():
    assert held_at(Quorum(2, 1, 3.0, began=100.0), (108.0, 0)) == [(116.0, (0,))]
    assert held_at(Quorum(3, 2, 2.0), (4.0, 0), (6.0, 2)) == [(9.0, (0, 2))]  # 4 + the mean of 4 and 6


def test_intervals_are_moving_averages_and_a_delta_is_late_after_two_deviations():
    seen, found = Interval(last=10.0, mean=8.0), []
    for now in (22.0, 33.0, 38.5):  # intervals of 12, 11 and 5.5
        seen.heard(now)
        found.append((seen.last, seen.mean, seen.deviation, seen.expected))
    assert found == [(22.0, 9.0, 1.0, 33.0), (33.0, 9.5, 1.25, 45.0), (38.5, 8.5, 1.9375, 50.875)]


def test_a_later_round_waits_for_a_delta_that_is_expected_within_its_grace_and_no_longer():
    """Replica 1 sends 2 after replica 0. Its third delta is expected at 18 + 9.5 + 2·0.5 = 28.5, which is 24 + 0.5625·8, and does not come."""
    sent = (8.0, 0), (10.0, 1), (16.0, 0), (18.0, 1), (24.0, 0)
    assert held_at(Quorum(2, 1, 0.5625), *sent) == [(10.0, (0, 1)), (18.0, (0, 1)), (28.5, (0,))]
    assert held_at(Quorum(2, 1, 0.5), *sent) == [(10.0, (0, 1)), (18.0, (0, 1)), (24.0, (0,))]


def test_a_quorum_opens_the_round_and_is_no_larger_than_those_who_are_left():
    rounds = Quorum(3, 3, 0.0)
    assert held_at(rounds, (4.0, 2), (5.0, 0)) == [] and rounds.deadline() is None
    rounds.lost(1)
    assert rounds.deadline() == 5.0  # when the second of two had come
    assert rounds.due(4.5) == [] and rounds.due(6.0) == [HeldRound(0, 6.0, ((0, 1.0), (2, 2.0)))]
    for rank in (0, 2):
        rounds.arrived(9.0 + rank, rank, 0)
        rounds.lost(rank)  # a delta that was sent still counts
    assert rounds.due(11.0) == [HeldRound(0, 11.0, ((0, 2.0), (2, 0.0)))]
    alone = Quorum(1, 1, 0.0)
    alone.lost(0)
    alone.arrived(3.0, 0, 0)
    assert alone.deadline() == 3.0


def test_fragments_have_rounds_of_their_own():
    rounds = Quorum(2, 2, 0.5)
    for now, rank, fragment in ((1.0, 0, 1), (2.0, 0, 0), (3.0, 1, 0), (5.0, 1, 1)):
        rounds.arrived(now, rank, fragment)
    assert rounds.deadline() == 3.0
    assert rounds.due(4.0) == [HeldRound(0, 4.0, ((0, 2.0), (1, 1.0)))]
    assert rounds.due(4.0) == [] and rounds.deadline() == 5.0
    rounds.arrived(5.0, 0, 0)
    rounds.arrived(5.0, 1, 0)
    assert [one.fragment for one in rounds.due(5.0)] == [0, 1]
    assert rounds.due(99.0) == [] and rounds.deadline() is None


def test_the_last_message_may_take_twice_as_long_as_the_longest_delta_of_its_replica():
    assert Quorum(2, 1, 0.5).overdue(0, 0.25) == 0.75
    rounds = Quorum(2, 1, 0.5, patience=3.0, began=100.0)
    assert [rounds.overdue(0, since) for since in (101.0, 104.0)] == [104.0, 112.0]  # no delta of it has come
    for now, rank, fragment in ((108.0, 0, 0), (103.0, 0, 1), (150.0, 1, 0), (120.0, 0, 0)):
        rounds.arrived(now, rank, fragment)
    assert rounds.overdue(0, 130.0) == 152.0  # its interval is 9 with a deviation of 1


def test_each_replica_reports_as_often_as_the_others_and_at_least_after_each_step():
    assert [own_every(30, own, [4.0, 2.0, 1.0]) for own in (4.0, 2.0, 1.0)] == [51, 26, 13]
    assert own_every(1, 0.1, [0.1, 10.0]) == 1


def test_fragments_depart_in_turn_and_later_by_the_time_that_they_have_waited():
    pace = ReportPace(every=10, fragments=4)
    assert [pace.due(step, set()) for step in (9, 10, 12, 14, 17)] == [[], [0], [0, 1], [0, 1], [0, 1, 2, 3]]
    assert pace.due(12, {0}) == [1]
    pace.departed(1, 12, every=9)
    assert [pace.due(step, {0, 2, 3}) for step in (20, 21)] == [[], [1]]
    pace.landed(1, 3)
    assert [pace.due(step, {0, 2, 3}) for step in (23, 24)] == [[], [1]]
