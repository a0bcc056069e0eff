"""`Kernels` in numba: packed integers, and selection of the largest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import reference
from thinwire.kernels.cpu_bits import zeros_below
from thinwire.kernels.numba_support import (
    INFINITE,
    MAGNITUDE,
    ONE,
    STRIPE,
    ZERO,
    compiled,
    drawn,
    f64,
    i32,
    inlined,
    magnitude,
    u8,
    u64,
)

_EIGHTH = i32(1 << 20)  # in the bits of a magnitude: an eighth to a sixteenth of it
_LONG = u64(256)  # elements; in shorter chunks the search among all is as fast
_MANY = 1 << 16  # elements; with fewer, sampling saves no time


def pack(numbers: Tensor, packed: Tensor, width: int) -> None:
    _pack(numbers.numpy(), packed.numpy(), u64(width))


def unpack(packed: Tensor, numbers: Tensor, width: int) -> None:
    _unpack(packed.numpy(), numbers.numpy(), u64(width))


def add_at(index: Tensor, values: Tensor, out: Tensor, first: int = 0) -> None:
    _add_at(index.numpy(), values.numpy(), out.detach().numpy(), u64(first))


def add_sent(values: Tensor, total: Tensor, counted: Tensor, weight: float) -> None:
    """Skips sixteen values at a time if all are +0."""
    given = values.numpy()
    pairs = given[: len(given) & ~1].view(np.uint64)
    _add_sent(given, pairs, total.numpy(), counted.numpy(), np.float32(weight))


def divide_sent(total: Tensor, counted: Tensor) -> None:
    _divide_sent(total.numpy(), counted.numpy())


def mean_sent(index: Tensor, values: Tensor, weights: Tensor, out: Tensor) -> None:
    _mean_sent(index.numpy(), values.numpy(), weights.numpy(), out.numpy())


def select_largest(x: Tensor, chunk: int, count: int, index: Tensor) -> bool:
    """In one large chunk, the values above a threshold from a sample are selected first, as in Deep Gradient Compression (arXiv
    1712.01887, §3; its code also samples at a fixed stride). *Differs*: the threshold is low enough that enough values are above it, and
    the largest of these are kept. So the sample changes only the time and never the result. If too few or too many are above it (for
    values with the period of the sample), all values are searched.
    """
    bits = _bits(x)
    if chunk < x.numel() or x.numel() < _MANY or not 0 < count <= x.numel() // 4:
        return bool(_select_largest(bits, u64(chunk), u64(count), index.numpy(), i32(0)))
    places, some, threshold = (
        np.empty(2 * count, np.int64),
        np.empty(2 * count, np.int32),
        _threshold(suggested(x, count)),
    )
    found, worst = _select_above(bits, threshold, places, some)
    if not count <= found <= len(places):
        return bool(_select_largest(bits, u64(chunk), u64(count), index.numpy(), i32(0)))
    _select_largest(some[:found], u64(found), u64(count), index.numpy(), max(threshold, i32(0)))
    index.copy_(torch.from_numpy(places).index_select(0, index))
    return bool(worst < INFINITE)


def suggested(x: Tensor, count: int) -> float:
    """A magnitude such that almost surely `count` of `x`, and few more, are above it; from a sample of about every √count-th value.

    About h = √count of the `count` values are in the sample. h + 4·√h of the sample (4 standard deviations more) are above the threshold:
    for h = 400 (1 % of 16 million) in total 20 % more than `count`, and too few once in 30,000 times.
    """
    stride = math.isqrt(count) | 1  # odd, so that it reaches every column of a matrix
    sample = _bits(x)[stride // 2 :: stride] & MAGNITUDE
    hits = count / stride
    rank = min(math.ceil(hits + 4 * math.sqrt(hits)) + 1, len(sample))
    least = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    return float((least - i32(1)).view(np.float32)) if least else -1.0  # so that equal magnitudes are above it too


def _threshold(magnitude: float) -> Any:
    """The bits of a magnitude; -1 is below all."""
    with np.errstate(over="ignore"):  # larger than fp32's largest becomes infinity
        return i32(-1) if magnitude < 0 else np.float32(magnitude).view(np.int32)


def _bits(x: Tensor) -> Any:
    return x.detach().numpy().view(np.int32)


def select_drawn(stream: int, numel: int, index: Tensor) -> None:
    """Selects the draws below a bound that is almost surely (5 standard deviations) high enough, and then the least of these."""
    count = len(index)
    if not count:
        return
    bound = (count + 5 * math.sqrt(count) + 16) / max(1, numel)
    places, draws = (np.empty(count + 10 * math.isqrt(count) + 64, np.int64) for _ in range(2))
    found = _select_drawn(u64(stream), u64(numel), int((min(bound, 1.0) - 0.5) * (2.0**64 - 4096)), places, draws)
    if not count <= found <= len(places):
        return reference.select_drawn(stream, numel, index)
    places, draws = places[:found], draws[:found]
    index.numpy()[:] = places[draws <= np.partition(draws, count - 1)[count - 1]]


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


@compiled
def _add_at(index: Any, values: Any, out: Any, first: Any) -> None:
    for j in range(u64(index.size)):
        out[u64(index[j]) - first] += values[j]


@inlined
def _add_these(values: Any, total: Any, counted: Any, weight: Any, begin: Any, end: Any) -> None:
    for i in range(begin, end):
        value = values[i]
        if value != np.float32(0.0):
            total[i] += np.float32(value * weight)
            counted[i] += weight
        values[i] = np.float32(0.0)


@compiled
def _add_sent(values: Any, pairs: Any, total: Any, counted: Any, weight: Any) -> None:
    """`pairs` has the bits of two values in each element."""
    n = u64(values.size)
    for j in range(n >> u64(4)):
        at = u64(j) << u64(3)
        some = pairs[at] | pairs[at + ONE] | pairs[at + u64(2)] | pairs[at + u64(3)]
        some |= pairs[at + u64(4)] | pairs[at + u64(5)] | pairs[at + u64(6)] | pairs[at + u64(7)]
        if some != ZERO:
            _add_these(values, total, counted, weight, at << ONE, (at << ONE) + u64(16))
    _add_these(values, total, counted, weight, n & ~u64(15), n)


@compiled
def _divide_sent(total: Any, counted: Any) -> None:
    for i in range(u64(total.size)):
        count = counted[i]
        total[i] /= count if count != np.float32(0.0) else np.float32(1.0)


@compiled
def _mean_sent(index: Any, values: Any, weights: Any, out: Any) -> None:
    """A stripe at a time: add all packets' values, then divide them; a count that was used becomes zero, so each value is divided once."""
    n, size, at = u64(out.size), u64(index.size) // u64(weights.size), ZERO
    counted, places = np.zeros(STRIPE, np.float32), np.empty(weights.size, np.uint64)
    for m in range(places.size):
        places[m] = u64(m) * size
    while at < n:
        stop = min(at + STRIPE, n)
        for i in range(at, stop):
            out[i] = np.float32(0.0)
        for m in range(places.size):
            j, last, weight = places[m], u64(m + 1) * size, weights[m]
            while j < last and u64(index[j]) < stop:
                to, value = u64(index[j]), values[j]
                if value != np.float32(0.0):
                    out[to] += np.float32(value * weight)
                    counted[to - at] += weight
                j += ONE
        for m in range(places.size):
            j, last = places[m], u64(m + 1) * size
            while j < last and u64(index[j]) < stop:
                to = u64(index[j])
                count = counted[to - at]
                if count != np.float32(0.0):
                    out[to] /= count
                    counted[to - at] = np.float32(0.0)
                j += ONE
            places[m] = j
        at = stop


