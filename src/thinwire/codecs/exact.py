"""Sums and quotients whose bits do not depend on the machine.

A packet must decode to the same bits on every replica, but a library's matrix product adds in an order that depends on
processor, version and number of threads. The sums here have a fixed order, or do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_RUN = 1 << 20


def divide(x: Tensor, by: float) -> Tensor:
    """x ← x / by. If `by` is a number, torch multiplies by its reciprocal on CUDA, which rounds twice."""
    return x.div_(x.new_full((), by))


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in fp64 of a [n, k] and b [k, m].

    The rows of a and the columns of b are first rounded to ⌊(52 − ⌈log₂ k⌉) / 2⌋ bits of their largest value (23 for k = 64).
    Then all partial sums are integers below 2⁵³, and no sum is rounded in any order.
    """
    bits = (52 - (a.shape[1] - 1).bit_length()) // 2
    (whole_a, scale_a), (whole_b, scale_b) = _whole(a, 1, bits), _whole(b, 0, bits)
    return (whole_a @ whole_b).mul_(scale_a).mul_(scale_b)


def _whole(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """`x` as integers up to 2^bits, and the powers of two that scale them back."""
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
    return x.sum(0)  # one row, or none


def summed(x: Tensor) -> float:
    """The sum of flat `x` in fp64: `total` of each 2²⁰ elements, added from first to last."""
    return _in_order(total(part.double()) for part in torch.split(x, _RUN))


def energy(x: Tensor) -> float:
    """‖x‖² of flat `x`, added like `summed`."""
    return _in_order(total(part.double().square_()) for part in torch.split(x, _RUN))


def _in_order(parts: Iterable[Tensor]) -> float:
    """The sum in the given order. Python's `sum` compensates rounding since 3.12 only."""
    added = 0.0
    for part in parts:
        added += float(part)
    return added


def root(x: Tensor) -> Tensor:
    """√x of fp32, rounded as in IEEE 754. torch uses MKL's root, whose last bit is wrong on some processors. In fp64 that error does not
    matter: no root of an fp32 number is within 2⁻⁵⁰ of a point where rounding to fp32 changes.
    """
    return x.double().sqrt_().float()


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormalise fp32 `columns` [n, r] from left to right, in fp64. Columns that depend on earlier ones become zero.

    Gram-Schmidt with each projection subtracted twice (Giraud, Langou, 2002: twice is enough).
    """
    made: list[Tensor] = []
    for column in columns.double().unbind(1):
        begun = total(column * column)
        for _ in range(2):
            for other in made:
                column = column - other * total(other * column)
        left = total(column * column)
        made.append(column / math.sqrt(left) if left > begun * 1e-24 else torch.zeros_like(column))
    return torch.stack(made, 1).float() if made else columns


@cache
def cosines(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix [size, size] in fp64; rows are frequencies, and its transpose is its inverse."""
    return torch.tensor(
        [
            [math.sqrt((2 if f else 1) / size) * math.cos(math.pi * f * (2 * i + 1) / (2 * size)) for i in range(size)]
            for f in range(size)
        ],
        dtype=torch.float64,
    )


def saturated(x: Tensor) -> Tensor:
    """Convert fp64 to fp32. Too large values become the largest fp32; infinities, which a hostile peer may send, stay, so that they are noticed."""
    return torch.where(x.isinf(), x, x.clamp(-_LARGEST, _LARGEST)).float()
