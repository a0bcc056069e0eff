"""Compilation of the CPU's loops, and operations on bits.

numba widens every integer to 64 bits, and checks indices that could be negative; both prevent vector instructions. So 32-bit results are
cast back at once, sizes and indices are unsigned 64-bit (numba makes a float of a signed and an unsigned 64-bit number, so they must not
be mixed), and shifts by a variable are separate instructions. No fastmath: a product and a sum round separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

i32, f32, f64, u8, u64 = np.int32, np.float32, np.float64, np.uint8, np.uint64
ZERO, ONE, TWO = u64(0), u64(1), u64(2)
MAGNITUDE = i32(0x7FFFFFFF)  # fp32's bits without the sign
STRIPE = u64(4096)  # elements whose codes are in the cache, with one byte each, during a loop
INFINITE = i32(0x7F800000)  # the bits of infinity; those of NaN are above


def compiled(function: F) -> F:
    """Compile to machine code at the first call, without the GIL. The code is cached beside the source, or in the user's cache folder, or
    not at all, if neither can be written.
    """
    try:
        kept: F = njit(function, nogil=True, error_model="numpy", cache=True)
    except RuntimeError:  # neither can be written
        kept = njit(function, nogil=True, error_model="numpy")
    return kept


def inlined(function: F) -> F:
    """Inline the function into its compiled callers."""
    part: F = njit(function, nogil=True, error_model="numpy", forceinline=True)
    return part


@inlined
def bits_of(x: Any) -> Any:
    return np.float32(x).view(np.int32)


@inlined
def real_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@inlined
def magnitude(bits: Any) -> Any:
    return i32(bits & MAGNITUDE)


@inlined
def drawn(stream: Any, number: Any) -> Any:
    """SplitMix64, as in rng.py."""
    z = stream + (number + ONE) * u64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


def _right(typing: Any, bits: Any, by: Any) -> Any:
    def shift(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.lshr(*arguments)

    return types.int32(types.int32, types.int32), shift


def _left(typing: Any, bits: Any, by: Any) -> Any:
    def shift(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.shl(*arguments)

    return types.int32(types.int32, types.int32), shift


right: Any = intrinsic(_right)  # shift 32 bits to the right, with zeros
left: Any = intrinsic(_left)
