"""The quadratic schedule (QSR), whose rounds grow as the learning rate falls: its rule, published numbers and its use in a run."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from strategies import METHODS

import thinwire as tw
from thinwire.pieces.schedule import LONGEST_ROUND, Calendar, busiest
from thinwire.testing.toy import journey, same_bits


def cosine(peak, warmup, steps, final=0.0):
    def rate(step):
        if step <= warmup:
            return peak * step / warmup
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    return rate


def lengths(schedule, rates, steps):
    """The lengths of the rounds of a run. The last round ends with the run."""
    calendar = Calendar(schedule, 1, rates)
    ends = [step for step in range(1, steps + 1) if calendar.departs(step)]
    ends += [steps] if not ends or ends[-1] < steps else []
    return [b - a for a, b in itertools.pairwise([0, *ends])]


EPOCH = 1_281_167 // 4096  # steps of ImageNet in batches of 4096


@pytest.mark.parametrize(
    ("schedule", "peak", "warmup", "epochs", "percent"),
    [
        (tw.pieces.schedule.Quadratic(4, 0.0175), 0.008, 10_000, 300, 10.4),  # ViT-B, Local AdamW
        (tw.pieces.schedule.Quadratic(8, 0.0175), 0.008, 10_000, 300, 6.9),
        (tw.pieces.schedule.Quadratic(4, 0.25), 0.8, 5 * EPOCH, 200, 20.1),  # ResNet-152, Local SGD
        (tw.pieces.schedule.Quadratic(2, 0.2), 0.8, 5 * EPOCH, 200, 39.7),
    ],
    ids=str,
)
def test_the_share_of_rounds_matches_the_paper(schedule, peak, warmup, epochs, percent):
    """Rounds per step of data-parallel training for the paper's settings. Every step belongs to one round."""
    steps = epochs * EPOCH
    rounds = lengths(schedule, cosine(peak, warmup, steps), steps)
    assert round(100 * len(rounds) / steps, 1) == percent
    assert sum(rounds) == steps and min(rounds[:-1]) >= schedule.every
    warm = [length for length, end in zip(rounds, itertools.accumulate(rounds)) if end <= warmup]
    assert set(warm) == {schedule.every}
    assert rounds[len(warm) + 2 : -1] == sorted(rounds[len(warm) + 2 : -1]), "longer and longer after the peak"
    assert max(rounds) > 1000


def test_round_lengths_follow_the_rule():
    """⌊(α/η)²⌋ at the first step of a round: a tenth of the rate gives a hundred times the length. Also powers 1 and 0."""
    rule = tw.pieces.schedule.Quadratic(4, 0.25)
    assert [rule.length(lr, before=1.0) for lr in (0.125, 0.1, 0.05, 0.01)] == [4, 6, 25, 625]
    assert (
        tw.pieces.schedule.Quadratic(1, 1.0).length(0.01, 0.1)
        == 100 * tw.pieces.schedule.Quadratic(1, 1.0).length(0.1, 0.1)
        == 10_000
    )
    assert tw.pieces.schedule.Quadratic(1, 0.64, power=1.0).length(0.01, 1.0) == 64
    for constant in (tw.pieces.schedule.Quadratic(5, 0.25, power=0.0), tw.pieces.schedule.Quadratic(5, 0.0)):
        assert lengths(constant, cosine(0.1, 10, 203), 203) == [5] * 40 + [3]
    assert lengths(tw.pieces.schedule.Quadratic(2, 0.3), lambda step: 0.1, 40) == [2, 8, 8, 8, 8, 6], (
        "a constant rate, constant rounds"
    )


def test_a_round_takes_the_rate_of_its_first_step():
    asked = []
    calendar = Calendar(tw.pieces.schedule.Quadratic(2, 0.3), 2, lambda step: asked.append(step) or 0.1)
    assert [step for step in range(1, 30) if calendar.departs(step) == (0, 1)] == [2, 10, 18, 26]
    assert asked == [1, 3, 11, 19, 27]


def test_a_calendar_resumes_in_the_midst_of_a_round():
    """Also before the first step."""
    rule = tw.pieces.schedule.Quadratic(2, 0.3)
    rates = [0.1, 0.1, 0.1, 0.09, 0.08, 0.07, 0.06, *[0.05] * 40]
    whole = lengths(rule, lambda step: rates[step - 1], 40)
    assert Calendar(rule, 1, rates.__getitem__).facts() == {"began": 0, "length": 0, "lr": None}
    for stop in (0, 1, 2, 5, 12):
        first, second = (Calendar(rule, 1, lambda step: rates[step - 1]) for _ in range(2))
        ends = [step for step in range(1, stop + 1) if first.departs(step)]
        second.load(json.loads(json.dumps(first.facts())))
        ends += [step for step in range(stop + 1, 41) if second.departs(step)]
        assert ends == list(itertools.accumulate(whole))[: len(ends)] and len(ends) == len(whole) - (
            sum(whole[:-1]) < 40
        )


@pytest.mark.parametrize("rate", [0.0, 1e-300, float("nan"), float("inf"), 5e-324])
def test_rates_of_any_size_give_a_finite_length(rate):
    length = tw.pieces.schedule.Quadratic(4, 0.0175, 8.0).length(rate, before=0.1)
    assert type(length) is int and length == (LONGEST_ROUND if rate < 1 else 4)


