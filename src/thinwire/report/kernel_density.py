"""Kernel density of a sample, with the reason where it cannot be trusted. Needs numpy only.

The bandwidth is the geometric mean of two rules: Silverman's, and the one under which each value is most likely given the others. Both
are for independent values; values of a run that follow each other are alike, so do not trust fine detail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from thinwire.records.replica_record import Floats

LEAST = 30  # fewest values
DISTINCT = 0.5  # least share of distinct values
APART = 3.0  # most that the two bandwidths differ by, as a factor
CARRY = 5.0  # fewest values that carry the estimate at half of the values
MOST = 300  # most values by which the bandwidth is chosen
GRID = 2.0 ** (np.arange(-16, 17) / 4)  # bandwidths that are tried, in units of Silverman's


@dataclass(frozen=True, eq=False)
class Bandwidth:
    """Two bandwidths of points [n, d], in units of each coordinate's spread [d], and why no density should be drawn ("" if one may be)."""

    likely: float
    silverman: float
    spread: Floats
    doubt: str

    @property
    def each(self) -> Floats:
        """The bandwidth of each coordinate [d], in its unit: the geometric mean of the two."""
        return math.sqrt(self.likely * self.silverman) * self.spread


def silverman(points: Floats) -> tuple[float, Floats]:
    """Silverman's rule: h = 0.9·n^(−1/(d + 4)), in units of each coordinate's spread min(s, IQR/1.34); s alone where the IQR is 0.

    Source: Silverman, Density Estimation for Statistics and Data Analysis (1986), eq. 3.31. *Differs*: d > 1 keeps the factor 0.9.

    Args:
        points: [n] or [n, d], n > 1.

    >>> h, spread = silverman(np.arange(1.0, 101.0))   # s = 29.01, IQR/1.34 = 36.94
    >>> round(float(h * spread[0]), 3)
    10.395
    """
    rows = _rows(points)
    deviation = rows.std(axis=0, ddof=1)
    quartiles = np.quantile(rows, [0.25, 0.75], axis=0)
    between = (quartiles[1] - quartiles[0]) / 1.34
    spread = np.where(between > 0, np.minimum(deviation, between), deviation)
    return float(0.9 * len(rows) ** (-1 / (rows.shape[1] + 4))), spread


def bandwidth(points: Floats) -> Bandwidth:
    """Silverman's bandwidth, the one with the highest leave-one-out likelihood Σ_i ln f_{−i}(x_i) of a Gaussian kernel, and what speaks
    against both.

    Source: leave-one-out likelihood: Habbema et al. (1974), Duin (1976). The last of the doubts is the caution of Biroli and Mézard
    (arXiv 2408.05807): below a bandwidth that grows with d/ln n an estimate is the contribution of a few points. Here these are counted:
    (Σ w)²/Σ w² at each point, w the kernel's values at the others. Of more than 300 points every k-th is used, and h is scaled by
    Silverman's power of n.

    Args:
        points: [n] or [n, d], finite.

    >>> bandwidth(np.zeros(99)).doubt
    '1 of 99 values is distinct'
    """
    rows = _rows(points)
    n, distinct = len(rows), len(np.unique(rows, axis=0))
    doubt = f"there are {n} values, and at least {LEAST} are needed" if n < LEAST else ""
    if not doubt and distinct < DISTINCT * n:
        doubt = f"{distinct} of {n} values {'is' if distinct == 1 else 'are'} distinct"
    if n < 2 or distinct < 2:
        return Bandwidth(math.nan, math.nan, np.ones(rows.shape[1]), doubt)
    rule, spread = silverman(rows)
    some = (rows / np.where(spread > 0, spread, 1.0))[:: math.ceil(n / MOST)]
    scale = rule * (len(some) / n) ** (-1 / (rows.shape[1] + 4))  # Silverman's for these
    squares = np.square(some[:, None] - some[None]).sum(axis=2)
    np.fill_diagonal(squares, np.inf)
    likely = max(GRID, key=lambda factor: _likelihood(squares, factor * scale, rows.shape[1]))
    weights = _weights(squares, math.sqrt(likely) * scale)
    carry = float(np.median(weights.sum(axis=1) ** 2 / np.square(weights).sum(axis=1)))
    apart = max(likely, 1 / likely)
    if not doubt and apart > APART:
        least = " at least" if apart >= GRID[-1] else ""
        doubt = f"the two rules for the bandwidth differ by a factor of{least} {apart:.2g}, and {APART:g} is the most"
    if not doubt and carry < CARRY:
        doubt = f"at half of the values fewer than {CARRY:g} others carry the estimate ({carry:.1f})"
    return Bandwidth(float(likely) * rule, rule, spread, doubt)


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


def _rows(points: Floats) -> Floats:
    given = np.asarray(points, dtype=np.float64)
    return given[:, None] if given.ndim == 1 else given


def _weights(squares: Floats, h: float) -> Floats:
    """The kernel between points [n, n], each row in units of its largest, so that none is all zero."""
    nearest = squares.min(axis=1, keepdims=True)
    weights: Floats = np.exp((nearest - squares) / (2 * h * h))
    return weights


def _likelihood(squares: Floats, h: float, d: int) -> float:
    """The mean of ln f_{−i}(x_i), up to a constant."""
    nearest = squares.min(axis=1) / (2 * h * h)
    return float(np.mean(np.log(_weights(squares, h).sum(axis=1)) - nearest)) - d * math.log(h)
