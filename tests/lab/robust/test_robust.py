"""Robust rules: the liars they tolerate, their equivariance, and equal estimates in every exchange, also under attacks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from aggregating import aggregated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import thinwire as tw
from thinwire.codecs import E3M0, Identity
from thinwire.exchange import ExchangeTraits
from thinwire.exchange.products import inner_products
from thinwire.lab.robust.attack_table import attack_of
from thinwire.lab.robust.attacked import Attacked
from thinwire.lab.robust.attacks import Attack
from thinwire.testing.toy import journey, same_bits

parse = tw.catalogue.parsing.parse
PLAIN = [
    "Median()",
    "TrimmedMean(2)",
    "MeaMed(2)",
    "GeometricMedian()",
    "CenteredClipping()",
    "Krum(2)",
    "MultiKrum(2)",
    "Bulyan(2)",
    "MDA(2)",
]
MIXED = [
    "NearestNeighbourMixing(Median(), 2)",
    "NearestNeighbourMixing(Krum(2), 2)",
    "Bucketing(Median(), 2)",
    "ARC(TrimmedMean(2), 2)",
]
# The two left out clip towards 0.
SHIFTED = [text for text in (*PLAIN, *MIXED) if not text.startswith(("CenteredClipping", "ARC"))]
MEANS = [
    "TrimmedMean(0)",
    "MeaMed(0)",
    "MultiKrum(0)",
    "MDA(0)",
    "Bulyan(0)",
    "NearestNeighbourMixing(TrimmedMean(0), 0)",
]
SIZE, LIARS = 11, 2
each_rule = pytest.mark.parametrize("text", [*PLAIN, *MIXED])


def random_vectors(seed: int, size: int = SIZE, numel: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) + torch.randn(size, numel, generator=generator)


# ---- inner products


def test_inner_products_are_accurate_and_independent_of_the_order():
    x = (
        torch.randn(5, 10_000, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-20, 1.0, 1e15, 0.0, 1e-3])[:, None]
    )
    found, due = inner_products(x), x.double() @ x.double().T
    scale = due.diagonal().sqrt()
    assert ((found - due).abs() <= 1e-13 * scale[:, None] * scale[None, :]).all()
    turned = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(inner_products(x[turned]), found[turned][:, turned])
    x[1, 7] = torch.inf
    assert torch.isnan(inner_products(x)[1]).all() and torch.isfinite(inner_products(x)[[0, 2]][:, [0, 2]]).all()


# ---- properties


@each_rule
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), order=st.permutations(range(SIZE)))
def test_the_estimate_is_independent_of_the_order_of_the_replicas(text, seed, order):
    if "Bucketing" in text:  # its buckets are drawn by rank
        return
    x, rule = random_vectors(seed), parse(text)
    torch.testing.assert_close(aggregated(rule, x[list(order)]), aggregated(rule, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", SHIFTED)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), shift=st.floats(-10, 10), scale=st.sampled_from([0.125, 0.5, 4.0, 1024.0]))
def test_the_estimate_follows_shifts_and_scales(text, seed, shift, scale):
    x, rule = random_vectors(seed), parse(text)
    due = aggregated(rule, x)
    torch.testing.assert_close(aggregated(rule, x + shift), due + shift, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aggregated(rule, x * scale), due * scale, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize(
    ("text", "values", "due"),
    [
        ("Median()", [9.0, 1.0, 4.0, 2.0], 3.0),
        ("Median()", [9.0, 1.0, 4.0], 4.0),
        ("TrimmedMean(1)", [9.0, 1.0, 4.0, 2.0], 3.0),
        ("MeaMed(1)", [9.0, 1.0, 4.0, 2.0], 7 / 3),  # the median is 3
        ("MeaMed(1)", [3.0, 1.0, 2.0], 1.5),  # 1 and 3 are equally near to 2: the smaller counts
    ],
)
def test_rules_match_values_by_hand(text, values, due):
    assert aggregated(parse(text), torch.tensor(values)[:, None]).item() == pytest.approx(due)


@pytest.mark.parametrize("text", ["CenteredClipping()", "ARC(TrimmedMean(2), 2)", "Median()"])
def test_the_estimate_of_clipping_rules_follows_a_scale(text):
    x, rule = random_vectors(3), parse(text)
    torch.testing.assert_close(aggregated(rule, x * 64), aggregated(rule, x) * 64, rtol=1e-5, atol=1e-4)


@each_rule
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([1e3, 1e12, 1e30, float("nan"), float("inf")]),
    alike=st.booleans(),
)
def test_tolerated_liars_move_the_estimate_within_a_bound(text, seed, size, alike):
    """The liars send huge values or NaN, alike or in different directions."""
    rule, x = parse(text), random_vectors(seed)
    liars = rule.tolerates(SIZE)
    assert liars >= 2
    honest = x[:-liars].clone()
    away = (
        torch.randn(liars, x.shape[1], generator=torch.Generator().manual_seed(seed))
        if not alike
        else torch.ones(liars, x.shape[1])
    )
    x[-liars:] = away * size
    reach = (honest - honest.mean(0)).norm(dim=1).max() + honest.mean(0).norm()
    factor = 2 * (SIZE - liars) / (SIZE - 2 * liars)  # of the geometric median, the largest of all
    assert float((aggregated(rule, x) - honest.mean(0)).norm()) <= factor * float(reach)


def test_the_mean_tolerates_no_liar():
    x = random_vectors(0)
    x[-1] = 1e30
    assert (
        float(aggregated(tw.pieces.aggregate.Mean(), x).norm()) > 1e28
        and tw.pieces.aggregate.Mean().tolerates(SIZE) == 0
    )


@pytest.mark.parametrize("text", MEANS)
def test_rules_for_zero_liars_equal_the_mean(text):
    x = random_vectors(5)
    torch.testing.assert_close(aggregated(parse(text), x), x.mean(0), rtol=1e-5, atol=1e-6)


@each_rule
def test_more_vectors_that_are_not_finite_than_tolerated_leave_no_estimate(text):
    rule, x = parse(text), random_vectors(1)
    x[: rule.tolerates(SIZE) + 1, 3] = torch.nan
    assert torch.isnan(aggregated(rule, x)[3])


def test_a_vector_that_is_not_finite_counts_as_one_liar():
    """The estimate equals that of the others for one liar fewer."""
    x = random_vectors(2)
    x[4] = torch.nan
    others = torch.cat([x[:4], x[5:]])
    for text, without in (
        ("TrimmedMean(2)", "TrimmedMean(1)"),
        ("TrimmedMean(1)", "TrimmedMean(0)"),
        ("Krum(2)", "Krum(1)"),
        ("Bulyan(2)", "Bulyan(1)"),
        ("Median()", "Median()"),
    ):
        assert same_bits(aggregated(parse(text), x), aggregated(parse(without), others))


@pytest.mark.parametrize(
    ("text", "tolerated"),
    [
        ("Median()", "00112233445"),
        ("GeometricMedian()", "00112233445"),
        ("CenteredClipping()", "00112233445"),
        ("TrimmedMean(2)", "00112222222"),
        ("Krum(3)", "00001122333"),
        ("Bulyan(2)", "00000011112"),
        ("NearestNeighbourMixing(Krum(1), 3)", "00001111111"),
        ("NearestNeighbourMixing(Krum(3), 1)", "00001111111"),
        ("StaticClipping(Krum(1))", "00001111111"),
        ("Bucketing(Median(), 2)", "00001111222"),
        ("Bucketing(Median(), 1)", "00112233445"),
    ],
)
def test_the_tolerated_liars_among_1_to_11_replicas(text, tolerated):
    assert "".join(str(parse(text).tolerates(size)) for size in range(1, 12)) == tolerated


@pytest.mark.parametrize(
    ("text", "size", "said"),
    [
        (
            "TrimmedMean(2)",
            4,
            r"TrimmedMean\(liars=2\) among 4 replicas: with 2 liar\(s\) at least 2·2 \+ 1 = 5 are needed; it tolerates 1 here",
        ),
        ("Krum(1)", 4, r"2·1 \+ 3 = 5"),
        ("Bulyan(1)", 6, r"4·1 \+ 3 = 7"),
        ("Bucketing(TrimmedMean(2), 2)", 8, r"TrimmedMean\(liars=2\) among 4 replicas"),
        ("NearestNeighbourMixing(Median(), 3)", 6, r"2·3 \+ 1 = 7"),
        ("MDA(10)", 40, "subsets, at most 200,000"),
    ],
)
def test_too_few_replicas_are_refused_with_the_numbers(text, size, said):
    with pytest.raises(tw.ConfigurationError, match=said):
        parse(text).check(size)
    if "subsets" not in said:
        parse(text).check(size + 1)


@pytest.mark.parametrize(
    "text",
    [
        "TrimmedMean(-1)",
        "Krum(True)",
        "CenteredClipping(0.0)",
        "Bucketing(Median(), 0)",
        "NearestNeighbourMixing(Mean())",
    ],
)
def test_invalid_settings_are_refused(text):
    with pytest.raises(tw.ConfigurationError):
        parse(text)


# ---- against brute force


def test_krum_and_mda_match_brute_force():
    for seed in range(30):
        x = random_vectors(seed, 9, 5)
        squared = torch.cdist(x.double(), x.double()).square()
        scores = [squared[i].sort().values[1 : 9 - 2 - 1].sum() for i in range(9)]
        assert same_bits(aggregated(parse("Krum(2)"), x), x[int(torch.stack(scores).argmin())])
        spread = {
            s: (float(squared[list(s)][:, list(s)].max()), float(squared[list(s)][:, list(s)].sum()))
            for s in combinations(range(9), 7)
        }
        subset = min(spread, key=spread.__getitem__)
        torch.testing.assert_close(aggregated(parse("MDA(2)"), x), x[list(subset)].mean(0), rtol=1e-5, atol=1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances():
    for seed in range(5):
        x = random_vectors(seed).double()
        found = aggregated(parse("GeometricMedian()"), x.float()).double()
        pulls = (x - found) / (x - found).norm(dim=1, keepdim=True)
        assert float(pulls.sum(0).norm()) < 1e-4


# ---- in exchanges and in training


@pytest.mark.parametrize("codec", [Identity(), E3M0(8)], ids=str)
@pytest.mark.parametrize(
    "text", ["Median()", "GeometricMedian()", "Bulyan(1)", "NearestNeighbourMixing(TrimmedMean(1), 1)"]
)
def test_shards_and_whole_vectors_give_the_same_estimate(text, codec):
    """In `TwoShot` owners hold shards and exchange inner products; in `Direct` each replica holds all. Law 1 holds in both."""
    finals = []
    for exchange in (tw.exchange.Direct(), tw.exchange.TwoShot()):
        strategy = tw.Strategy(
            schedule=tw.pieces.schedule.Every(2, 1), aggregate=parse(text), exchange=exchange, codec=codec
        )
        journeys = journey(strategy, 7, steps=4)
        assert all(same_bits(kept, journeys[3].final_agreed[name]) for name, kept in journeys[0].final_agreed.items())
        assert not journeys[0].heard("refused")
        finals.append(journeys[0].final)
    # A mean in 4 bits is rounded twice.
    assert codec != Identity() or float((finals[0] - finals[1]).abs().max()) <= 1e-6


def test_rules_by_inner_products_need_an_exchange_that_computes_them():
    class Gathers(tw.exchange.Direct):
        traits = ExchangeTraits(gathers=True)

    with pytest.raises(tw.ConfigurationError, match="has no inner products of whole fragments"):
        tw.Strategy(exchange=Gathers(), aggregate=parse("Krum(1)"))
    with pytest.raises(tw.ConfigurationError, match=r"AllReduce\(\) adds up parts on the way"):
        tw.Strategy(exchange=tw.exchange.AllReduce(), codec=tw.codecs.Cast(), aggregate=parse("Median()"))
    with pytest.raises(tw.ConfigurationError, match=r"TrimmedMean\(liars=2\) among 3 replicas"):
        journey(tw.Strategy(aggregate=parse("TrimmedMean(2)")), 3, steps=1)


def test_describe_names_the_tolerated_liars_and_the_bytes():
    model = torch.nn.Linear(8, 8)
    told = tw.Strategy(aggregate=parse("Krum(2)"), exchange=tw.exchange.TwoShot()).describe(model, 8)
    assert "aggregate: Krum(liars=2), of 8 replicas 2 may send anything" in told
    assert f"aggregate: {7 * (48 + 8 * 64):,} bytes of inner products" in told
    assert "aggregate" not in tw.Strategy().describe(model, 8)


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot()], ids=str)
@pytest.mark.parametrize("text", ["Median()", "Krum(1)"])
def test_a_delta_that_is_not_finite_counts_as_a_liar_and_no_round_is_refused(exchange, text):
    """Its replica restarts from the anchors, as after a refused round."""
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(2), exchange=exchange, aggregate=parse(text))

    def poison(replica: tw.Replica, step: int) -> None:
        if step == 3 and replica.group.rank == 1:
            for parameter in replica.model.parameters():
                parameter.data.fill_(torch.nan)

    journeys = journey(strategy, 5, steps=8, before_step=poison)
    for one in journeys:
        assert not one.heard("refused") and torch.isfinite(one.final).all()
        assert all(same_bits(kept, journeys[0].final_agreed[name]) for name, kept in one.final_agreed.items())
    assert [
        event["message"] for event in journeys[1].heard("warning") if "restarts from the anchors" in event["message"]
    ]
    mean = journey(replace(strategy, aggregate=tw.pieces.aggregate.Mean()), 5, steps=8, before_step=poison)
    assert mean[0].heard("refused")


# ---- attacks


@pytest.mark.parametrize("text", ["sign_flip", "alie", "NotFinite('nan')", "replay", "Switch(IPM(2.0), 1)"])
def test_honest_replicas_agree_under_attacks(text):
    """They agree to the bit and no round is refused. The attack takes effect: the run differs from one without it."""
    attack: Attack = attack_of(text)
    strategy = tw.Strategy(
        schedule=tw.pieces.schedule.Every(1),
        exchange=Attacked(tw.exchange.TwoShot(), attack, 1),
        aggregate=parse("Median()"),
    )
    journeys = journey(strategy, 4, steps=4)
    for one in journeys:
        assert not one.heard("refused")
        assert all(same_bits(kept, journeys[0].final_agreed[name]) for name, kept in one.final_agreed.items())
    honest = journey(replace(strategy, exchange=tw.exchange.TwoShot()), 4, steps=4)
    assert not same_bits(honest[0].final, journeys[0].final)
    with pytest.raises(tw.ConfigurationError, match="at least one must be honest"):
        journey(replace(strategy, exchange=Attacked(tw.exchange.Direct(), attack, 4)), 4, steps=1)
