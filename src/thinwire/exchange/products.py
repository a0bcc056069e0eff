"""Inner products of replicas' values with the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.exact import total

_RUN = 1 << 12  # columns whose integer products are added without rounding
_BITS = 20  # bits of each of the two integers that represent a value: 2·20 + 12 ≤ 53
_RUNS = 16  # runs at a time


def inner_products(rows: Tensor) -> Tensor:
    """rows·rowsᵀ in fp64 [M, M], of fp32 `rows` [M, n]. The row and column of a replica with values that are not finite are NaN.

    A row is split into runs of 2¹². Relative to the largest of its run, each value is split into two integers of 20 bits. So a library may
    add their products in any order without rounding. The error is below 2⁻⁴⁰ of a run's largest.
    """
    size, numel = rows.shape
    sound = torch.isfinite(rows).all(1)
    found = torch.zeros(size, size, dtype=torch.float64)
    for begin in range(0, numel, _RUN * _RUNS):
        block = rows[:, begin : begin + _RUN * _RUNS].double()
        block[~sound] = 0.0
        short = -block.shape[1] % _RUN
        runs = torch.nn.functional.pad(block, (0, short)).view(size, -1, _RUN).transpose(0, 1)
        found += total(_products(runs))
    found[~sound] = torch.nan
    found[:, ~sound] = torch.nan
    return found


def _products(runs: Tensor) -> Tensor:
    """[R, M, M] of [R, M, 2¹²]."""
    most = runs.abs().amax(2, keepdim=True)
    scale = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - _BITS)
    large = (runs / scale).round_()
    small = ((runs / scale - large) * (1 << _BITS)).round_()
    mixed = large @ small.transpose(1, 2)
    found = (mixed + mixed.transpose(1, 2)).div_(1 << _BITS).add_(large @ large.transpose(1, 2))
    found += (small @ small.transpose(1, 2)).div_(1 << (2 * _BITS))
    return found.mul_(scale).mul_(scale.transpose(1, 2))
