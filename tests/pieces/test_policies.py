"""Policies, which change the codec from round to round: the codec of each round, its bytes, and the refusals."""

from __future__ import annotations

import pytest
import torch
from pieces import POLICIES
from strategies import METHODS

import thinwire as tw
from thinwire.codecs.layout import ascending_nbytes
from thinwire.pieces.policy import LONG_RUN, Deciding
from thinwire.testing.toy import journey, same_bits, toy

WARMING = tw.Strategy(
    codec=tw.codecs.TopK(0.001),
    policy=tw.pieces.policies.DensityWarmup(10),
    feedback=tw.pieces.feedback.Feedback(),
    signal=tw.strategy.Gradients(),
)


@pytest.mark.parametrize("policy", [row.piece for row in POLICIES], ids=str)
def test_policies_are_pure_and_end_at_the_codec_of_the_strategy(policy):
    """The codec changes only at `changes`, and `codecs` names every codec that a round has."""
    codec, numel = (
        tw.lab.codecs.Each(tw.codecs.TopK(0.1), shapes=((100, 100),))
        if isinstance(policy, Deciding)
        else tw.codecs.TopK(0.1),
        10_000,
    )
    state = policy.init(codec)
    answers = [policy.at(codec, numel, number, state) for number in range(40)]
    assert answers == [policy.at(codec, numel, number, state) for number in range(40)]
    assert set(answers) <= set(policy.codecs(codec))
    changed = {number for number in range(1, 40) if answers[number] != answers[number - 1]}
    assert changed <= set(policy.changes) and len(policy.changes) == len(set(policy.changes))
    assert policy.at(codec, numel, LONG_RUN, state) == codec == answers[-1]


def test_warm_up_densities_match_the_paper():
    """25 %, 6.25 %, 1.5625 %, 0.4 %, then 0.1 % (DGC, arXiv 1712.01887), also for a sparse codec inside another codec."""
    policy = tw.pieces.policies.DensityWarmup(1)
    inside = [policy.at(tw.codecs.TopK(0.001), 1 << 20, number, {}).density for number in range(6)]
    assert inside == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    squares = policy.at(tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(4096, 4))), 1 << 20, 1, {})
    assert squares == tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK(4096, 256)))
    levels = policy.at(tw.lab.codecs.Levelled((tw.codecs.Int(8), tw.codecs.TopK(0.001))), 1 << 20, 1, {})
    assert levels == tw.lab.codecs.Levelled((tw.codecs.Int(8), tw.codecs.TopK(0.0625)))


def test_a_warm_up_is_never_sparser_than_the_codec_of_the_strategy():
    policy = tw.pieces.policies.DensityWarmup(1)
    assert [policy.at(tw.codecs.TopK(0.01), 1 << 20, n, {}).density for n in range(5)] == [
        0.25,
        0.0625,
        0.015625,
        0.01,
        0.01,
    ]


def test_a_round_is_dense_where_the_sparse_packet_is_no_smaller():
    """25 % in bf16 with indices of 20 bits take 9 bits per value: less than 32, more than the 4 of E3M0."""
    codec = tw.codecs.TopK(0.001)
    assert tw.pieces.policies.DensityWarmup(1).at(codec, 1 << 20, 0, {}) == tw.codecs.TopK(0.25)
    assert tw.pieces.policies.DensityWarmup(1, dense=tw.codecs.E3M0()).at(codec, 1 << 20, 0, {}) == tw.codecs.E3M0()
    assert tw.pieces.policies.DensityWarmup(1, dense=tw.codecs.E3M0()).at(codec, 1 << 20, 1, {}) == tw.codecs.TopK(
        0.0625
    )
    assert (
        tw.pieces.policies.DensityWarmup(1, (1.0,)).at(tw.codecs.TopK(0.001, tw.codecs.Identity()), 1000, 0, {})
        == tw.codecs.Identity()
    )


def test_predicted_bytes_depend_on_the_round():
    """The bytes of each stage of DGC: a header of 48 bytes, 16 bits per value, and the indices of k of n."""
    sizes = [WARMING.nbytes_per_period([1 << 20], 2, number) for number in (0, 10, 20, 30, 40)]
    kept = [262_144, 65_536, 16_384, 4_195, 1_049]
    assert sizes == [48 + 2 * k + ascending_nbytes(k, 1 << 20) for k in kept]
    assert WARMING.nbytes_per_period([1 << 20], 2) == sizes[-1]
    said = WARMING.describe(torch.nn.Linear(1024, 1024, bias=False), 2)
    assert f"rounds 0 to 9 of a fragment: {sizes[0]:,} bytes" in said and "rounds 30 to 39" in said


