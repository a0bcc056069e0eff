"""`Kernels` in numba: floats, signs, the outer step and the landing."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels import Float, Norm, reference
from thinwire.kernels.numba_support import (
    INFINITE,
    ONE,
    STRIPE,
    ZERO,
    bits_of,
    compiled,
    f32,
    f64,
    i32,
    inlined,
    magnitude,
    real_of,
    u8,
    u64,
)

_WORDS = {"fp32": np.int32, "bf16": np.uint16, "fp16": np.uint16}


def encode_floats(x: Tensor, payload: Tensor, form: Float) -> bool:
    words = _WORDS[form]
    if payload.data_ptr() % np.dtype(words).itemsize:
        return reference.encode_floats(x, payload, form)
    return bool(_ENCODE[form](x.detach().numpy().view(np.int32), payload.numpy().view(words)))


def add_floats(payload: Tensor, out: Tensor, form: Float, weight: float) -> None:
    words = _WORDS[form]
    if payload.data_ptr() % np.dtype(words).itemsize:
        return reference.add_floats(payload, out, form, weight)
    _ADD[form](payload.numpy().view(words), out.detach().numpy(), f32(weight))


def encode_signs(x: Tensor, payload: Tensor, block: int, norm: Norm) -> bool:
    return bool(_encode_signs(x.detach().numpy(), payload.numpy(), u64(block), norm == "l2"))


def add_signs(payload: Tensor, out: Tensor, block: int, weight: float) -> None:
    _add_signs(payload.numpy(), out.detach().numpy(), u64(block), f32(weight))


def nesterov(
    anchor: Tensor, delta: Tensor, momentum: Tensor, lr: float, mu: float, out_anchor: Tensor, out_momentum: Tensor
) -> bool:
    inputs = [tensor.detach().numpy() for tensor in (anchor, delta, momentum)]
    outputs = [tensor.numpy() for tensor in (out_anchor, out_momentum)]
    return bool(_nesterov(f32(lr), f32(mu), *inputs, *outputs))


def carry(x: Tensor, before: Tensor, change: Tensor, after: Tensor) -> None:
    _carry(*(tensor.detach().numpy() for tensor in (x, before, change, after)))


# ---- floats


@compiled
def _encode_fp32(bits: Any, words: Any) -> Any:
    worst = i32(0)
    for i in range(bits.size):
        worst = max(worst, magnitude(bits[i]))
        words[i] = bits[i]
    return worst < INFINITE


@compiled
def _add_fp32(words: Any, out: Any, weight: Any) -> None:
    for i in range(out.size):
        out[i] += real_of(words[i]) * weight


@compiled
def _encode_bf16(bits: Any, words: Any) -> Any:
    worst, largest = i32(0), i32(0x7F7F0000)
    for i in range(bits.size):
        size = magnitude(bits[i])
        worst = max(worst, size)
        size = min(size, largest)
        size = i32(i32(size + i32(i32(size >> 16) & i32(1))) + i32(0x7FFF))
        words[i] = np.uint16(i32(i32(size | i32(bits[i] & i32(-(1 << 31)))) >> 16))
    return worst < INFINITE


@compiled
def _add_bf16(words: Any, out: Any, weight: Any) -> None:
    for i in range(out.size):
        out[i] += real_of(i32(np.int64(words[i]) << 16)) * weight


@compiled
def _encode_fp16(bits: Any, words: Any) -> Any:
    """Below the least normal number, 2⁻¹⁴, steps are equal: adding ½, whose last bit is one step, rounds to them."""
    worst, largest, half = i32(0), i32(0x477FE000), i32(0x3F000000)
    for i in range(bits.size):
        size = magnitude(bits[i])
        worst = max(worst, size)
        size = min(size, largest)
        low = i32(bits_of(real_of(size) + real_of(half)) - half)
        high = i32(i32(size + i32(i32(size >> 13) & i32(1))) - i32((112 << 23) - 0xFFF))
        code = low if size < i32(0x38800000) else i32(high >> 13)
        words[i] = np.uint16(i32(code | i32(i32(bits[i] >> 16) & i32(0x8000))))
    return worst < INFINITE


@compiled
def _add_fp16(words: Any, out: Any, weight: Any) -> None:
    for i in range(out.size):
        word = i32(words[i])
        size = i32(word & i32(0x7FFF))
        low = bits_of(f32(size) * f32(2.0**-24))
        high = i32(i32(size << 13) + i32(112 << 23))
        value = low if size < i32(0x0400) else high
        value = i32(value | INFINITE) if size >= i32(0x7C00) else value  # never encoded
        out[i] += real_of(i32(value | i32(i32(word & i32(0x8000)) << 16))) * weight


_ENCODE = {"fp32": _encode_fp32, "bf16": _encode_bf16, "fp16": _encode_fp16}
_ADD = {"fp32": _add_fp32, "bf16": _add_bf16, "fp16": _add_fp16}

# ---- signs


@inlined
def _size(x: Any, square: Any) -> Any:
    return f64(x) * f64(x) if square else f64(abs(x))


@inlined
def _folded(sums: Any, count: Any) -> Any:
    """Add the upper half to the lower half until one value is left; zeros fill up to a power of two."""
    half = STRIPE
    while half > u64(32):
        half = half >> ONE
        if half < count:
            for i in range(count - half):
                sums[i] += sums[i + half]
            count = half
    for i in range(count, u64(32)):
        sums[i] = f64(0)
    for i in range(u64(16)):
        sums[i] += sums[i + u64(16)]
    for i in range(u64(8)):
        sums[i] += sums[i + u64(8)]
    for i in range(u64(4)):
        sums[i] += sums[i + u64(4)]
    return (sums[0] + sums[2]) + (sums[1] + sums[3])


@inlined
def _sum(x: Any, begin: Any, end: Any, square: Any, sums: Any) -> Any:
    """The sum of at most `STRIPE` elements. The first halving happens during reading; the first two, if the stripe is full."""
    half = STRIPE >> ONE
    if end - begin == STRIPE:
        part = half >> ONE
        for i in range(begin, begin + part):
            sums[i - begin] = (_size(x[i], square) + _size(x[i + half], square)) + (
                _size(x[i + part], square) + _size(x[i + half + part], square)
            )
        return _folded(sums, part)
    while half >= end - begin and half > ZERO:
        half = half >> ONE
    upper = end - begin - half if half > ZERO else ZERO
    half = max(half, ONE)
    for i in range(upper):
        sums[i] = _size(x[begin + i], square) + _size(x[begin + i + half], square)
    for i in range(upper, half):
        sums[i] = _size(x[begin + i], square)
    return _folded(sums, half)


@inlined
def _pack_signs(x: Any, payload: Any, begin: Any, end: Any, flags: Any) -> None:
    """Pack signs, starting at a whole byte; the last byte is filled up with zeros."""
    eights, count = flags.view(np.uint64), (end - begin + u64(7)) >> u64(3)
    for j in range(end - begin):
        flags[j] = u8(x[begin + j] < f32(0))
    for j in range(end - begin, count << u64(3)):
        flags[j] = u8(0)
    for j in range(count):
        word = eights[j]
        word |= word >> u64(7)
        word |= word >> u64(14)
        payload[(begin >> u64(3)) + j] = u8(word | word >> u64(28))


@compiled
def _encode_signs(x: Any, payload: Any, block: Any, square: Any) -> Any:
    n, finite = u64(x.size), True
    flags, run = np.empty(STRIPE + u64(8), np.uint8), np.empty(STRIPE, np.float64)
    runs, further = np.empty(STRIPE, np.float64), np.empty(STRIPE, np.float64)  # sums of runs, and of runs of runs
    place = (n + u64(7)) >> u64(3)
    begin = packed = ZERO
    while begin < n:
        end = min(begin + block, n)
        at, count, more = begin, ZERO, ZERO
        while at < end:
            stop = min(at + STRIPE, end)
            runs[count] = _sum(x, at, stop, square, run)
            count += ONE
            if count == STRIPE:
                further[more] = _folded(runs, count)
                more, count = more + ONE, ZERO
            whole = stop if stop == n else stop & ~u64(7)
            if whole > packed:
                _pack_signs(x, payload, packed, whole, flags)
                packed = whole
            at = stop
        if more > ZERO and count > ZERO:
            further[more] = _folded(runs, count)
            more += ONE
        mean = (_folded(further, more) if more > ZERO else _folded(runs, count)) / f64(end - begin)
        finite &= mean < np.inf
        word = bits_of(f32(np.sqrt(mean) if square else mean))
        for k in range(4):
            payload[place + u64(k)] = u8((word >> (8 * k)) & 0xFF)
        place += u64(4)
        begin = end
    return finite


@compiled
def _add_signs(payload: Any, out: Any, block: Any, weight: Any) -> None:
    n = u64(out.size)
    flags = np.empty(STRIPE, np.uint8)
    eights, place = flags.view(np.uint64), (n + u64(7)) >> u64(3)
    at = following = ZERO
    scale = i32(0)
    while at < n:
        stop = min(at + STRIPE, n)
        for j in range((stop - at + u64(7)) >> u64(3)):
            word = u64(payload[(at >> u64(3)) + j])
            word = (word | word << u64(28)) & u64(0x0000000F0000000F)
            word = (word | word << u64(14)) & u64(0x0003000300030003)
            eights[j] = (word | word << u64(7)) & u64(0x0101010101010101)
        begin = at
        while begin < stop:
            if begin == following:
                word32 = np.int64(0)
                for k in range(4):
                    word32 |= np.int64(payload[place + u64(k)]) << (8 * k)
                scale = bits_of(real_of(i32(word32)) * weight)
                place += u64(4)
                following += block
            end = min(following, stop)
            for i in range(begin, end):
                out[i] += real_of(i32(scale ^ i32(np.int64(flags[i - at]) << 31)))
            begin = end
        at = stop


# ---- the outer step


@compiled
def _nesterov(lr: Any, mu: Any, anchor: Any, delta: Any, momentum: Any, out_anchor: Any, out_momentum: Any) -> Any:
    """The outer step in two loops, because for one loop LLVM would have to compare too many addresses to exclude overlaps."""
    worst, at, n = i32(0), ZERO, u64(anchor.size)
    while at < n:
        stop = min(at + STRIPE, n)
        for i in range(at, stop):
            out_momentum[i] = momentum[i] * mu + delta[i]
        for i in range(at, stop):
            moved = anchor[i] - (out_momentum[i] * mu + delta[i]) * lr
            worst = max(worst, magnitude(bits_of(moved)))
            out_anchor[i] = moved
        at = stop
    return worst < INFINITE


@compiled
def _carry(x: Any, before: Any, change: Any, after: Any) -> None:
    for i in range(u64(x.size)):
        x[i] += after[i] - (before[i] - change[i])
