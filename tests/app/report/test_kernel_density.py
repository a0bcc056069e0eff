"""Kernel density: the closed form, the two bandwidths, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from thinwire.app.report.kernel_density import Floats, bandwidth, kernel_density, silverman

SEEDS = (0, 1, 2, 3)


def modes(values: Floats) -> int:
    """The number of maxima of the density of `values`."""
    h = bandwidth(values).h
    y = kernel_density(values, h, np.linspace(values.min() - 3 * h, values.max() + 3 * h, 2000))
    return int(((y[1:-1] > y[:-2]) & (y[1:-1] > y[2:])).sum())


def drawn(seed: int, n: int = 300) -> Floats:
    return np.random.default_rng(seed).normal(size=n)


def test_the_closed_form_of_two_values() -> None:
    """f(x) = (φ((x − 1)/h) + φ((x − 4)/h))/(2h), written out."""
    at, h = np.array([0.0, 1.0, 2.5]), 0.5
    by_hand = [
        sum(math.exp(-(((x - one) / h) ** 2) / 2) for one in (1, 4)) / (2 * h * math.sqrt(2 * math.pi)) for x in at
    ]
    assert kernel_density(np.array([1.0, 4.0]), h, at).tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("n", [40, 2500])
def test_it_integrates_to_one(n: int) -> None:
    """Also where the values are added in several parts."""
    values = drawn(0, n)
    h = bandwidth(values).h
    at = np.linspace(values.min() - 9 * h, values.max() + 9 * h, 4000)
    assert np.trapezoid(kernel_density(values, h, at), at) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_moves_and_stretches_with_the_values(seed: int) -> None:
    """The density of a·x + b is f((y − b)/a)/a."""
    values, at, a, b = drawn(seed), np.linspace(-3, 3, 50), 0.01, 7.0
    own, other = bandwidth(values), bandwidth(a * values + b)
    assert other.h == pytest.approx(a * own.h, rel=1e-6) and other.doubt == own.doubt == ""
    moved = kernel_density(a * values + b, other.h, a * at + b)
    assert moved == pytest.approx(kernel_density(values, own.h, at) / a, rel=1e-5)


def test_silvermans_rule() -> None:
    """Of 1 to 100: s = √(100·101/12), IQR/1.34 is larger; with one huge value the IQR is taken."""
    assert silverman(np.arange(1.0, 101.0)) == pytest.approx(0.9 * math.sqrt(100 * 101 / 12) * 100 ** (-1 / 5))
    assert silverman(np.append(np.arange(1.0, 101.0), 1e9)) == pytest.approx(0.9 * 50 / 1.34 * 101 ** (-1 / 5))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_modes_are_found_and_none_is_invented(seed: int) -> None:
    """A normal sample has one mode, half of it moved by five standard deviations gives two."""
    one = drawn(seed)
    two = one + np.repeat([0.0, 5.0], 150)
    assert not bandwidth(one).doubt and modes(one) == 1
    assert not bandwidth(two).doubt and modes(two) == 2


@pytest.mark.parametrize(
    ("values", "doubt"),
    [
        (drawn(0, 29), "there are 29 values, and at least 30 are needed"),
        (np.ones(50), "1 of 50 values is distinct"),
        (np.arange(60.0) // 4, "15 of 60 values are distinct"),
        (np.append(drawn(0, 60), 1e6), "the two rules for the bandwidth differ by a factor of at least 16"),
        (drawn(0, 90) + np.repeat([0.0, 100.0, 200.0], 30), "the two rules for the bandwidth differ by a factor of"),
    ],
    ids=["few", "equal", "tied", "one far away", "three far apart"],
)
def test_what_cannot_be_trusted_is_named(values: Floats, doubt: str) -> None:
    assert bandwidth(values).doubt.startswith(doubt), bandwidth(values)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_hardly_any_value_is_no_error(n: int) -> None:
    assert bandwidth(np.arange(float(n))).doubt == f"there are {n} values, and at least 30 are needed"
