"""Rules by inner products, by hand: few replicas, ties, and refused settings."""

from __future__ import annotations

import math

import pytest
import torch

from thinwire.catalogue.parsing import parse
from thinwire.errors import ConfigurationError
from thinwire.lab.robust.by_products import MDA, CenteredClipping, krum_scores
from thinwire.rng import Key


def weights_of(text: str, *values: float) -> list[list[float]]:
    """The weights that a rule gives replicas whose values have one coordinate, or mean nothing to the others."""
    x = torch.tensor(values, dtype=torch.float64)[:, None]
    return parse(text).mixing(x @ x.T, Key()).tolist()


@pytest.mark.parametrize(
    "text", ["Krum(0)", "MultiKrum(0)", "Bulyan(0)", "MDA(0)", "GeometricMedian()", "CenteredClipping()"]
)
def test_of_one_replica_the_estimate_is_its_value(text):
    assert weights_of(text, 3.0) == [[1.0]]


@pytest.mark.parametrize(
    ("text", "values", "due"),
    [
        ("Krum(0)", (5.0, 5.0, 5.0), [1.0, 0.0, 0.0]),
        ("Krum(1)", (0.0, 1.0, 1.5, 1.5, 9.0), [0.0, 0.0, 1.0, 0.0, 0.0]),
        ("MultiKrum(1)", (9.0, 1.0, 1.0, 1.0, 1.0), [0.0, 0.25, 0.25, 0.25, 0.25]),
        ("MDA(1)", (0.0, 1.0, 2.0), [0.5, 0.5, 0.0]),
        ("MDA(1)", (0.75, 0.25, 0.0), [0.0, 0.5, 0.5]),
        ("MDA(2)", (4.0, 0.0, 1.0, 2.0, 4.0), [0.0, 1 / 3, 1 / 3, 1 / 3, 0.0]),
        ("GeometricMedian()", (0.0, 0.0, 9.0), [0.5, 0.5, 0.0]),
        ("GeometricMedian()", (0.0, 0.0, 0.0, 9.0), [1 / 3, 1 / 3, 1 / 3, 0.0]),
        ("CenteredClipping(1.0, 1)", (2.0, 0.5), [0.25, 0.5]),
        ("CenteredClipping(0.25, 1)", (0.5, 0.25), [0.25, 0.5]),
        ("CenteredClipping(1.0, 1)", (1.0, 0.0), [0.5, 0.5]),
        ("CenteredClipping(None, 1)", (1.0, 2.0, 4.0), [1 / 3, 1 / 3, 1 / 6]),
        ("CenteredClipping(None, 1)", (1.0, 2.0, 4.0, 8.0), [1 / 4, 1 / 4, 1 / 8, 1 / 16]),
        ("CenteredClipping(1.0, 2)", (2.0, 2.0), [0.5, 0.5]),
    ],
)
def test_weights_match_values_by_hand(text, values, due):
    (found,) = weights_of(text, *values)
    assert found == pytest.approx(due)


def test_the_geometric_median_of_numbers_is_their_median():
    """It is found from any majority, also if the two nearest are equal."""
    for values in ((0.0, 0.0, 3.0, 5.0, 9.0), (0.0, 0.001, 0.005)):
        (weights,) = weights_of("GeometricMedian()", *values)
        found = math.fsum(weight * value for weight, value in zip(weights, values))
        assert found == pytest.approx(values[len(values) // 2], rel=1e-4)


def test_scores_count_one_neighbour_at_least():
    """Of three replicas and one liar the paper's number of neighbours is 0, and of two −1."""
    squared = [[0.0, 1.0, 4.0], [1.0, 0.0, 9.0], [4.0, 9.0, 0.0]]
    assert krum_scores(squared, range(3), 1) == [(1.0, 5.0), (1.0, 10.0), (4.0, 13.0)]
    assert krum_scores(squared, range(3), 0) == [(1.0, 5.0), (1.0, 10.0), (4.0, 13.0)]
    assert krum_scores(squared, [0, 2], 1) == [(4.0, 4.0), (4.0, 4.0)]
    assert krum_scores(squared, range(3), -1) == [(5.0, 5.0), (10.0, 10.0), (13.0, 13.0)]


def test_bulyan_takes_the_mean_of_the_selected_values_nearest_to_their_median():
    rows = torch.tensor([[0.0], [1.0], [2.0], [4.0], [9.0]])
    means = {liars: parse(f"Bulyan({liars})").combine(rows).item() for liars in (0, 1, 2)}
    assert means == pytest.approx({0: 16 / 5, 1: 1.0, 2: 2.0})


def test_settings_that_cannot_work_are_refused():
    wrong = [{"radius": 0.0}, {"radius": -1.0}, {"radius": math.inf}]
    wrong += [{"iterations": given} for given in (0, 1.5, 1001, 10**12)]
    for given in wrong:
        with pytest.raises(ConfigurationError, match="a radius above 0 or None, and 1 to 1000 iterations, are needed"):
            CenteredClipping(**given)
    assert CenteredClipping(0.5, 1) == CenteredClipping(radius=0.5, iterations=1)
    MDA(6).check(24)  # 134,596 subsets
    with pytest.raises(
        ConfigurationError, match=r"245,157 subsets, at most 200,000 are compared; choose MultiKrum\(7\)"
    ):
        MDA(7).check(24 - 1)
    with pytest.raises(ConfigurationError, match=r"at least 2·1 \+ 1 = 3 are needed; it tolerates 0 here"):
        MDA(1).check(2)
