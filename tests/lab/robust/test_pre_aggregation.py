"""Steps before a robust rule, by hand: neighbours in ties, buckets, clipped norms, and liars that are counted out."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.catalogue.parsing import parse
from thinwire.errors import ConfigurationError
from thinwire.lab.robust.coordinates import Median
from thinwire.lab.robust.pre_aggregation import ARC, Bucketing, NearestNeighbourMixing, StaticClipping
from thinwire.pieces.aggregate import Mean
from thinwire.rng import Key


def of_norms(*norms: float) -> torch.Tensor:
    """The inner products of orthogonal vectors."""
    return torch.tensor(norms, dtype=torch.float64).square().diag()


def test_among_equal_vectors_each_is_its_own_nearest_neighbour():
    x = torch.tensor([[0.0], [0.0], [9.0]], dtype=torch.float64)
    assert parse("NearestNeighbourMixing(Median(), 2)").first(x @ x.T, Key()).equal(torch.eye(3, dtype=torch.float64))
    assert parse("NearestNeighbourMixing(Median(), 2)").first(
        torch.ones(1, 1, dtype=torch.float64), Key()
    ).tolist() == [[1.0]]


def test_a_replica_that_is_counted_out_is_one_liar_less_in_both_steps():
    rule = parse("NearestNeighbourMixing(Krum(2), 2)")
    assert rule.without(0) == rule and rule.without(1) == parse("NearestNeighbourMixing(Krum(1), 1)")
    assert rule.without(3) == parse("NearestNeighbourMixing(Krum(0), 0)")
    assert parse("Bucketing(Krum(2))").without(1) == parse("Bucketing(Krum(1))")
    assert parse("Bucketing(Krum(2))").without(0) == parse("Bucketing(Krum(2))")


@pytest.mark.parametrize(
    ("rule", "norms", "factors"),
    [
        (StaticClipping(norm=0.25), (0.5, 0.25, 0.125, 0.0), (0.5, 1.0, 1.0, 1.0)),
        (StaticClipping(norm=4.0), (8.0, 16.0), (0.5, 0.25)),
        (ARC(liars=0), (0.5, 8.0), (1.0, 1.0)),
        (ARC(liars=1), (0.5, 0.25, 0.125), (0.5, 1.0, 1.0)),
        (ARC(liars=1), (1.0, 2.0, 4.0, 8.0), (1.0, 1.0, 1.0, 0.5)),
        (ARC(liars=2), (1.0, 2.0, 4.0, 8.0, 16.0), (1.0, 1.0, 1.0, 0.5, 0.25)),
        (ARC(liars=1), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0)),
    ],
    ids=str,
)
def test_norms_are_clipped_to_the_limit(rule, norms, factors):
    assert rule.first(of_norms(*norms), Key()).tolist() == torch.tensor(factors).diag().tolist()


def test_buckets_hold_each_replica_once():
    for each, size, shares in ((1, 3, [1.0]), (2, 5, [0.5, 0.5, 1.0]), (3, 7, [1 / 3, 1 / 3, 1.0]), (9, 2, [0.5])):
        rule = parse(f"Bucketing(Median(), {each})")
        mixed = rule.first(of_norms(*[1.0] * size), Key(seed=3))
        assert mixed.shape == (-(-size // each), size)
        assert [round(float(row.max()), 9) for row in mixed][-len(shares) :] == [round(share, 9) for share in shares]
        assert (mixed > 0).sum(0).eq(1).all() and torch.allclose(mixed.sum(1), torch.ones(len(mixed)).double())
        others = [rule.first(of_norms(*[1.0] * size), Key(seed=3, sender=rank)) for rank in range(2)]
        assert all(mixed.equal(other) for other in others), "the same on all replicas"


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_invalid_norms_are_refused(norm):
    with pytest.raises(ConfigurationError, match="a norm above 0 is needed"):
        StaticClipping(norm=norm)


@pytest.mark.parametrize("made", [Bucketing, StaticClipping, ARC, NearestNeighbourMixing])
@pytest.mark.parametrize("rule", [Mean(), Median, 2.0], ids=str)
def test_a_robust_rule_is_needed(made, rule):
    with pytest.raises(ConfigurationError, match=r"a robust rule for the mixed values is needed, such as Median\(\)"):
        made(rule)


def test_the_rule_gets_the_products_of_the_mixed_values():
    """Buckets of one permute, so each norm is clipped as without them."""
    clipped = parse("Bucketing(StaticClipping(Median(), 2.0), 1)").mixing(of_norms(4.0, 1.0, 8.0), Key(seed=3))
    assert clipped.sum(0).tolist() == [0.5, 1.0, 0.25]
