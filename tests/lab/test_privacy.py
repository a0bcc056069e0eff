"""Differential privacy: the clip, the noise, the accountant, and private strategies in a replica."""

from __future__ import annotations

import importlib.util
import math
import secrets
import sys
from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire.comm import CountedGroup, Ledger
from thinwire.lab.privacy import gaussian
from thinwire.testing.toy import adamw, batch, inner_step, toy, weights

needs_accountant = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None, reason="the extra thinwire[privacy] is not installed"
)
QUIET = 1e-30  # noise that vanishes beside a delta in fp32


def clipped(x: torch.Tensor, clip: float = 1.0) -> torch.Tensor:
    return tw.lab.privacy.Privacy(clip, QUIET).apply(x.clone(), size=1)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(1000, generator=torch.Generator().manual_seed(0)),
        torch.full((7,), 3e38),
        torch.tensor([3e38, -3e38, 1.0, 1e-45]),
        torch.tensor([1e30]),
        torch.full((100_000,), 1e-2),
        torch.tensor([1.0 + 2**-20]),
        torch.tensor([-1.0]),
        torch.full((3,), 0.57735027),
    ],
    ids=lambda x: f"{x.numel()} up to {float(x.abs().max()):.3g}",
)
@pytest.mark.parametrize("clip", [1.0, 1e-3, 7e5])
def test_the_clip_bounds_every_norm(x, clip):
    """The direction stays. A vector within the clip keeps its bits."""
    y = clipped(x, clip)
    before, after = (float(torch.linalg.vector_norm(v, dtype=torch.float64)) for v in (x, y))
    assert after <= clip
    if before <= clip:
        assert torch.equal(x, y)
    else:
        assert after > clip * (1 - 1e-5)
        torch.testing.assert_close(y.double() / after, x.double() / before, rtol=1e-5, atol=1e-7)