@inlined
def _flag(bits: Any, begin: Any, end: Any, threshold: Any, flags: Any) -> Any:
    """Write a flag for each element of a stripe: whether it is above the threshold (NaN and the fill of the last eight are not). Returns
    the largest."""
    most = i32(0)
    for i in range(begin, end):
        size = magnitude(bits[i])
        most = max(most, size)
        flags[i - begin] = u8((size > threshold) & (size <= INFINITE))
    for j in range(end - begin, (end - begin + u64(7)) & ~u64(7)):
        flags[j] = u8(0)
    return most


@inlined
def _masks(flags: Any, size: Any, masks: Any) -> Any:
    """Write the first `size` flags of a stripe as bits. Returns the number of words of 64."""
    eights = flags.view(np.uint64)
    count = (size + u64(7)) >> u64(3)
    for j in range(count):
        masks[j] = u8(eights[j] * u64(0x0102040810204080) >> u64(56))
    for j in range(count, (count + u64(7)) & ~u64(7)):
        masks[j] = u8(0)
    return (count + u64(7)) >> u64(3)


@compiled
def _select_above(bits: Any, threshold: Any, index: Any, some: Any) -> Any:
    """Count the magnitudes above `threshold`, of which NaN is none, and write their indices and bits, as many as fit. Returns the count, and the
    largest magnitude."""
    n, room, count, worst = u64(bits.size), u64(index.size), ZERO, i32(0)
    flags, masks = np.empty(STRIPE, np.uint8), np.empty(STRIPE >> u64(3), np.uint8)
    words = masks.view(np.uint64)
    at = ZERO
    while at < n:
        stop = min(at + STRIPE, n)
        most = _flag(bits, at, stop, threshold, flags)
        worst = max(worst, most)
        for j in range(_masks(flags, stop - at, masks) if most > threshold else ZERO):
            word = words[j]
            while word != ZERO:
                if count < room:
                    place = at + (u64(j) << u64(6)) + u64(zeros_below(word))
                    index[count], some[count] = np.int64(place), bits[place]
                count += ONE
                word &= word - ONE
        at = stop
    return count, worst


