"""The values of a small number format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["exponent", "bf16", "fp32"]


@dataclass(frozen=True)
class Grid:
    """The values of a small number format.

    A code is a sign (its highest bit) and a magnitude that counts upward: in even steps from zero to the least normal
    number, above it in steps that double at each power of two.

    Args:
        bits: number of bits of a code.
        mantissa: number of bits of the mantissa.
        normal: the least normal number, a power of two.
        top: number of the code of the largest magnitude.

    >>> Grid(bits=4, mantissa=1, normal=1.0, top=7).values[:8].tolist()  # E2M1
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """

    bits: int
    mantissa: int
    normal: float
    top: int

    @cached_property
    def values(self) -> Tensor:
        """For every code its value: [2^bits]."""
        code = torch.arange(1 << (self.bits - 1))
        binade, steps = (code >> self.mantissa).sub(1).clamp_(0), 1 << self.mantissa
        within = torch.where(code < steps, code, code % steps + steps)
        magnitudes = torch.ldexp(within * (self.normal / steps), binade)
        return torch.cat([magnitudes, -magnitudes])

    @cached_property
    def largest(self) -> float:
        return self.values[self.top].item()

    @cached_property
    def highest(self) -> int:
        """The most that a scale's exponent may be, such that the largest value is an fp32 number and so is 1/scale."""
        return min(128 - math.frexp(self.largest)[1], 126)
