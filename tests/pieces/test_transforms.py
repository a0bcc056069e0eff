"""Filters without communication, with feedback and a codec: clipping, DGC and 1-bit Adam against their papers."""

from __future__ import annotations

import math

import pytest
import torch
from pieces import FILTERS

import thinwire as tw
from thinwire.pieces.filters import said, settled
from thinwire.pieces.transforms import NEVER_KNOWN
from thinwire.rng import Key
from thinwire.testing.strategies import counted, counted_as_predicted
from thinwire.testing.toy import batch, inner_step, journey, same_bits, toy, weights
from thinwire.testing.values import roundtrip

N, IDENTITY = 101, tw.codecs.Identity()


def signals(rounds: int, n: int = N) -> torch.Tensor:
    return torch.randn(rounds, n, generator=torch.Generator().manual_seed(0)) + 0.3


def sgd(momentum):
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


class FilterChain:
    """One replica with filters, feedback and a codec. It records the filters' outputs, the sent values and the estimates."""

    def __init__(self, filters, feedback=None, codec=IDENTITY, n=N, size=1):
        self.filters = tuple(one.fitted(codec, n, size) for one in filters)
        self.states = tuple(one.init(n) for one in self.filters)
        self.feedback, self.codec = feedback, codec
        self.held = feedback.init(n) if feedback else {}
        self.said, self.sent, self.estimates = [], [], []

    def round(self, s):
        kept = [{name: value.clone() for name, value in state.items()} for state in self.states]
        inputs = said(self.filters, self.states, s)
        z = self.feedback.signal(inputs[-1], self.held) if self.feedback else inputs[-1]
        dense = any(one.dense(state) for one, state in zip(self.filters, self.states))
        c = z.clone() if dense else roundtrip(self.codec, z, Key(round=len(self.sent)))
        after = {name: torch.empty_like(value) for name, value in self.held.items()}
        mean = self.feedback.settle(inputs[-1], c, c.clone(), self.held, after) if self.feedback else c.clone()
        estimate, states = settled(self.filters, self.states, inputs, c, mean, after)
        for before, state, following in zip(kept, self.states, states):
            assert all(same_bits(before[name], state[name]) for name in state), "changed in place"
            assert before.keys() == following.keys()
        self.said.append(inputs[-1])
        self.sent.append(c)
        self.estimates.append(estimate)
        self.states, self.held = states, after
        return estimate


@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_filters_keep_the_claims_of_their_rows(row):
    """A filter that `passes` changes no mean. States keep the names and sizes of `init`. Equal inputs give equal outputs."""
    a, b = FilterChain([row.piece]), FilterChain([row.piece])
    for s in signals(8):
        assert same_bits(a.round(s), b.round(s))
    due = row.piece.init(N)
    assert {n: t.shape for n, t in a.states[0].items()} == {n: t.shape for n, t in due.items()}
    assert ("passes" in row.claims) == same_bits(torch.stack(a.estimates), signals(8))
    assert (
        isinstance(row.piece, tw.pieces.filters.Filter)
        and row.piece.fitted(tw.codecs.Identity(), N, 1).init(0).keys() == due.keys()
    )


@pytest.mark.parametrize("row", FILTERS, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e30])
def test_zeros_and_extreme_values_give_finite_estimates(row, value):
    line = FilterChain([row.piece], tw.pieces.feedback.Feedback(), tw.codecs.TopK(0.1))
    for _ in range(6):
        estimate = line.round(torch.full((N,), value))
        assert torch.isfinite(estimate).all() or value == 1e30  # its square overflows: the round is refused
    assert value or not estimate.any(), "out of nothing comes nothing"


