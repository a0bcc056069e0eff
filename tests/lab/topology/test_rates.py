"""The lowest meeting rates that reach consensus fast enough: against §a.1 of the paper, another solver, and the optimality conditions."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from thinwire.errors import ConfigurationError
from thinwire.lab.topology import (
    Complete,
    Exponential,
    Listed,
    RandomPairs,
    Ring,
    fewest_meetings,
    fitted_rates,
    meeting_rates,
    resistances,
)  # fmt: skip
from thinwire.lab.topology.rates import _Barrier


def barbell(k):
    """Returns two complete graphs of k nodes, joined by one edge."""
    halves = [pair for first in (0, k) for pair in combinations(range(first, first + k), 2)]
    return Listed((*halves, (0, k)))


LINE = Listed(tuple((i, i + 1) for i in range(7)))
STAR = Listed(tuple((0, i) for i in range(1, 8)))


@pytest.mark.parametrize(
    ("topology", "size", "even", "best", "largest"),
    [
        (LINE, 8, 17.940, 17.940, None),
        (Ring(), 8, 9.777, 9.777, 9.777 / 8),
        (STAR, 8, 7.0, 7.0, 1.0),
        (Complete(), 8, 4.950, 4.950, 4.950 / 28),
        (barbell(4), 8, 21.84, 13.2054410, 2.69555),
        (barbell(6), 12, 60.99, 23.1488863, 4.75046),
    ],
    ids=["line", "ring", "star", "complete", "barbell of 4", "barbell of 6"],
)
def test_the_best_rates_solve_the_program_of_the_paper(topology, size, even, best, largest):
    """§a.1. For barbells the sums have the digits on which CVXPY with Clarabel agrees."""
    chi1, chi2 = resistances(meeting_rates(topology, size, 2 / size))
    assert np.sqrt(2 * chi1 * chi2) == pytest.approx(even, rel=1e-3)
    rates = fewest_meetings(topology, size)
    assert rates.sum() / 2 == pytest.approx(best, rel=1e-4 if best < even * (1 - 1e-3) else 1e-3)
    assert (rates == rates.T).all() and ((rates > 0) == topology.edges(size)).all()
    chi1, chi2 = resistances(rates)
    assert chi1 * chi2 == pytest.approx(0.5, abs=1e-6) and chi1 * chi2 <= 0.5
    if largest:
        assert rates.max() == pytest.approx(largest, rel=1e-3)


def test_newtons_method_ends_when_steps_are_lost_in_rounding(monkeypatch):
    """It halved such steps in vain, a hundred times for each weight of the barrier: three quarters of the time for 48 replicas."""
    steps, inverse = [], np.linalg.inv
    monkeypatch.setattr(np.linalg, "inv", lambda matrix: steps.append(1) or inverse(matrix))
    fewest_meetings(Ring(), 16)
    assert len(steps) < 100  # 61; one inverse a step


def test_no_rates_near_the_best_are_better():
    """Of 200 sets of rates near the best, each scaled until it is feasible, none has a smaller sum."""
    topology, size = Listed(((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 3), (1, 4))), 6
    best = fewest_meetings(topology, size)
    rng = np.random.default_rng(0)
    for spread in (0.01, 0.3):
        for _ in range(100):
            other = best * np.exp(spread * rng.normal(size=best.shape))
            other = (other + other.T) / 2
            chi1, chi2 = resistances(other)
            assert other.sum() * np.sqrt(2 * chi1 * chi2) > best.sum() * (1 - 1e-6)


def test_the_newton_step_equals_finite_differences_of_the_barrier():
    """Step and decrement are compared with differences of the value: first differences, then differences of these."""
    topology, size, worth = barbell(3), 6, 0.1
    ones, others = np.nonzero(np.triu(topology.edges(size)))
    barrier = _Barrier.of(ones, others, size)
    rates, bound = barrier._begin()
    at = np.append(rates * np.linspace(1.0, 1.1, len(rates)), bound)

    def slopes(function, h):
        return np.array([(function(at + h * one) - function(at - h * one)) / (2 * h) for one in np.eye(len(at))])

    def slope(point, h=1e-4):
        value = lambda point: barrier._value(point[:-1], float(point[-1]), worth)  # noqa: E731
        return np.array([(value(point + h * one) - value(point - h * one)) / (2 * h) for one in np.eye(len(point))])

    expected = np.linalg.solve(slopes(slope, 1e-3), -slope(at))
    step, decrement = barrier._newton(at[:-1], float(at[-1]), worth)
    np.testing.assert_allclose(step, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert decrement == pytest.approx(float(-slope(at) @ expected), rel=1e-3)


def test_resistances_of_nearly_equal_rates_are_nearly_those_of_equal_ones():
    """Rounding can leave the Laplacian's eigenvalue 0 at more than 1e-15 of the largest; its inverse is no part of the resistance."""
    rng, even = np.random.default_rng(0), meeting_rates(Complete(), 24, 1.0)
    for _ in range(60):
        near = 1 + 1e-9 * rng.normal(size=even.shape)
        assert resistances(even * (near + near.T) / 2) == pytest.approx(resistances(even), rel=1e-7)


def test_fitted_rates_have_the_mean_rate_and_integer_ratios():
    even, fitted = meeting_rates(barbell(4), 8, 2.0), fitted_rates(barbell(4), 8, 2.0)
    assert even.sum() == pytest.approx(fitted.sum()) == pytest.approx(16)
    assert fitted[0, 4] / even[0, 4] == pytest.approx(2.69555 * 13 / 13.2054, rel=1e-3)
    shares = fitted / fitted[fitted > 0].min()
    np.testing.assert_allclose(shares * round(4096 * 0.775 / 13.2054), np.round(shares * 240), rtol=1e-9)
    assert fitted_rates(Ring(), 1, 1.0).shape == (1, 1)


@pytest.mark.parametrize(
    ("topology", "size", "said"),
    [
        (Listed(((0, 1), (2, 3))), 4, "in 2 parts: no path leads from replica 0 to replica 2"),
        (Exponential(), 8, "edges in both directions"),
        (RandomPairs(), 8, "the same edges in every round"),
    ],
    ids=["parts", "one way", "drawn"],
)
def test_unsuitable_graphs_are_refused(topology, size, said):
    with pytest.raises(ConfigurationError, match=said):
        fewest_meetings(topology, size)
