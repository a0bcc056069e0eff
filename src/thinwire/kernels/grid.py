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

    A code is a sign (its highest bit) and the number of a magnitude. Magnitudes have equal steps from zero to the least normal number,
    and above it steps that double at each power of two.

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
        """The value of every code: [2^bits]."""
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
        """The highest exponent of a scale with which the largest value and 1/scale are fp32 numbers."""
        return min(128 - math.frexp(self.largest)[1], 126)
