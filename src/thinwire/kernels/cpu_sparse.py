"""numba: whole numbers without gaps, and where the largest are."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.compiled import INFINITE, ONE, ZERO, compiled, i32, inlined, magnitude, u8, u64

_GROUP = u64(32)  # elements that are passed over at once where none is large
_BINS = 1 << 11
_DIGITS = ((20, 31), (9, 20), (0, 9))  # of a magnitude's 31 bits, the highest first: where they begin and end


def pack(numbers: Tensor, packed: Tensor, width: int) -> None:
    _pack(numbers.numpy(), packed.numpy(), u64(width))


def unpack(packed: Tensor, numbers: Tensor, width: int) -> None:
    _unpack(packed.numpy(), numbers.numpy(), u64(width))


def select_above(x: Tensor, threshold: float, index: Tensor) -> int:
    bits = i32(-1) if threshold < 0 else np.float32(threshold).view(np.int32)
    return int(_select_above(x.detach().numpy().view(np.int32), bits, index.numpy()))


def select_largest(x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
    return bool(_select_largest(x.detach().numpy().view(np.int32), u64(chunk), u64(count), index.numpy()))


@compiled
def _pack(numbers: Any, packed: Any, width: Any) -> None:
    held, bits, place = ZERO, ZERO, ZERO
    for i in range(numbers.size):
        held |= u64(numbers[i]) << bits
        bits += width
        while bits >= u64(8):
            packed[place] = u8(held & u64(0xFF))
            held, bits, place = held >> u64(8), bits - u64(8), place + ONE
    if bits > ZERO:
        packed[place] = u8(held)


@compiled
def _unpack(packed: Any, numbers: Any, width: Any) -> None:
    held, bits, place = ZERO, ZERO, ZERO
    for i in range(numbers.size):
        while bits < width:
            held |= u64(packed[place]) << bits
            bits, place = bits + u64(8), place + ONE
        numbers[i] = np.int64(held & ((ONE << width) - ONE))
        held, bits = held >> width, bits - width


@inlined
def _highest(bits: Any, begin: Any, end: Any) -> Any:
    most = i32(0)
    for i in range(begin, end):
        most = max(most, magnitude(bits[i]))
    return most


@compiled
def _select_above(bits: Any, threshold: Any, index: Any) -> Any:
    n, room, count = u64(bits.size), u64(index.size), ZERO
    at = ZERO
    while at < n:
        stop = min(at + _GROUP, n)
        if _highest(bits, at, stop) > threshold:
            for i in range(at, stop):
                size = magnitude(bits[i])
                if count < room:
                    index[count] = np.int64(i)
                count += u64((size > threshold) & (size <= INFINITE))
        at = stop
    return count


@inlined
def _least_kept(bits: Any, begin: Any, end: Any, count: Any, bins: Any) -> Any:
    """The `count`-th largest magnitude's bits, digit by digit; how many of that size are among the `count`; and the
    largest.
    """
    prefix, worst = i32(0), i32(0)
    for place, above in _DIGITS:
        bins[:] = 0
        for i in range(begin, end):
            size = magnitude(bits[i])
            worst = max(worst, size)
            if (np.int64(size) >> above) == (np.int64(prefix) >> above):
                bins[u64(size >> place) & u64(_BINS - 1)] += 1
        digit = u64(_BINS - 1)
        while u64(bins[digit]) < count:
            count -= u64(bins[digit])
            digit -= ONE
        prefix = i32(prefix | i32(np.int64(digit) << place))
    return prefix, count, worst


@compiled
def _select_largest(bits: Any, chunk: Any, count: Any, index: Any) -> Any:
    n, worst, k = u64(bits.size), i32(0), ZERO
    bins = np.empty(_BINS, np.int64)
    begin = ZERO
    while begin < n:
        end = min(begin + chunk, n)
        kept = (count * (end - begin) + chunk - ONE) // chunk
        least, equal, most = _least_kept(bits, begin, end, kept, bins)
        worst = max(worst, most)
        at = begin
        while at < end:
            stop = min(at + _GROUP, end)
            if _highest(bits, at, stop) >= least:
                for i in range(at, stop):
                    size = magnitude(bits[i])
                    even = (size == least) & (equal > ZERO)
                    if even | (size > least):
                        index[k] = np.int64(i - begin)
                        k += ONE
                        equal -= u64(even)
            at = stop
        begin = end
    return worst < INFINITE
