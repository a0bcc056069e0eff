"""Stretches of time of a run, and numbers from the fields of its events."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on a replica, in seconds since the run began."""

    begin: float
    end: float
    step: int
    fragment: int = -1

    def overlap(self, other: Span) -> float:
        """Seconds that both have in common."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclass(frozen=True, slots=True)
class Lost:
    """Work that a resume did again."""

    span: Span
    steps: int
    nbytes: int


def number(value: object) -> float:
    """A field that should be a number; NaN if it is none."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan


def whole(value: object) -> int:
    """A field that should be a whole number; 0 if it is no finite one."""
    return int(finite(value))


def finite(value: object) -> float:
    """A field that should be a finite number; 0 if it is none."""
    result = number(value)
    return result if math.isfinite(result) else 0.0
