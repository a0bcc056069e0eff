"""Algorithms with a loop of their own, over any `Group`: what no composition of the other pieces is."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.methods.base import Attached, Method
from thinwire.methods.zeroth_order import JustOneByte, Log, ZerothOrder


def just_one_byte(*, samples: int = 4, radius: float = 1e-3) -> JustOneByte:
    """Just One Byte (Zelikman et al., 2023): fine-tune with forward passes only, a byte a value on the wire."""
    return JustOneByte(samples=samples, radius=radius)


METHODS: dict[str, Callable[..., Method]] = {"just_one_byte": just_one_byte}

__all__ = ["METHODS", "Attached", "JustOneByte", "Log", "Method", "ZerothOrder", "just_one_byte"]