def test_rounds_stay_short_while_the_rate_rises():
    """Also in a second warm-up, and with a first rate near zero."""
    rates = [1e-9, 1e-4, 2e-4, 3e-4, 1e-3, 1e-3, 1e-3, 1e-3, 0.02, 0.03, 0.01, 0.01]
    assert tw.pieces.schedule.Quadratic(1, 0.002).length(rates[0], None) == 1
    assert lengths(tw.pieces.schedule.Quadratic(1, 0.002), lambda step: rates[step - 1], 12) == [
        1,
        1,
        1,
        1,
        1,
        4,
        1,
        1,
        1,
    ]


def trained(strategy, steps, rate):
    """The journey of the first replica with the learning rate `rate(step)`."""

    def before_step(replica, step):
        for group in replica.optimizer.param_groups:
            group["lr"] = rate(step)

    return journey(strategy, 2, steps=steps, before_step=before_step)[0]


def test_departures_follow_the_rate_of_the_optimizer():
    rate = cosine(0.02, 4, 30)
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Quadratic(2, 0.03))
    one = trained(strategy, 30, rate)
    departed = [e["step"] for e in one.heard("depart")]
    assert departed == list(itertools.accumulate(lengths(strategy.schedule, rate, 30)))
    assert len(set(lengths(strategy.schedule, rate, 30))) > 3, "they do change"


def test_scale_0_or_power_0_has_the_bits_of_local_sgd():
    plain = trained(tw.local_sgd(every=3), 14, cosine(0.02, 2, 14))
    for schedule in (tw.pieces.schedule.Quadratic(3, 0.0), tw.pieces.schedule.Quadratic(3, 9.0, power=0.0)):
        one = trained(tw.Strategy(schedule=schedule), 14, cosine(0.02, 2, 14))
        assert all(same_bits(a, b) for a, b in zip(one.weights, plain.weights, strict=True))


def test_describe_warns_of_outer_momentum():
    model = torch.nn.Linear(4, 4)
    doubtful = tw.Strategy(schedule=tw.pieces.schedule.Quadratic(4, 0.0175), outer=tw.pieces.outer.Nesterov())
    assert "warning: Quadratic" in doubtful.describe(model, 2) and "made for averaging" in doubtful.describe(model, 2)
    sound = tw.Strategy(schedule=tw.pieces.schedule.Quadratic(4, 0.0175)).describe(model, 2)
    assert "warning" not in sound and "every at least 4 inner steps" in sound
    assert "warning" not in tw.diloco().describe(model, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.pieces.schedule.Quadratic(0, 0.1), "every=0"),
        (lambda: tw.diloco(every=10**9), "every=1000000000: at least 1 .* at most 1,000,000"),
        (lambda: tw.pieces.schedule.Quadratic(2.5, 0.1), "every=2.5"),
        (lambda: tw.pieces.schedule.Quadratic(4, 0.1, delay=4), "choose delay <= 3"),
        (lambda: tw.pieces.schedule.Quadratic(4, -0.1), "scale >= 0"),
        (lambda: tw.pieces.schedule.Quadratic(4, float("nan")), "scale >= 0"),
        (lambda: tw.pieces.schedule.Quadratic(4, float("inf")), "scale >= 0"),
        (lambda: tw.pieces.schedule.Staggered(4, offsets=(1, 0)), "first departs at inner step 1 or later"),
        (lambda: tw.pieces.schedule.Staggered(4, offsets=(2.5, 4)), "a tuple of whole numbers is needed"),
        (lambda: tw.pieces.schedule.Staggered(4, offsets=3), "offsets=3: a tuple of whole numbers is needed"),
        (lambda: tw.pieces.schedule.Quadratic(4, 0.1, power=9.0), "a power from 0 to 8"),
        (lambda: tw.Strategy(schedule=tw.pieces.schedule.Quadratic(4, 0.1), merge=tw.pieces.merge.Eager()), "Eager"),
        (lambda: tw.Strategy(schedule=tw.pieces.schedule.Quadratic(4, 0.1), signal=tw.strategy.Gradients()), "gradients are exchanged at every step"),
        (lambda: tw.Strategy(schedule=tw.pieces.schedule.Quadratic), "a Schedule is needed"),
    ],
)  # fmt: skip
def test_invalid_settings_and_combinations_are_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message):
        make()


def test_an_elastic_group_refuses_the_quadratic_schedule():
    from thinwire.drivers.elastic.driver import check

    with pytest.raises(tw.ConfigurationError, match="which a new replica does not know"):
        check(METHODS["qsr"])


def test_busiest_is_the_schedule_with_the_shortest_rounds():
    assert busiest(tw.pieces.schedule.Quadratic(4, 0.1, delay=2)) == tw.pieces.schedule.Every(4, 2) and busiest(
        tw.pieces.schedule.Staggered(9)
    ) == tw.pieces.schedule.Staggered(9)


@pytest.mark.parametrize("every", [1, 2, 7, 30])
@pytest.mark.parametrize("fragments", [1, 2, 3, 8, 31, 100])
def test_staggered_departures_are_those_of_the_equation(every, fragments):
    schedule, first = tw.pieces.schedule.Staggered(every), [p * every // fragments for p in range(fragments)]
    for step in range(4 * every):
        due = [p for p in range(fragments) if (step - first[p]) % every == 0 and step - first[p] >= every]
        assert list(schedule.departs(step, fragments)) == due
