"""Sums whose bits do not depend on the machine.

A packet must decode to the same bits on every replica, but the order in which a library's matrix product adds depends on
processor, version and number of threads. Here the order is fixed, or does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_RUN = 1 << 20


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp64, for a [n, k] and b [k, m].

    The rows of a and the columns of b are first rounded to ⌊(52 − ⌈log₂ k⌉) / 2⌋ bits of their largest (23 for k = 64),
    so few that all partial sums are whole numbers below 2⁵³: in whatever order they are added, nothing is rounded.
    """
    bits = (52 - (max(1, a.shape[1]) - 1).bit_length()) // 2
    (whole_a, scale_a), (whole_b, scale_b) = _whole(a, 1, bits), _whole(b, 0, bits)
    return (whole_a @ whole_b).mul_(scale_a).mul_(scale_b)


def _whole(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """`x` as whole numbers up to 2^bits, and the powers of two to multiply them by."""
    x = x.double()
    most = x.abs().amax(dim, keepdim=True) if x.numel() else x.sum(dim, keepdim=True)
    scale = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - bits)
    return (x / scale).round_(), scale


def total(x: Tensor) -> Tensor:
    """The sum over the first dimension: the second half is added to the first until one row is left."""
    while len(x) > 1:
        half = -(-len(x) // 2)
        first = x[:half].clone()
        first[: len(x) - half] += x[half:]
        x = first
    return x.sum(0)  # of one, or of none


def summed(x: Tensor) -> float:
    """The sum of flat `x`, in fp64: of each 2²⁰ elements by `total`, then from first to last."""
    return _in_order(total(part.double()) for part in torch.split(x, _RUN))


def energy(x: Tensor) -> float:
    """‖x‖² of flat `x`, as `summed`."""
    return _in_order(total(part.double().square_()) for part in torch.split(x, _RUN))


def _in_order(parts: Iterable[Tensor]) -> float:
    """Python's own `sum` compensates from 3.12 on, and not before."""
    added = 0.0
    for part in parts:
        added += float(part)
    return added


def root(x: Tensor) -> Tensor:
    """√x of fp32, rounded as IEEE has it. torch's own is MKL's, which on some processors is off by a last bit: of fp64 that is lost here,
    since no root of an fp32 number is within 2⁻⁵⁰ of where fp32 rounds up.
    """
    return x.double().sqrt_().float()


def orthonormal(columns: Tensor) -> Tensor:
    """fp32 `columns` [n, r] made orthonormal from left to right, in fp64; those that depend on the ones before become zero.

    Gram and Schmidt's, each projection taken off twice (Giraud, Langou, 2002: twice is enough).
    """
    made: list[Tensor] = []
    for column in columns.double().unbind(1):
        begun = total(column * column)
        for _ in range(2):
            for other in made:
                column = column - other * total(other * column)
        left = total(column * column)
        sound = bool(left > begun * 1e-24) and bool(left > 0)
        made.append(column / math.sqrt(left) if sound else torch.zeros_like(column))
    return torch.stack(made, 1).float() if made else columns


@cache
def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix [size, size] in fp64, frequency by place; its transpose is its inverse."""
    return torch.tensor(
        [
            [math.sqrt((2 if f else 1) / size) * math.cos(math.pi * f * (2 * i + 1) / (2 * size)) for i in range(size)]
            for f in range(size)
        ],
        dtype=torch.float64,
    )


def saturated(x: Tensor) -> Tensor:
    """fp64 to fp32. Values that are too large become the largest fp32; infinities, which a hostile peer may send, stay, so that they are found."""
    return torch.where(x.isinf(), x, x.clamp(-_LARGEST, _LARGEST)).float()
