"""Merges: `Keep` adds the steps of the flight to the anchor, `Mix` is an average, and each merge declares its properties."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.testing.toy import adamw, batch, inner_step, same_bits, toy, weights

EVERY, DELAY = 4, 2


def rounds(merge, delay):
    """The weights of each replica after every inner step, and its anchors."""
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


def test_keep_adds_the_steps_of_the_flight_to_the_anchor():
    """Until the landing the runs of `Keep` and `Mix(0)` are equal.

    `Mix(0)` drops the steps of the flight, so the landing sets the replicas to the mean of the departed weights. `Keep` adds to
    this mean the steps of the flight.
    """
    kept, thrown = rounds(tw.pieces.merge.Keep(), DELAY), rounds(tw.pieces.merge.Mix(0.0), DELAY)
    landing = EVERY + DELAY
    mean = (kept[0][0][EVERY] + kept[1][0][EVERY]) / 2
    for (seen, _), (other, _) in zip(kept, thrown):
        assert all(torch.equal(a, b) for a, b in zip(seen[:landing], other[:landing]))
        torch.testing.assert_close(other[landing], mean, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(seen[landing], mean, atol=1e-4)
    alone = rounds(tw.pieces.merge.Mix(1.0), DELAY)  # takes nothing from the anchor: the local steps alone
    for (seen, _), (own, _) in zip(kept, alone):
        torch.testing.assert_close(seen[landing], mean + own[landing] - own[EVERY], rtol=1e-5, atol=1e-6)


def test_keep_without_a_delay_has_the_bits_of_mix_0():
    for (a, _), (b, _) in zip(rounds(tw.pieces.merge.Keep(), 0), rounds(tw.pieces.merge.Mix(0.0), 0)):
        assert all(torch.equal(x, y) for x, y in zip(a, b))


def unsent(share, start, step):
    """The parameters of two replicas and their residuals after the first landing; each starts at 0 and moves by `start[rank]` a step."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(EVERY, 1),
        codec=tw.codecs.TopK(0.25, tw.codecs.Identity()),
        policy=tw.pieces.policies.DenseLast(tw.codecs.Identity()),
        feedback=tw.pieces.feedback.Feedback(),
        merge=tw.pieces.merge.KeepUnsent(share),
    )

    def replica(group):
        model = torch.nn.Linear(4, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with tw.Replica(strategy, model, optimizer, group) as trained:
            for _ in range(step):
                model.weight.grad = -torch.tensor([start[group.rank]])
                optimizer.step()
            during = model.weight.detach().clone()[0], trained.state()[0]["0.feedback.residual"].clone()
        return *during, model.weight.detach()[0]

    return tw.run_threads(2, replica, timeout=600.0)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_what_was_not_sent_stays_in_the_parameters(share):
    """With the largest of four values sent, θ ← anchor − ρ·e + flight and e ← (1 − ρ)·e; the dense end is the plain mean of all steps."""
    moves = ([8.0, 4.0, 2.0, 1.0], [1.0, 2.0, 4.0, -8.0])
    trained = unsent(share, moves, EVERY + 1)  # departs after 4 steps, lands after 5
    sent = torch.tensor([[-8.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 8.0]]) * EVERY
    anchor = -sent.mean(0)
    for (during, residual, _), move, own in zip(trained, torch.tensor(moves), sent):
        rest = -EVERY * move - own
        assert torch.equal(residual, (1 - share) * rest)
        assert torch.equal(during, anchor - share * rest + move)
    # The last round of before departs in the last step, lands in it, or has landed.
    for steps in (EVERY, EVERY + 1, EVERY + 2):
        for *_, final in unsent(share, moves, steps):
            assert torch.equal(final, steps * torch.tensor(moves).mean(0))


def test_what_stays_is_subtracted_in_the_wider_type():
    leave, exact = tw.pieces.merge.KeepUnsent(0.5).leave, 1 + 2**-40
    for dtype, due in ((torch.float64, exact - 0.25), (torch.float32, 0.75), (torch.bfloat16, 0.75)):
        parameter, residual = torch.tensor([exact], dtype=dtype), torch.tensor([0.5])
        leave(parameter, residual)
        assert parameter.item() == due and parameter.dtype == dtype and residual.item() == 0.25


@pytest.mark.parametrize(
    "others",
    [
        {"feedback": None},
        {"feedback": tw.pieces.feedback.Feedback(1, 0.3)},
        {"schedule": tw.pieces.schedule.Every(4)},
    ],
    ids=str,
)
def test_what_was_not_sent_needs_a_residual_and_a_flight(others):
    settings = {"schedule": tw.pieces.schedule.Every(4, 1), "feedback": tw.pieces.feedback.Feedback()}
    with pytest.raises(tw.ConfigurationError, match="is the residual of a round"):
        tw.Strategy(codec=tw.codecs.TopK(0.1), merge=tw.pieces.merge.KeepUnsent(), **settings | others)
    for share in (0.0, 1.01):
        with pytest.raises(tw.ConfigurationError, match="above 0 and at most 1"):
            tw.pieces.merge.KeepUnsent(share)


class Undeclared(tw.pieces.merge.Merge):
    """A merge that declares nothing beyond the defaults."""

    def __repr__(self):
        return "Least()"


DECLARED = [  # whole_period, eager, forgets, keeps_flight, and whether replicas may come and go
    (Undeclared(), (False, False, False, False, False)),
    (tw.pieces.merge.Mix(), (False, False, True, False, True)),
    (tw.pieces.merge.Mix(0.5), (False, False, False, False, True)),
    (tw.pieces.merge.Keep(), (False, False, False, True, True)),
    (tw.pieces.merge.KeepUnsent(), (False, False, False, True, False)),
    (tw.pieces.merge.Eager(), (True, True, False, False, False)),
    (tw.pieces.merge.Reset(), (True, False, False, False, False)),
]


@pytest.mark.parametrize(("merge", "declared"), DECLARED, ids=str)
def test_merges_declare_their_properties(merge, declared):
    open_ = merge.needs_fixed_group == ""
    assert (merge.whole_period, merge.eager, merge.forgets, merge.keeps_flight, open_) == declared


def test_merges_that_need_a_fixed_group_say_why():
    assert tw.pieces.merge.Reset().needs_fixed_group.startswith("needs rounds that take a whole period")
    assert Undeclared().needs_fixed_group.startswith("does not declare") and Undeclared().alpha == 0.0
    with pytest.raises(tw.ConfigurationError, match="has no into"):
        Undeclared().into(torch.zeros(1), torch.zeros(1))


def test_mix_weights_the_local_value_and_the_anchor():
    """θ ← αθ + (1−α)·anchor; α = 0 gives the bits of the anchor and α = 1 those of the local value."""
    local, anchor = torch.randn(1000), torch.randn(1000)
    for alpha in (0.0, 0.25, 0.5, 1.0):
        mixed = torch.nn.Parameter(local.clone())
        tw.pieces.merge.Mix(alpha).into(mixed, anchor)
        torch.testing.assert_close(mixed.detach(), alpha * local + (1 - alpha) * anchor)
        assert alpha not in (0.0, 1.0) or same_bits(mixed.detach(), local if alpha else anchor)
    exact = torch.tensor([1 + 2**-40], dtype=torch.float64)
    tw.pieces.merge.Mix(1.0).into(exact, torch.zeros(1))
    assert exact.item() == 1 + 2**-40, "the local value in its own precision"
    taken = torch.nn.Parameter(local.clone())
    tw.pieces.merge.Keep().into(taken, anchor)
    assert same_bits(taken.detach(), anchor)
    for alpha, due in ((0.0, [5.0, 6.0]), (0.25, [4.0, 5.0]), (1.0, [1.0, 2.0])):
        parameter, anchor = torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([5.0, 6.0])
        tw.pieces.merge.Mix(alpha).into(parameter, anchor)
        assert parameter.tolist() == due and parameter.dtype == torch.bfloat16 and anchor.tolist() == [5.0, 6.0]
    for alpha in (-0.01, 1.01):
        with pytest.raises(tw.ConfigurationError, match="between 0"):
            tw.pieces.merge.Mix(alpha)