@compiled
def _select_drawn(stream: Any, n: Any, bound: Any, places: Any, draws: Any) -> Any:
    """Write all draws up to `bound` that fit, and return their number."""
    room, count, at = u64(places.size), ZERO, ZERO
    some, flags = np.empty(STRIPE, np.int64), np.empty(STRIPE, np.uint8)
    eights = flags.view(np.uint64)
    while at < n:
        size = min(STRIPE, n - at)
        for j in range(size):
            some[j] = np.int64(drawn(stream, at + j))
        for j in range(size):
            flags[j] = u8(some[j] <= bound)
        for j in range(size, (size + u64(7)) & ~u64(7)):
            flags[j] = u8(0)
        for j in range((size + u64(7)) >> u64(3)):
            if eights[j] != ZERO:
                first = j << u64(3)
                for i in range(first, first + u64(8)):
                    if count < room:
                        places[count], draws[count] = np.int64(at + i), some[i]
                    count += u64(flags[i])
        at += size
    return count


@inlined
def _count(bits: Any, begin: Any, end: Any, least: Any) -> Any:
    """Count the magnitudes of at least `least`."""
    count = ZERO
    while begin < end:
        stop, some = min(begin + STRIPE, end), i32(0)
        for i in range(begin, stop):
            some = i32(some + i32(magnitude(bits[i]) >= least))
        count += u64(some)
        begin = stop
    return count


@inlined
def _least_kept(bits: Any, begin: Any, end: Any, count: Any, least: Any) -> Any:
    """The bits of the `count`-th largest magnitude, by bisection, because counting is fast; all magnitudes are at least `least`. Also how
    many of this magnitude are among the `count`, and the largest. Two of three cuts suppose that many magnitudes are spread evenly.
    """
    most = i32(0)
    for i in range(begin, end):
        most = max(most, magnitude(bits[i]))
    above, larger, atleast = np.int64(most) + 1, ZERO, end - begin  # how many are of at least `above`, and `least`
    cut, many = 0, atleast > STRIPE
    while above - least > 1:
        middle, cut = i32((above + least) >> 1), cut + 1
        if many and cut % 3 > 0:
            share = f64(atleast - count) / f64(atleast - larger)
            middle = i32(min(max(least + np.int64(share * f64(above - least)), least + 1), above - 1))
        found = _count(bits, begin, end, middle)
        if found >= count:
            least, atleast = middle, found
            if found == count:  # all of them are kept
                return i32(least - 1), ZERO, most
        else:
            above, larger = np.int64(middle), found
    return least, count - larger, most


