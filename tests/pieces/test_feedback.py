"""Law 3 with lossy codecs: the sum of the estimates and the residual is the sum of the deltas."""

from __future__ import annotations

import pytest
import torch
from pieces import FEEDBACKS
from torch import nn

import thinwire as tw
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.testing.values import roundtrip

CODECS = [
    tw.codecs.TopK(0.1),
    tw.codecs.TopK(0.3, tw.codecs.E3M0(8)),
    tw.codecs.ChunkedTopK(20, 3, tw.codecs.Sign()),
    tw.codecs.Sign(),
    tw.codecs.Int(2, 16),
]
feedbacks = pytest.mark.parametrize("feedback", [row.piece for row in FEEDBACKS], ids=str)


def deltas(rounds: int, n: int = 101) -> torch.Tensor:
    return torch.randn(rounds, n, generator=torch.Generator().manual_seed(0)) + 0.5


def run_rounds(
    feedback: tw.pieces.feedback.Feedback, codec: tw.codecs.Codec, signals: torch.Tensor
) -> tuple[list, list, dict]:
    """One replica's rounds: the sent values, the estimates and the last state."""
    state, sent, estimates = feedback.init(signals.shape[1]), [], []
    for number, delta in enumerate(signals):
        before = {name: value.clone() for name, value in state.items()}
        c = roundtrip(codec, feedback.signal(delta, state), Key(round=number))
        after = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
        estimate = feedback.settle(delta, c, c.clone(), state, after)
        assert all(same_bits(before[name], state[name]) for name in before), "changed in place"
        assert after.keys() == before.keys() == feedback.init(3).keys()
        state = after
        sent.append(c)
        estimates.append(estimate)
    return sent, estimates, dict(state)


