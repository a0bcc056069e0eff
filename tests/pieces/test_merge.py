"""`Keep`: the anchor, and on it what was trained during the flight."""

from __future__ import annotations

import pytest
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


class Least(tw.pieces.merge.Merge):
    """Only what must be written."""

    def __repr__(self):
        return "Least()"


DECLARED = [  # whole_period, eager, forgets, keeps_flight, and whether replicas may come and go
    (Least(), (False, False, False, False, False)),
    (tw.pieces.merge.Mix(), (False, False, True, False, True)),
    (tw.pieces.merge.Mix(0.5), (False, False, False, False, True)),
    (tw.pieces.merge.Keep(), (False, False, False, True, True)),
    (tw.pieces.merge.Eager(), (True, True, False, False, False)),
    (tw.pieces.merge.Reset(), (True, False, False, False, False)),
]


@pytest.mark.parametrize(("merge", "declared"), DECLARED, ids=str)
def test_what_it_declares(merge, declared):
    open_ = merge.needs_fixed_group == ""
    assert (merge.whole_period, merge.eager, merge.forgets, merge.keeps_flight, open_) == declared


def test_why_replicas_may_not_come_and_go():
    assert tw.pieces.merge.Reset().needs_fixed_group.startswith("needs rounds that take a whole period")
    assert Least().needs_fixed_group.startswith("does not declare") and Least().alpha == 0.0
    with pytest.raises(tw.ConfigurationError, match="has no into"):
        Least().into(torch.zeros(1), torch.zeros(1))


def test_a_mix_by_hand():
    for alpha, due in ((0.0, [5.0, 6.0]), (0.25, [4.0, 5.0]), (1.0, [1.0, 2.0])):
        parameter, anchor = torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([5.0, 6.0])
        tw.pieces.merge.Mix(alpha).into(parameter, anchor)
        assert parameter.tolist() == due and parameter.dtype == torch.bfloat16 and anchor.tolist() == [5.0, 6.0]
    for alpha in (-0.01, 1.01):
        with pytest.raises(tw.ConfigurationError, match="between 0"):
            tw.pieces.merge.Mix(alpha)
