"""`Keep`: the anchor, and on it what was trained during the flight."""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, toy, weights

EVERY, DELAY = 4, 2


def rounds(merge, delay):
    """Of each replica: its weights after every inner step, and its anchors."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(EVERY, delay), merge=merge)

    def replica(group):
        model = toy()
        optimizer = adamw(model)
        seen = [weights(model)]
        with tw.Replica(strategy, model, optimizer, group) as trained:
            for step in range(1, EVERY + DELAY + 1):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                seen.append(weights(model))
        return seen, trained.anchors()

    return tw.run_threads(2, replica, timeout=600.0)


def test_the_steps_of_the_flight_are_kept_whole():
    """Up to the landing nothing differs from `Mix(0)`, which throws them away: with it the replicas are one after the landing, with
    `Keep` they are as far from the mean of what departed as they went during the flight."""
    kept, thrown = rounds(tw.pieces.merge.Keep(), DELAY), rounds(tw.pieces.merge.Mix(0.0), DELAY)
    landing = EVERY + DELAY
    mean = (kept[0][0][EVERY] + kept[1][0][EVERY]) / 2
    for (seen, _), (other, _) in zip(kept, thrown):
        assert all(torch.equal(a, b) for a, b in zip(seen[:landing], other[:landing]))
        torch.testing.assert_close(other[landing], mean, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(seen[landing], mean, atol=1e-4)
    alone = rounds(tw.pieces.merge.Mix(1.0), DELAY)  # lands nothing: the flight as it was trained
    for (seen, _), (own, _) in zip(kept, alone):
        torch.testing.assert_close(seen[landing], mean + own[landing] - own[EVERY], rtol=1e-5, atol=1e-6)


def test_without_a_flight_it_is_the_anchor():
    """Bit for bit as `Mix(0)`."""
    for (a, _), (b, _) in zip(rounds(tw.pieces.merge.Keep(), 0), rounds(tw.pieces.merge.Mix(0.0), 0)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