@inlined
def _collect(bits: Any, begin: Any, end: Any, least: Any, flags: Any, masks: Any, some: Any, places: Any) -> Any:
    """Collect the magnitudes of at least `least` in at most a stripe, with their places. Returns their number and the largest of all."""
    most = _flag(bits, begin, end, i32(least - 1), flags)
    words, found = masks.view(np.uint64), ZERO
    for j in range(_masks(flags, end - begin, masks)):
        word = words[j]
        while word != ZERO:
            place = (u64(j) << u64(6)) + u64(zeros_below(word))
            some[found], places[found] = magnitude(bits[begin + place]), place
            word &= word - ONE
            found += ONE
    return found, most


@inlined
def _octaves(bits: Any, begin: Any, end: Any) -> Any:
    """The mean of the bits of the magnitudes of at most a stripe: a logarithm of their scale."""
    total = i32(0)
    for i in range(begin, end):
        total = i32(total + i32(magnitude(bits[i]) >> 13))
    return i32((np.int64(total) << 13) // np.int64(end - begin))


@compiled
def _select_largest(bits: Any, chunk: Any, count: Any, index: Any, floor: Any) -> Any:
    """All magnitudes are at least `floor`. In chunks of a stripe or less, the search is among those of at least about 7/8 of the least kept in
    the chunk before, times the ratio of the chunks' geometric means. If these are fewer than are kept, it is among all.
    """
    n, worst, k, room = u64(bits.size), i32(0), ZERO, u64(index.size)
    flags, masks = np.empty(STRIPE, np.uint8), np.empty(STRIPE >> u64(3), np.uint8)
    some, places = np.empty(STRIPE, np.int32), np.empty(STRIPE, np.uint64)
    words = masks.view(np.uint64)
    begin, least, scale = ZERO, i32(0), i32(0)
    while begin < n:
        end = min(begin + chunk, n)
        kept = (count * (end - begin) + chunk - ONE) // chunk
        before, short = scale, (chunk >= _LONG) & (chunk <= STRIPE)
        scale = _octaves(bits, begin, end) if short else scale
        least = i32(least + i32(i32(scale - before) - _EIGHTH))
        if short & (begin > ZERO) & (least > i32(0)):
            found, most = _collect(bits, begin, end, least, flags, masks, some, places)
            if found >= kept:
                worst = max(worst, most)
                least, equal, _ = _least_kept(some, ZERO, found, kept, least)
                for j in range(found):
                    even = (some[j] == least) & (equal > ZERO)
                    if k < room:
                        index[k] = np.int64(places[j])
                    k += u64(even | (some[j] > least))
                    equal -= u64(even)
                begin = end
                continue
        least, equal, most = _least_kept(bits, begin, end, kept, floor)
        worst = max(worst, most)
        at = begin
        while at < end:
            stop = min(at + STRIPE, end)
            _flag(bits, at, stop, i32(least - 1), flags)
            for j in range(_masks(flags, stop - at, masks)):
                word = words[j]
                while word != ZERO:
                    i = at + (u64(j) << u64(6)) + u64(zeros_below(word))
                    even = (magnitude(bits[i]) == least) & (equal > ZERO)
                    if k < room:
                        index[k] = np.int64(i - begin)
                    k += u64(even | (magnitude(bits[i]) > least))
                    equal -= u64(even)
                    word &= word - ONE
            at = stop
        begin = end
    return worst < INFINITE