def test_a_delta_of_zeros_becomes_noise_alone():
    assert not clipped(torch.zeros(5)).double().abs().gt(1e-25).any() and clipped(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so(bad):
    """The codec then refuses them. The clip must not turn them into numbers."""
    assert not torch.isfinite(clipped(torch.tensor([1.0, bad]))).all()


def test_leaving_out_one_replica_changes_the_sum_by_at_most_the_clip():
    """This holds for a delta of any size."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-3, 1.0, 1e20):
        deltas = [torch.randn(50, generator=generator) * (scale if m == 2 else 1.0) for m in range(4)]
        sums = [sum(clipped(d, 0.5).double() for m, d in enumerate(deltas) if m != left_out) for left_out in (None, 2)]
        assert float((sums[0] - sums[1]).norm()) <= 0.5


@pytest.mark.parametrize("size", [1, 4])
def test_the_noise_of_the_sum_has_the_requested_deviation(size):
    """χ² of 200,000 draws within five of its deviations, and the share beyond two deviations and the fourth moment of a normal law."""
    privacy, count = tw.lab.privacy.Privacy(clip=0.5, noise=3.0), 200_000
    total = sum(privacy.apply(torch.zeros(count), size).double() for _ in range(size)) / (3.0 * 0.5)
    assert abs(float(total.square().sum()) - count) < 5 * math.sqrt(2 * count)
    assert abs(float(total.mean())) < 5 / math.sqrt(count)
    assert abs(float((total.abs() > 2).double().mean()) - 0.0455) < 0.003
    assert abs(float(total.pow(4).mean()) - 3) < 0.12
    assert abs(float((total[:-1] * total[1:]).mean())) < 5 / math.sqrt(count)


def test_noise_does_not_repeat_or_follow_a_seed():
    torch.manual_seed(0)
    first = gaussian(1000)
    torch.manual_seed(0)
    second = gaussian(1000)
    assert not torch.isin(first, second).any() and gaussian(0).shape == (0,) and gaussian(7).shape == (7,)
    assert torch.isfinite(gaussian(100_001)).all()


def test_extreme_random_bytes_give_finite_noise(monkeypatch):
    for byte in (b"\0", b"\xff"):
        monkeypatch.setattr(secrets, "token_bytes", lambda n, b=byte: b * n)
        assert torch.isfinite(gaussian(4)).all() and float(gaussian(4).abs().max()) < 9
    for word, uniform in ((0, 2.0**-54), (1, 1.5 * 2.0**-53)):  # the two least of 2^53 steps
        monkeypatch.setattr(secrets, "token_bytes", lambda n, w=word: w.to_bytes(8, "little") * (n // 8))
        assert gaussian(3)[0].item() == pytest.approx(math.sqrt(-2 * math.log(uniform)))


# ---- the accountant


def closed_form(noise: float, rounds: int, delta: float) -> float:
    """min over α of T·α/(2z²) + log(1/δ)/(α − 1) (Mironov, 2017): at α = 1 + √(log(1/δ)/s), s = T/(2z²)."""
    s = rounds / (2 * noise**2)
    return s + 2 * math.sqrt(s * math.log(1 / delta))


@needs_accountant
def test_epsilon_lies_between_the_exact_value_and_the_closed_form():
    """z = 10, T = 100, δ = 1e-5: 5.30 by the plain conversion.

    The library's conversion is tighter, and never below the exact value of a Gaussian (Balle and Wang, 2018).
    """
    from dp_accounting import get_epsilon_gaussian

    assert closed_form(10.0, 100, 1e-5) == pytest.approx(5.30, abs=0.005)
    for noise, rounds, delta in ((10.0, 100, 1e-5), (1.0, 1, 1e-5), (4.0, 30, 1e-6), (50.0, 1000, 1e-9)):
        said = tw.lab.privacy.Privacy(1.0, noise, delta).epsilon(rounds)
        exact = get_epsilon_gaussian(noise / math.sqrt(rounds), delta)
        assert exact <= said <= closed_form(noise, rounds, delta) * 1.001
    assert tw.lab.privacy.Privacy(1.0, 10.0).epsilon(100) == pytest.approx(4.73, abs=0.01)


def test_the_accountant_gets_the_noise_that_each_observer_sees(monkeypatch):
    """A peer sees one packet with its share of the noise, 1/√M of all. This runs without the extra."""

    class Accountant:
        def compose(self, noise, rounds):
            self.told = noise, rounds

        def get_epsilon(self, delta):
            noise, rounds = self.told
            return rounds / (noise * delta)

    monkeypatch.setitem(sys.modules, "dp_accounting", SimpleNamespace(GaussianDpEvent=float))
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", SimpleNamespace(RdpAccountant=Accountant))
    privacy = tw.lab.privacy.Privacy(2.0, 8.0, 0.25)
    assert [privacy.epsilon(rounds) for rounds in (0, 1, 4)] == [0.0, 0.5, 2.0]
    assert privacy.epsilon_of_packets(4, 16) == 8.0
    said = {"epsilon": 2.0, "epsilon_of_packets": 8.0, "delta": 0.25, "rounds": 4, "clip": 2.0, "noise": 8.0}
    assert privacy.spent(4, 16).items() >= said.items()


@needs_accountant
def test_more_rounds_and_less_noise_raise_epsilon():
    assert (
        tw.lab.privacy.Privacy(1.0, 2.0).epsilon(10)
        < tw.lab.privacy.Privacy(1.0, 2.0).epsilon(20)
        < tw.lab.privacy.Privacy(1.0, 1.0).epsilon(20)
    )
    privacy = tw.lab.privacy.Privacy(1.0, 8.0)
    assert privacy.epsilon(0) == 0 and privacy.epsilon_of_packets(10, 1) == privacy.epsilon(10)
    assert privacy.epsilon_of_packets(10, 4) == pytest.approx(tw.lab.privacy.Privacy(1.0, 4.0).epsilon(10))
    assert privacy.spent(10, 4)["unit"] == "replica" and privacy.spent(10, 4)["rounds"] == 10


@pytest.mark.skipif(importlib.util.find_spec("dp_accounting") is not None, reason="dp-accounting is installed")
def test_a_missing_accountant_is_an_error_with_advice():
    with pytest.raises(tw.ConfigurationError, match=r"pip install 'thinwire\[privacy\]'"):
        tw.lab.privacy.Privacy().epsilon(1)


# ---- in a replica


def train(strategy: tw.Strategy, size: int = 2, steps: int = 4, seen: list[torch.Tensor] | None = None):
    def rank_of(group):
        model = toy()
        optimizer = adamw(model)
        ledger = Ledger()
        with tw.Replica(strategy, model, optimizer, CountedGroup(group, ledger)) as replica:
            for step in range(1, steps + 1):
                inner_step(model, optimizer, *batch(0, group.rank, step))
            agreed = replica.anchors()
        return weights(model), agreed, ledger.sent("packet")

    return tw.run_threads(size, rank_of)


def test_negligible_noise_and_a_large_clip_change_nothing():
    for one in (tw.local_sgd(every=2), tw.streaming_diloco(every=4, fragments=2, delay=1, codec=tw.codecs.Cast())):
        import dataclasses

        private = dataclasses.replace(one, privacy=tw.lab.privacy.Privacy(1e6, QUIET))
        for (got, _, sent), (due, _, nbytes) in zip(train(private), train(one)):
            torch.testing.assert_close(got, due, rtol=0, atol=1e-6)
            assert sent == nbytes


def test_private_replicas_agree_and_two_runs_differ():
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(2), codec=tw.codecs.E3M0(32), privacy=tw.lab.privacy.Privacy(0.5, 0.3)
    )
    (a, _, _), (b, _, _) = train(strategy)
    (c, _, _), _ = train(strategy)
    assert torch.equal(a, b) and not torch.equal(a, c)
    alone, twice = (
        train(tw.Strategy(schedule=tw.pieces.schedule.Every(2), privacy=tw.lab.privacy.Privacy(0.5, 0.3)), size=1)[0][0]
        for _ in range(2)
    )
    assert not torch.equal(alone, twice)  # one replica that averages with itself adds noise, too


def test_an_outer_step_moves_by_at_most_the_clip():
    """One of the two replicas trains with a learning rate of 1,000."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(1), privacy=tw.lab.privacy.Privacy(1e-3, QUIET))

    def rank_of(group):
        model = toy()
        before = weights(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e3 if group.rank else 0.1)
        with tw.Replica(strategy, model, optimizer, group) as replica:
            inner_step(model, optimizer, *batch(0, group.rank, 1))
            moved = torch.cat(replica.anchors()) - before
        return float(moved.norm())

    assert max(tw.run_threads(2, rank_of)) <= 1e-3 * 1.01


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda p: tw.Strategy(codec=tw.codecs.TopK(), feedback=tw.pieces.feedback.Feedback(), privacy=p),
            "adds older deltas to what was clipped",
        ),
        (lambda p: tw.Strategy(signal=tw.strategy.Gradients(), privacy=p), "one for every step, unclipped"),
        (
            lambda p: tw.Strategy(schedule=tw.pieces.schedule.Every(3, 3), merge=tw.pieces.merge.Eager(), privacy=p),
            "before clip and noise",
        ),
        (
            lambda p: tw.Strategy(codec=tw.codecs.TopK(), policy=tw.pieces.policies.DensityWarmup(2), privacy=p),
            "choose the codec by the data",
        ),
        (lambda p: tw.Strategy(privacy=1.0), "Privacy"),
        (lambda p: tw.lab.privacy.Privacy(0.0), "above 0"),
        (lambda p: tw.lab.privacy.Privacy(1.0, 0.0), "without noise nothing is private"),
        (lambda p: tw.lab.privacy.Privacy(1.0, math.inf), "above 0"),
        (lambda p: tw.lab.privacy.Privacy(1.0, 1.0, 1.0), "between 0 and 1"),
        (lambda p: tw.lab.privacy.Privacy(1.0, 1.0, 0.0), "between 0 and 1"),
        (lambda p: tw.lab.privacy.Privacy(math.inf), "above 0"),
        (lambda p: tw.lab.privacy.Privacy(math.nan), "above 0"),
    ],
)
def test_settings_without_a_privacy_guarantee_are_refused(make, says):
    with pytest.raises(tw.ConfigurationError, match=says):
        make(tw.lab.privacy.Privacy())


def test_noise_on_both_low_rank_factors_multiplies():
    """(A + n)(B + m) contains n·m, which no step averages out. With A frozen (FFA-LoRA) the noise of the product is linear in m."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 64, generator=generator), torch.randn(64, 4, generator=generator)

    def error(noise: float, frozen: bool) -> float:
        n = gaussian(a.numel()).view_as(a).float() * (0.0 if frozen else noise)
        m = gaussian(b.numel()).view_as(b).float() * noise
        return float(((b + m) @ (a + n) - b @ a).norm())

    both = [error(noise, False) for noise in (1.0, 100.0)]
    one = [error(noise, True) for noise in (1.0, 100.0)]
    assert one[1] / one[0] == pytest.approx(100, rel=0.3) and both[1] / both[0] > 1000