def test_rounds_before_the_switch_have_the_bits_of_a_dense_run():
    strategy = METHODS["1-bit after a dense start"]
    dense = tw.Strategy(signal=tw.strategy.Gradients(), exchange=strategy.exchange)
    for warm, plain in zip(journey(strategy, 3), journey(dense, 3)):
        same = [same_bits(a, b) for a, b in zip(warm.weights, plain.weights, strict=True)]
        assert same == [True] * 5 + [False] * 9


def test_a_description_tells_the_bytes_of_the_rounds_that_end_a_run():
    strategy = METHODS["streaming_sparse"]
    one, _ = journey(strategy, 2, steps=12)
    last = one.heard("depart")[-len(strategy.partition.fragments(toy())) :]
    sent = sum(event["nbytes"] for event in last)
    assert f"the rounds that end a run: {sent:,} bytes (predicted)" in strategy.describe(toy(), 2)
    assert "that end a run" not in METHODS["streaming_sign"].describe(toy(), 2)


def test_every_round_sends_the_bytes_of_its_due_codec():
    strategy = METHODS["ever sparser, in the air"]
    departures = journey(strategy, 2)[0].heard("depart")
    shapes = [fragment.shapes for fragment in strategy.partition.fragments(toy())]
    for e in departures:
        assert e["nbytes"] == strategy.exchange.nbytes_sent(*strategy.coded(shapes[e["fragment"]], e["round"]), 2)
    of_the_first = [e["nbytes"] for e in departures if e["fragment"] == 0]
    assert of_the_first == sorted(of_the_first, reverse=True) and len(set(of_the_first)) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.pieces.policies.DenseUntil(0), "a whole number of rounds, at least 1"),
        (lambda: tw.pieces.policies.DenseUntil(2.5), "rounds=2.5"),
        (lambda: tw.pieces.policies.DenseUntil(2, tw.codecs.Identity), "a Codec is needed"),
        (lambda: tw.pieces.policies.DensityWarmup(1, ()), "densities=()"),
        (lambda: tw.pieces.policies.DensityWarmup(1, (0.1, float("nan"))), "above 0 and at most 1"),
        (lambda: tw.pieces.policies.DensityWarmup(1, (0.0, 1.0)), "above 0 and at most 1"),
        (lambda: tw.pieces.policies.DensityWarmup(1, (1.0, 1.1)), "above 0 and at most 1"),
        (
            lambda: tw.Strategy(codec=tw.codecs.Sign(), policy=tw.pieces.policies.DensityWarmup(1)),
            "sends few of the values",
        ),
        (lambda: tw.Strategy(policy=tw.pieces.policies.DenseUntil), "a Policy is needed"),
        (
            lambda: tw.Strategy(
                codec=tw.codecs.RandomK(0.1),
                policy=tw.pieces.policies.DensityWarmup(1, (0.5,)),
                feedback=tw.pieces.feedback.Feedback(),
            ),
            "a contractive codec is needed",
        ),
        (
            lambda: tw.Strategy(
                codec=tw.codecs.Identity(),
                policy=tw.pieces.policies.DenseUntil(1, tw.codecs.E3M0()),
                exchange=tw.exchange.AllReduce(),
            ),
            "AllReduce",
        ),
        (
            lambda: tw.Strategy(
                codec=tw.codecs.E3M0(128),
                policy=tw.pieces.policies.DenseUntil(1),
                exchange=tw.exchange.TwoShot(tw.pieces.feedback.Feedback()),
                feedback=tw.pieces.feedback.Feedback(),
            ),
            "cut at the grain",
        ),
    ],
)
def test_invalid_settings_and_combinations_are_refused(make, message):
    with pytest.raises(tw.ConfigurationError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make()


def test_an_elastic_group_refuses_policies_that_count_rounds():
    from thinwire.drivers.elastic.driver import check

    with pytest.raises(tw.ConfigurationError, match="counts rounds that all have seen"):
        check(tw.Strategy(codec=tw.codecs.TopK(), policy=tw.pieces.policies.DensityWarmup(1)))
