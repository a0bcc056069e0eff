"""`Kernels` in numba: even levels between the ends of a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

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

_WHOLE = f32(1 << 23)  # from here on fp32 has no fractions, and the lowest bits are the number
_LEAST_UNIT, _LARGEST_UNIT = f64(2.0**-120), f64(2.0**120)  # between them 1/unit is a normal fp32 number
_WIDE = "+avx512f" in get_host_cpu_features()  # type: ignore[no-untyped-call]
_CHOSEN = u64(4 if _WIDE else 0)  # bits of codes whose levels fit in the registers for vectors, with room for others


def encode_levels(x: Tensor, payload: Tensor, bits: int, block: int) -> bool:
    values = x.detach().numpy()
    return bool(_encode_levels(values, values.view(np.int32), payload.numpy(), u64(bits), u64(block)))


def add_levels(payload: Tensor, out: Tensor, bits: int, block: int, weight: float) -> None:
    _add_levels(payload.numpy(), out.detach().numpy(), u64(bits), u64(block), f32(weight))


# ---- ends of a block, and bytes


@inlined
def _ends(bits: Any, begin: Any, end: Any) -> Any:
    """The keys of the smallest and the largest value. Keys are integers with the order of the values; only these compare in vectors."""
    least, largest = i32(0x7FFFFFFF), i32(-0x80000000)
    for i in range(begin, end):
        key = i32(bits[i] ^ i32(i32(bits[i] >> 31) & i32(0x7FFFFFFF)))
        least = min(least, key)
        largest = max(largest, key)
    return least, largest


@inlined
def _value(key: Any) -> Any:
    """The value of a key; a zero is +0."""
    return real_of(i32(key ^ i32(i32(key >> 31) & i32(0x7FFFFFFF)))) + f32(0.0)


@inlined
def _write(payload: Any, place: Any, value: Any) -> None:
    word = bits_of(value)
    for k in range(4):
        payload[place + u64(k)] = u8((word >> (8 * k)) & 0xFF)


@inlined
def _read(payload: Any, place: Any) -> Any:
    word = np.int64(0)
    for k in range(4):
        word |= np.int64(payload[place + u64(k)]) << (8 * k)
    return f64(real_of(i32(word)))


@inlined
def _pack(codes: Any, payload: Any, place: Any, size: Any, width: Any) -> None:
    """Pack codes of one byte each to `width` bits: eight of them become `width` bytes."""
    eights, count = codes.view(np.uint64), (size + u64(7)) >> u64(3)
    for j in range(size, count << u64(3)):
        codes[j] = u8(0)
    if width == u64(8):
        for j in range(size):
            payload[place + j] = codes[j]
    elif width == u64(4):
        pairs = codes.view(np.uint16)
        for j in range((size + ONE) >> ONE):
            payload[place + j] = u8(pairs[j] | pairs[j] >> 4)
    elif width == u64(2):
        fours = codes.view(np.uint32)
        for j in range((size + u64(3)) >> u64(2)):
            payload[place + j] = u8(fours[j] | fours[j] >> 6 | fours[j] >> 12 | fours[j] >> 18)
    elif width == ONE:
        for j in range(count):
            word = eights[j] | eights[j] >> u64(7)
            word |= word >> u64(14)
            payload[place + j] = u8(word | word >> u64(28))
    else:
        nbytes = (size * width + u64(7)) >> u64(3)
        for j in range(count):
            word = _joined(eights[j], width)
            for k in range(min(width, nbytes - j * width)):
                payload[place + j * width + k] = u8(word >> (u64(8) * k))


@inlined
def _joined(word: Any, width: Any) -> Any:
    """The `width` lowest bits of each of eight bytes, without gaps."""
    held = ZERO
    for k in range(u64(8)):
        held |= (word >> (u64(8) * k) & u64(0xFF)) << (width * k)
    return held


@inlined
def _unpack(codes: Any, payload: Any, place: Any, size: Any, width: Any) -> None:
    eights, count = codes.view(np.uint64), (size + u64(7)) >> u64(3)
    if width == u64(8):
        for j in range(size):
            codes[j] = payload[place + j]
    elif width == u64(4):
        pairs = codes.view(np.uint16)
        for j in range((size + ONE) >> ONE):
            two = i32(payload[place + j])
            pairs[j] = np.uint16(i32(two | two << 4) & i32(0x0F0F))
    elif width == u64(2):
        fours = codes.view(np.uint32)
        for j in range((size + u64(3)) >> u64(2)):
            four = i32(payload[place + j])
            fours[j] = np.uint32(i32(four | four << 6 | four << 12 | four << 18) & i32(0x03030303))
    elif width == ONE:
        for j in range(count):
            word = u64(payload[place + j])
            word = (word | word << u64(28)) & u64(0x0000000F0000000F)
            word = (word | word << u64(14)) & u64(0x0003000300030003)
            eights[j] = (word | word << u64(7)) & u64(0x0101010101010101)
    else:
        nbytes, mask = (size * width + u64(7)) >> u64(3), (ONE << width) - ONE
        for j in range(count):
            held, word = ZERO, ZERO
            for k in range(min(width, nbytes - j * width)):
                held |= u64(payload[place + j * width + k]) << (u64(8) * k)
            for k in range(u64(8)):
                word |= (held >> (width * k) & mask) << (u64(8) * k)
            eights[j] = word


# ---- to levels and back


@compiled
def _encode_levels(x: Any, bits: Any, payload: Any, width: Any, block: Any) -> Any:
    """Levels are rounded in fp32 first. The error of this quotient is below 4·2⁻²⁴ of the number of levels; where it could decide, the
    part of the block in this stripe is rounded again with the quotient in fp64, which is the definition. So the bits are those of the
    quotient, at the speed of a product.
    """
    n, top = u64(x.size), f64((ONE << width) - ONE)
    codes = np.empty(STRIPE, np.uint8)
    ends, sure = (n * width + u64(7)) >> u64(3), f32(0.5 - (top + 1.0) * 2.0**-21)
    least, inverse, unit, finite = f32(0), f32(0), f64(0), True
    normal: Any = False
    at = following = ZERO  # start of this stripe, and of the next block
    while at < n:
        stop = min(at + STRIPE, n)
        begin = at
        while begin < stop:
            if begin == following:
                following += block
                low, high = _ends(bits, begin, min(following, n))
                finite &= (high < INFINITE) & (low > i32(-0x7F800001))
                least, largest = _value(low), _value(high)
                _write(payload, ends, least)
                _write(payload, ends + u64(4), largest)
                ends += u64(8)
                unit = (f64(largest) - f64(least)) / top
                inverse, normal = f32(1.0 / unit), (unit > _LEAST_UNIT) & (unit < _LARGEST_UNIT)
                unit = f64(np.inf) if unit == 0.0 else unit
            end, worst = min(following, stop), i32(0)
            for i in range(begin, end):
                level = (x[i] - least) * inverse
                whole = level + _WHOLE
                codes[i - at] = u8(bits_of(whole))
                worst = max(worst, magnitude(bits_of(level - (whole - _WHOLE))))
            if not (normal & (real_of(worst) < sure)):
                for i in range(begin, end):
                    codes[i - at] = u8(i32(min((f64(x[i]) - f64(least)) / unit + 0.5, top)))
            begin = end
        _pack(codes, payload, (at * width) >> u64(3), stop - at, width)
        at = stop
    return finite


@inlined
def _chosen(code: Any, values: Any) -> Any:
    """`values[code]` of sixteen in registers, by comparisons, which compile to vector instructions; loads from a table do not."""
    bits = (i32(code & i32(1)) != 0, i32(code & i32(2)) != 0, i32(code & i32(4)) != 0, i32(code & i32(8)) != 0)
    low = _of_eight(bits, values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7])
    high = _of_eight(bits, values[8], values[9], values[10], values[11], values[12], values[13], values[14], values[15])
    return high if bits[3] else low


@inlined
def _of_eight(bits: Any, v0: Any, v1: Any, v2: Any, v3: Any, v4: Any, v5: Any, v6: Any, v7: Any) -> Any:
    a, b, c, d = (v1 if bits[0] else v0), (v3 if bits[0] else v2), (v5 if bits[0] else v4), (v7 if bits[0] else v6)
    low, high = (b if bits[1] else a), (d if bits[1] else c)
    return high if bits[2] else low


@compiled
def _add_levels(payload: Any, out: Any, width: Any, block: Any, weight: Any) -> None:
    n, count = u64(out.size), ONE << width
    codes, values = np.empty(STRIPE, np.uint8), np.zeros(256, np.float32)
    shares, rests = np.empty(256, np.float64), np.empty(256, np.float64)
    for k in range(count):
        shares[k] = f64(k) / f64(count - ONE)
        rests[k] = 1.0 - shares[k]
    ends = (n * width + u64(7)) >> u64(3)
    at = following = ZERO
    while at < n:
        stop = min(at + STRIPE, n)
        _unpack(codes, payload, (at * width) >> u64(3), stop - at, width)
        begin = at
        while begin < stop:
            if begin == following:
                least, largest = _read(payload, ends), _read(payload, ends + u64(4))
                ends += u64(8)
                following += block
                for k in range(count):
                    values[k] = f32(least * rests[k] + largest * shares[k]) * weight
            end = min(following, stop)
            if width <= _CHOSEN:
                v = (values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7],
                     values[8], values[9], values[10], values[11], values[12], values[13], values[14], values[15])  # fmt: skip
                for i in range(begin, end):
                    out[i] += _chosen(i32(codes[i - at]), v)
            else:
                for i in range(begin, end):
                    out[i] += values[codes[i - at]]
            begin = end
        at = stop
