"""When a round of unequal replicas is held, and with whose deltas."""

from __future__ import annotations

import math

from thinwire.decoupled.rounds import Quorum


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