@pytest.mark.parametrize("row", FEEDBACKS, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_estimates_and_residual_sum_to_the_deltas(row, codec):
    """Σ estimates + e = Σ deltas with any codec where the row claims `conserves`, and not elsewhere."""
    signals = deltas(30)
    _, estimates, state = run_rounds(row.piece, codec, signals)
    total = sum(estimates) + state.get("residual", 0)
    if "conserves" in row.claims:
        torch.testing.assert_close(total, signals.sum(0), rtol=1e-4, atol=1e-4)
    else:
        assert not torch.allclose(total, signals.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_residual_decays_by_beta(codec):
    """κ = 0, η = β: e_T = Σ β^(T−t) (s_t − c_t)."""
    signals = deltas(20)
    sent, _, state = run_rounds(tw.pieces.feedback.Feedback(0, 0.9, 0.9), codec, signals)
    due = sum(0.9 ** (19 - t) * (s - c) for t, (s, c) in enumerate(zip(signals.double(), sent)))
    torch.testing.assert_close(state["residual"].double(), due, rtol=1e-4, atol=1e-4)


@feedbacks
def test_feedback_changes_nothing_with_a_lossless_codec(feedback):
    signals = deltas(10)
    _, estimates, state = run_rounds(feedback, tw.codecs.Identity(), signals)
    if feedback.alpha == 1:
        torch.testing.assert_close(torch.stack(estimates), signals, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.get("residual", torch.zeros(101)), torch.zeros(101), rtol=0, atol=1e-5)


def test_a_reference_converges_to_a_constant_delta():
    """EF21 sends differences, so all of a constant delta arrives in time. Without feedback only a tenth arrives."""
    signals = deltas(1).expand(40, 101)
    _, estimates, _ = run_rounds(
        tw.pieces.feedback.Feedback(1, 0.0), tw.codecs.TopK(0.1, tw.codecs.Identity()), signals
    )
    torch.testing.assert_close(estimates[-1], signals[0])


def test_decayed_feedback_follows_the_listing_of_sparse_loco():
    """E ← βE + Δ; send top-k of E; E ← E − sent (specification, j2)."""
    codec, signals, e = tw.codecs.ChunkedTopK(20, 3), deltas(12), torch.zeros(101)
    sent, _, state = run_rounds(tw.pieces.feedback.Feedback(0, 0.95, 0.95), codec, signals)
    for delta, got in zip(signals, sent):
        e = 0.95 * e + delta
        due = roundtrip(codec, e)
        torch.testing.assert_close(got, due)
        e = e - due
    torch.testing.assert_close(state["residual"], e, rtol=1e-4, atol=1e-5)


# ---- in a replica


def train(strategy: tw.Strategy, rounds: int, poisoned: int | None) -> list[tuple[torch.Tensor, dict]]:
    """The anchor and the feedback after each step of three replicas with eight weights, SGD (lr 1) and powers of two as gradients."""

    def replica(group: tw.Group) -> list[tuple[torch.Tensor, dict]]:
        model = nn.Linear(8, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        trace = []
        with tw.Replica(strategy, model, optimizer, group) as attached:
            for step in range(rounds * strategy.schedule.every + 1):
                model.weight.grad = (2.0 ** -torch.arange(8.0)).view(1, 8) * 2.0**-group.rank
                if step == poisoned and group.rank == 1:
                    model.weight.grad[0, 3] = float("nan")
                optimizer.step()
                kept = {n: t.clone() for n, t in attached.state()[0].items() if ".feedback." in n}
                trace.append((attached.anchors()[0].clone(), kept))
        kept = {n: t for n, t in attached.state()[0].items() if ".feedback." in n}
        return [*trace, (attached.anchors()[0], kept)]

    return tw.run_threads(3, replica, timeout=600.0)


@pytest.mark.parametrize("row", [row for row in FEEDBACKS if "conserves" in row.claims], ids=str)
@pytest.mark.parametrize(
    "codec",
    [tw.codecs.TopK(0.25, tw.codecs.Identity()), tw.codecs.Sign(), tw.codecs.Int(4, 4, "fp32", "stochastic")],
    ids=str,
)
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("poisoned", [None, 5])
def test_anchor_moves_and_residuals_sum_to_the_mean_progress(row, codec, delay, poisoned):
    """Σ moves of the anchor + mean residual = mean progress, also over a refused round, whose delta is sent later."""
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(3, delay), codec=codec, feedback=row.piece, merge=tw.pieces.merge.Mix(0.0)
    )
    traces = train(strategy, 6, poisoned)
    if delay == 0:  # with a delay Mix(0) drops the steps during the flight
        lost = {1: 3} if poisoned else {}  # replica 1 restarts from the anchor at the end of its second period
        progress = sum((19 - lost.get(rank, 0)) * 2.0 ** -torch.arange(8.0) * 2.0**-rank for rank in range(3)) / 3
        held = sum(trace[-1][1]["0.feedback.residual"] for trace in traces) / 3
        torch.testing.assert_close(1 - traces[0][-1][0] + held, progress, rtol=1e-5, atol=1e-5)
    if poisoned:
        at = 5 + delay  # the round of steps 3 … 5 departs at its end
        for trace in traces:
            (anchor, feedback), (before, feedback_before) = trace[at], trace[at - 1]
            assert same_bits(anchor, before)
            assert all(same_bits(feedback[n], feedback_before[n]) for n in feedback), "a refused round changed feedback"
            assert any(not same_bits(feedback[n], trace[-1][1][n]) for n in feedback)


@pytest.mark.parametrize(
    "numbers",
    [
        (0.5,),
        (2,),
        (0, -0.1),
        (0, 1.1),
        (0, 0.0),
        (0, 1.0, -0.1),
        (0, 1.0, 1.1),
        (0, 1.0, 1.0, 0.0),
        (0, 1.0, 1.0, 1.1),
    ],
    ids=str,
)
def test_invalid_coefficients_are_refused(numbers):
    with pytest.raises(tw.ConfigurationError, match="kappa 0 or 1, eta and beta"):
        tw.pieces.feedback.Feedback(*numbers)
    tw.pieces.feedback.Feedback(1, 0.0, 0.0, 1.0)


def test_signals_follow_the_equation():
    """z = α·(s − h) + η·e, in one pass or in two."""
    s, state = torch.tensor([3.0, -1.0]), {"residual": torch.tensor([4.0, 2.0]), "reference": torch.tensor([1.0, 1.0])}
    for numbers, z in (
        ((0, 1.0), [7.0, 1.0]),
        ((0, 0.5), [5.0, 0.0]),
        ((0, 0.5, 1.0, 0.5), [3.5, 0.5]),
        ((1, 0.5, 1.0, 0.5), [3.0, 0.0]),
        ((1, 0.0, 1.0, 0.5), [1.0, -1.0]),
    ):
        assert tw.pieces.feedback.Feedback(*numbers).signal(s, state).tolist() == z


def test_a_reference_needs_the_mean_over_all():
    sparse = tw.codecs.TopK(0.1)
    joint = tw.lab.codecs.OverSenders(sparse)
    with pytest.raises(tw.ConfigurationError, match="with kappa=1 the mean over all is needed"):
        tw.pieces.feedback.Feedback(1, 0.0).check(joint)
    tw.pieces.feedback.Feedback().check(joint)
    tw.pieces.feedback.Feedback(1, 0.0).check(sparse)


def test_a_reference_needs_a_fixed_group():
    needs = [tw.pieces.feedback.Feedback(*kept).needs_fixed_group for kept in ((0, 1.0), (1, 1.0))]
    assert needs[0] == "" and needs[1].startswith("keeps the mean of all references")


def test_a_checkpoint_of_another_feedback_is_refused():
    (group,) = tw.ThreadGroup.create(1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = tw.Replica(tw.Strategy(), model, optimizer, group)
    tensors, facts = plain.state()
    plain.close()
    strategy = tw.Strategy(feedback=tw.pieces.feedback.Feedback())
    with tw.Replica(strategy, model, optimizer, group) as attached:
        with pytest.raises(
            tw.CheckpointError, match="has the feedback nothing in the checkpoint, this strategy keeps residual of 6"
        ):
            attached.load_state(tensors, facts | {"strategy": repr(strategy)})
