"""Kernel density of a sample, with the reason where it cannot be trusted. Needs numpy only.

The bandwidth is the geometric mean of two rules: Silverman's, and the one under which each value is most likely given the others. Both
are for independent values; values of a run that follow each other are alike, so do not trust fine detail.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from thinwire.app.records.history import Floats

LEAST_VALUES = 30  # fewest values
DISTINCT = 0.5  # least share of distinct values
APART = 3.0  # most that the two bandwidths differ by, as a factor
MOST_SAMPLED = 300  # most values by which the bandwidth is chosen
GRID = 2.0 ** (np.arange(-16, 17) / 4)  # bandwidths that are tried, in units of Silverman's


class Bandwidth(NamedTuple):
    """The bandwidth of a sample in its unit, NaN if there is none, and why no density should be drawn ("" if one may be)."""

    h: float
    doubt: str


def silverman(values: Floats) -> float:
    """Silverman's rule: h = 0.9·min(s, IQR/1.34)·n^(−1/5); s alone where the IQR is 0.

    Source: Silverman, Density Estimation for Statistics and Data Analysis (1986), eq. 3.31.

    Args:
        values: [n], n > 1.

    >>> round(silverman(np.arange(1.0, 101.0)), 3)   # s = 29.01, IQR/1.34 = 36.94
    10.395
    """
    deviation = float(values.std(ddof=1))
    low, high = np.quantile(values, [0.25, 0.75]).tolist()
    spread = min(deviation, (high - low) / 1.34) or deviation
    return float(0.9 * spread * len(values) ** (-1 / 5))


def bandwidth(values: Floats) -> Bandwidth:
    """The geometric mean of Silverman's bandwidth and of the one with the highest leave-one-out likelihood Σ_i ln f_{−i}(x_i) of a Gaussian
    kernel, and what speaks against both.

    Source: leave-one-out likelihood: Habbema et al. (1974), Duin (1976). Of more than 300 values every k-th is used, and h is scaled by
    Silverman's power of n.

    Args:
        values: [n], finite.

    >>> bandwidth(np.zeros(99)).doubt
    '1 of 99 values is distinct'
    """
    n, distinct = len(values), len(np.unique(values))
    doubt = f"there are {n} values, and at least {LEAST_VALUES} are needed" if n < LEAST_VALUES else ""
    if not doubt and distinct < DISTINCT * n:
        doubt = f"{distinct} of {n} values {'is' if distinct == 1 else 'are'} distinct"
    if n < 2 or distinct < 2:
        return Bandwidth(math.nan, doubt)
    rule = silverman(values)
    some = values[:: math.ceil(n / MOST_SAMPLED)]
    # in units of Silverman's for these
    squares = np.square((some[:, None] - some[None]) / (rule * (n / len(some)) ** (1 / 5)))
    np.fill_diagonal(squares, np.inf)
    likely = max(GRID, key=lambda h: _likelihood(squares, h))
    apart = max(likely, 1 / likely)
    if not doubt and apart > APART:
        least = " at least" if apart >= GRID[-1] else ""
        doubt = f"the two rules for the bandwidth differ by a factor of{least} {apart:.2g}, and {APART:g} is the most"
    return Bandwidth(rule * math.sqrt(likely), doubt)


def kernel_density(values: Floats, h: float, at: Floats) -> Floats:
    """The density f(x) = 1/(n·h) Σ_i φ((x − x_i)/h), φ the standard normal's, of `values` [n] at `at` [g]: [g].

    >>> kernel_density(np.zeros(3), 1.0, np.zeros(1)).round(4).tolist()   # 1/√(2π)
    [0.3989]
    """
    summed = np.zeros(len(at))
    for part in np.array_split(values, math.ceil(len(values) / 1000)):  # bounds the memory
        summed += np.exp(-0.5 * np.square((at[:, None] - part[None]) / h)).sum(axis=1)
    density: Floats = summed / (len(values) * h * math.sqrt(2 * math.pi))
    return density


def _likelihood(squares: Floats, h: float) -> float:
    """The mean of ln f_{−i}(x_i), up to a constant. `squares` [n, n] are the squared distances, infinite from each value to itself."""
    nearest = squares.min(axis=1, keepdims=True)  # so that no sum is all zeros
    sums = np.exp((nearest - squares) / (2 * h * h)).sum(axis=1)
    return float(np.mean(np.log(sums) - nearest[:, 0] / (2 * h * h))) - math.log(h)