@pytest.mark.parametrize("row", FILTERS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_stay_so(row, value):
    """The codec then refuses them."""
    poisoned = signals(1)[0]
    poisoned[3] = value
    assert not torch.isfinite(row.piece.signal(poisoned, row.piece.init(N))).all()


def test_empty_fragments_pass_every_filter():
    for row in FILTERS:
        assert FilterChain([row.piece], n=0).round(torch.empty(0)).shape == (0,)


# ---- clipping


def test_clip_bounds_the_norm_by_root_m_times_the_threshold():
    """For means of M: a longer vector gets the norm √M·c, a shorter one keeps its bits."""
    s = signals(1)[0]
    norm = float(s.norm())
    for size in (1, 2, 4):
        most = math.sqrt(size) * 0.5
        clip = tw.pieces.transforms.Clip(0.5).fitted(tw.codecs.Identity(), N, size)
        assert float(clip.signal(s, {}).norm()) == pytest.approx(most, rel=1e-5)
        small = s * (0.9 * most / norm)
        assert same_bits(clip.signal(small, {}), small)
    assert same_bits(tw.pieces.transforms.Clip(0.0).signal(s, {}), s)


def test_clip_bounds_a_vector_whose_norm_overflows_fp32():
    huge = torch.full((N,), 1e30)
    assert float(tw.pieces.transforms.Clip(1.0).signal(huge, {}).norm()) == pytest.approx(1.0, rel=1e-5)


# ---- Deep Gradient Compression (arXiv 1712.01887)


def test_dgc_with_a_lossless_codec_is_momentum_sgd_only_without_masking():
    """With masking it is plain SGD, because masking clears u at each step."""
    velocity = torch.zeros(N)
    unmasked = FilterChain([tw.pieces.transforms.Momentum(0.9, "nothing")], tw.pieces.feedback.Feedback())
    masked = FilterChain([tw.pieces.transforms.Momentum(0.9)], tw.pieces.feedback.Feedback())
    for s in signals(20):
        velocity = 0.9 * velocity + s
        torch.testing.assert_close(unmasked.round(s), velocity, rtol=1e-5, atol=1e-6)
        assert same_bits(masked.round(s), s)


def test_a_run_with_unmasked_momentum_trains_like_momentum_sgd():
    momentum = tw.pieces.transforms.Momentum(0.5, "nothing")
    strategy = tw.Strategy(filters=(momentum,), feedback=tw.pieces.feedback.Feedback())
    (run,) = journey(strategy, 1, steps=4, optimizer=sgd(0.0))
    model = toy()
    optimizer = sgd(0.5)(model)
    for step in range(1, 5):
        inner_step(model, optimizer, *batch(0, 0, step))
    torch.testing.assert_close(run.final, weights(model))


@pytest.mark.parametrize("clears", ["sent", "nothing"])
def test_sent_values_and_residual_of_dgc_sum_to_the_momenta(clears):
    """Σ sent + v_T = Σ u_t, with and without masking."""
    line = FilterChain([tw.pieces.transforms.Momentum(0.9, clears)], tw.pieces.feedback.Feedback(), tw.codecs.TopK(0.1))
    for s in signals(40):
        line.round(s)
    torch.testing.assert_close(sum(line.sent) + line.held["residual"], sum(line.said), rtol=1e-4, atol=1e-3)


def test_dgc_follows_its_listing():
    """u ← m·u + g; v ← v + u; the largest values of v are sent and cleared in u and v."""
    u, v, line = (
        torch.zeros(N),
        torch.zeros(N),
        FilterChain(
            [tw.pieces.transforms.Momentum(0.9)],
            tw.pieces.feedback.Feedback(),
            tw.codecs.TopK(0.1, tw.codecs.Identity()),
        ),
    )
    for g in signals(20):
        u = 0.9 * u + g
        v = v + u
        mask = torch.zeros(N, dtype=torch.bool)
        mask[v.abs().topk(math.ceil(0.1 * N)).indices] = True
        torch.testing.assert_close(line.round(g), v * mask, rtol=1e-5, atol=1e-5)
        u, v = u * ~mask, v * ~mask
        torch.testing.assert_close(line.states[0]["velocity"], u, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(line.held["residual"], v, rtol=1e-5, atol=1e-5)


def test_rarely_sent_values_have_the_weights_of_momentum():
    """A coordinate of gradient 1 that is sent every sixth step has the weights Σ m^j of momentum (Eq. 4), not 1 (Eq. 6)."""
    corrected = FilterChain(
        [tw.pieces.transforms.Momentum(0.9, "nothing")], tw.pieces.feedback.Feedback(), tw.codecs.TopK(0.5), n=2
    )
    plain = FilterChain([], tw.pieces.feedback.Feedback(), tw.codecs.TopK(0.5), n=2)
    for line in (corrected, plain):
        for t in range(6):
            # The larger one is sent, except in the last round.
            line.round(torch.tensor([1.0, 0.0 if t == 5 else 100.0]))
    due = sum(sum(0.9**j for j in range(k + 1)) for k in range(6))
    # In the sixth round the gradient 100 ends, but its momentum is still larger: the residual holds all of the first coordinate.
    held = [float(line.held["residual"][0] + sum(line.sent)[0]) for line in (corrected, plain)]
    assert held == [pytest.approx(due, rel=1e-5), pytest.approx(6.0)]


def test_vectors_that_are_sent_whole_keep_their_momentum():
    """Vectors beside matrices are sent dense and their momentum is not cleared: they train by momentum SGD."""
    codec = tw.lab.codecs.Each(tw.codecs.TopK(0.1), least=20).fitted(((6, 6), (7,), (3, 3)))
    line, velocity = (
        FilterChain([tw.pieces.transforms.Momentum(0.9)], tw.pieces.feedback.Feedback(), codec, n=52),
        torch.zeros(52),
    )
    for s in signals(10, 52):
        velocity = 0.9 * velocity + s
        estimate = line.round(s)
        torch.testing.assert_close(estimate[36:], velocity[36:], rtol=1e-5, atol=1e-5)
        assert 1 <= int((estimate[:36] != 0).sum()) <= 4


# ---- 1-bit Adam (arXiv 2102.02888)


def adam(gradients, freeze, beta1=0.9, beta2=0.999, eps=1e-8):
    """Yield Adam's steps without bias correction, with v frozen after `freeze` steps."""
    m, v = torch.zeros(N), torch.zeros(N)
    for t, g in enumerate(gradients):
        m = beta1 * m + (1 - beta1) * g
        if t < freeze:
            v = beta2 * v + (1 - beta2) * g * g
        yield m / (v.sqrt() + eps)


@pytest.mark.parametrize("freeze", [1, 7, 100])
def test_one_bit_adam_with_a_lossless_codec_is_adam_with_frozen_v(freeze):
    """With a freeze after the run it is Adam."""
    line = FilterChain([tw.pieces.transforms.Moments(freeze=freeze)], tw.pieces.feedback.Feedback())
    for t, (s, due) in enumerate(zip(signals(20), adam(signals(20), freeze))):
        torch.testing.assert_close(line.round(s), due, rtol=1e-4, atol=1e-5)
        assert line.filters[0].dense(line.states[0]) == (t + 1 < freeze)


def test_sent_values_and_residual_of_one_bit_adam_sum_to_the_momenta():
    """Σ q + δ = Σ m_i over the rounds after the freeze."""
    line = FilterChain([tw.pieces.transforms.Moments(freeze=5)], tw.pieces.feedback.Feedback(), tw.codecs.Sign("l2"))
    for s in signals(45):
        line.round(s)
    torch.testing.assert_close(sum(line.sent[5:]) + line.held["residual"], sum(line.said[5:]), rtol=1e-4, atol=1e-3)


def test_coordinates_without_gradients_do_not_move():
    """Half of the coordinates never have a gradient: their estimates and residuals stay 0.

    Without the mask each of them has a residual, and one-bit noise divided by √v = 0 would be a huge step.
    """
    codec, touched = tw.codecs.Sign("l2"), torch.arange(N) % 2 == 0
    line, bare = (
        FilterChain([tw.pieces.transforms.Moments(freeze=5)], tw.pieces.feedback.Feedback(), codec),
        FilterChain([], tw.pieces.feedback.Feedback(), codec),
    )
    for s in signals(100):
        estimate = line.round(s * touched)
        bare.round(s * touched)
        assert not estimate[~touched].any() and not line.held["residual"][~touched].any()
    assert estimate[touched].all() and bare.held["residual"][~touched].all()


def test_a_coordinate_whose_gradients_begin_after_the_freeze_does_not_move():
    line = FilterChain([tw.pieces.transforms.Moments(freeze=5)], tw.pieces.feedback.Feedback(), tw.codecs.Sign("l2"))
    for t, s in enumerate(signals(30)):
        s = s.clone()
        s[0] = 5.0 if t >= 10 else 0.0
        estimate = line.round(s)
    assert estimate[0] == 0 and line.held["residual"][0] == 0 and torch.isfinite(estimate).all()
    assert not any(one[0] for one in line.said), "it is not sent"
    assert line.states[0]["phase"].tolist() == [5.0, 0.0, 1.0]


def test_the_variance_test_freezes_v_once_its_norm_is_steady():
    """For gradients of constant size v's norm approaches its limit as 1 − β₂^t. The test passes where this is within the ratio."""
    beta2, ratio = 0.9, 0.96
    moments = tw.pieces.transforms.Moments(beta2=beta2, freeze=tw.pieces.transforms.Settled(ratio, least=1))
    line, frozen = FilterChain([moments]), 0
    for t, s in enumerate(signals(200).sign(), 1):
        line.round(s)
        if not moments.dense(line.states[0]):
            frozen = t
            break
    window = round(1 / (1 - beta2))
    due = next(t for t in range(window, 200, window) if (1 - beta2 ** (t - window)) / (1 - beta2**t) >= ratio)
    assert frozen == due > window


def test_the_variance_test_waits_for_its_least_rounds():
    moments = tw.pieces.transforms.Moments(beta2=0.5, freeze=tw.pieces.transforms.Settled(0.1, least=50))
    line = FilterChain([moments])
    for t, s in enumerate(signals(60), 1):
        line.round(s)
        assert moments.dense(line.states[0]) == (t < 50)
    known = (
        tw.pieces.transforms.Moments(freeze=7),
        tw.pieces.transforms.Moments(freeze=tw.pieces.transforms.Settled(1.0, 5)),
    )
    assert [one.full for one in known] == [7, NEVER_KNOWN], "rounds in full at most"


def test_bytes_are_predicted_in_fp32_while_only_the_run_knows_when_v_is_frozen():
    settled, codec = tw.pieces.transforms.Settled(0.5, 2), tw.codecs.E3M0()
    strategy = tw.Strategy(codec=codec, filters=(tw.pieces.transforms.Moments(beta2=0.5, freeze=settled),))
    plain = tw.Strategy(codec=codec)
    assert strategy.nbytes_per_period([1000], 2) == tw.Strategy().nbytes_per_period([1000], 2)
    assert strategy.bound.startswith("sizes of Moments(") and not plain.bound
    model = torch.nn.Linear(30, 30)
    after = plain.nbytes_per_period([((30, 30), (30,))], 2)
    assert f"after the last round in fp32: {after:,} bytes a period (predicted)" in strategy.describe(model, 2)
    counted_as_predicted(strategy, *counted(strategy, 2, steps=8))  # frozen after its fourth round
    assert "rounds 0 to" not in strategy.describe(model, 2) and "after" not in plain.describe(model, 2)


def test_a_norm_that_no_longer_changes_passes_the_test_with_ratio_1():
    """v of ones is 1 − 2^−t, and 1 in fp32 after 25 rounds. The test compares every second round."""
    moments = tw.pieces.transforms.Moments(beta2=0.5, freeze=tw.pieces.transforms.Settled(1.0, least=1))
    line = FilterChain([moments])
    for _ in range(40):
        line.round(torch.ones(N))
    assert line.states[0]["square"].eq(1.0).all() and not moments.dense(line.states[0])


def test_the_last_filter_changes_the_estimate_first():
    line = FilterChain([tw.pieces.transforms.Signs(), tw.pieces.transforms.Moments()])
    (s,) = signals(1)
    assert torch.equal(line.round(s), s.sign()) and not line.states[0]


# ---- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.lab.codecs.Each(tw.codecs.TopK(), tw.lab.codecs.LowRank()), "it needs the shapes"),
        (lambda: tw.lab.codecs.Each(tw.codecs.TopK(), least=-1), "0 or more elements are needed"),
        (lambda: tw.Strategy(filters=tw.pieces.transforms.Clip()), "a tuple of Filters is needed"),
        (lambda: tw.Strategy(filters=(tw.pieces.transforms.Clip,)), "a tuple of Filters is needed"),
        (
            lambda: tw.Strategy(filters=(tw.pieces.transforms.Momentum(), tw.pieces.transforms.Moments())),
            "2 of them keep momentum, one owner is needed",
        ),
        (
            lambda: tw.Strategy(filters=(tw.pieces.transforms.Momentum(),), outer=tw.pieces.outer.Nesterov()),
            "momentum before the exchange and after it, one owner is needed",
        ),
        (lambda: tw.Strategy(inner=tw.pieces.inner_optimizers.SGD), r"AdamW\(\), SGD\(\), Muon\(\), SAM\(\) or None"),
    ],
)
def test_invalid_combinations_are_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        make()
