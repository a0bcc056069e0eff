"""The laws of every aggregate in the table of pieces, and the use of an aggregate other than the default in a strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pieces import AGGREGATES, over
from strategies import METHODS

import thinwire as tw
from thinwire.codecs import E3M0, TopK
from thinwire.drivers.elastic.driver import check
from thinwire.pieces.aggregate import Values
from thinwire.rng import Key
from thinwire.testing.aggregates import NUMEL, accepts, drawn, estimate
from thinwire.testing.toy import journey, same_bits, toy

SIZE = 7
CODECS = [tw.codecs.Identity(), TopK(0.3, tw.codecs.Identity()), E3M0(32)]


@over("codec", CODECS)
@over("row", AGGREGATES)
def test_the_estimate_of_one_replica_is_its_packet(row, codec):
    if "clips" in row.claims or not accepts(row.piece, 1):
        return
    (one,) = drawn(codec, size=1)
    assert same_bits(estimate(row.piece, [one]), one.decoded())
    assert same_bits(estimate(row.piece, [one], [1.0]), one.decoded())


@pytest.mark.parametrize("row", AGGREGATES, ids=str)
def test_the_estimate_of_equal_packets_is_that_packet(row):
    (one,) = drawn(tw.codecs.Identity(), size=1)
    weights = [0.5, 0.25, 0.125, 0.125, 0.0, 0.0, 0.0]
    if "clips" not in row.claims:
        torch.testing.assert_close(estimate(row.piece, [one] * SIZE), one.decoded())
        torch.testing.assert_close(estimate(row.piece, [one] * SIZE, weights), one.decoded())


@pytest.mark.parametrize("row", AGGREGATES, ids=str)
def test_ranges_give_the_bits_of_the_whole_vector(row):
    if row.piece.needs_products:
        return
    whole = estimate(row.piece, drawn(tw.codecs.Identity()))
    parts = [estimate(row.piece, drawn(tw.codecs.Identity(), begin, begin + 32)) for begin in range(0, NUMEL, 32)]
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("row", AGGREGATES, ids=str)
def test_only_linear_aggregates_equal_the_mean_of_their_parts(row):
    """Three and four replicas first, then both estimates by their sizes. An aggregate is linear exactly where this agrees."""
    said = drawn(tw.codecs.Identity())
    said[6] = said[5]  # two equal packets
    if not accepts(row.piece, 3):
        assert not row.piece.linear
        return
    halves = [estimate(row.piece, said[:3]), estimate(row.piece, said[3:])]
    in_parts = 3 / 7 * halves[0] + 4 / 7 * halves[1]
    alike = torch.allclose(in_parts, estimate(row.piece, said), rtol=1e-5, atol=1e-6)
    assert row.piece.linear == ("linear" in row.claims) == alike


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_mean_has_the_bits_of_a_sum_in_rank_order(codec):
    said = drawn(codec)
    for size in (1, 2, SIZE):
        total = torch.zeros(NUMEL)
        for one in said[:size]:
            codec.decode_add(one.payload, total, one.key)
        assert same_bits(estimate(tw.pieces.aggregate.Mean(), said[:size]), total / size)
    weights, total = [0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0, 0.0], torch.zeros(NUMEL)
    for one, weight in zip(said, weights):
        codec.decode_add(one.payload, total, one.key, weight)
    assert same_bits(estimate(tw.pieces.aggregate.Mean(), said, weights), total)


def test_mean_over_senders_matches_values_by_hand():
    said = []
    for x in ([1.0, 0.0, 0.0, -2.0], [3.0, 5.0, 0.0, 4.0], [0.0, 1.0, 0.0, 4.0]):
        said.append(Values(tw.codecs.Identity(), torch.tensor(x).view(torch.uint8), Key(), 4))
    assert estimate(tw.pieces.aggregate.MeanOverSenders(), said).tolist() == [2.0, 3.0, 0.0, 2.0]
    assert estimate(tw.pieces.aggregate.MeanOverSenders(), said, [0.75, 0.25, 0.0]).tolist() == [1.5, 5.0, 0.0, -0.5]


@pytest.mark.parametrize("exchange", [tw.exchange.Direct(), tw.exchange.TwoShot()], ids=str)
def test_mean_over_senders_trains_like_the_codec_over_senders(exchange):
    made = replace(METHODS["over senders, in the air"], exchange=exchange)
    by_codec = replace(made, codec=tw.lab.codecs.OverSenders(made.codec), aggregate=tw.pieces.aggregate.Mean())
    by_mean = replace(made, aggregate=tw.pieces.aggregate.Mean())
    finals = [journey(strategy, 3)[0].final for strategy in (made, by_codec, by_mean)]
    assert same_bits(finals[0], finals[1]) and not same_bits(finals[0], finals[2])


def test_only_an_aggregate_other_than_the_default_is_printed():
    """So older checkpoints and replicas, whose strategies name no aggregate, still match."""
    assert "aggregate" not in repr(tw.Strategy()) and tw.catalogue.parsing.parse(repr(tw.Strategy())) == tw.Strategy()
    other = tw.Strategy(aggregate=tw.pieces.aggregate.MeanOverSenders())
    assert "exchange=Direct(), aggregate=MeanOverSenders(), outer=Average()" in repr(other)
    assert tw.catalogue.parsing.parse(repr(other)) == other


def test_replicas_with_different_aggregates_are_refused():
    def replica(group: tw.Group) -> None:
        model = toy()
        aggregate = tw.pieces.aggregate.Mean() if group.rank else tw.pieces.aggregate.MeanOverSenders()
        with pytest.raises(tw.DisagreementError, match=r"aggregate=MeanOverSenders\(\)"):
            tw.Replica(tw.Strategy(aggregate=aggregate), model, torch.optim.SGD(model.parameters()), group)

    tw.run_threads(2, replica, timeout=600.0)


def test_an_elastic_group_needs_a_mean_over_all():
    with pytest.raises(tw.ConfigurationError, match=r"MeanOverSenders\(\) is no mean over all"):
        check(tw.Strategy(aggregate=tw.pieces.aggregate.MeanOverSenders()))
