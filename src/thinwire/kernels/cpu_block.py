"""`Kernels` in numba, for contiguous tensors of the CPU. This file has the formats with a scale per block; `cpu_dense`,
`cpu_sparse` and `cpu_bits` have the rest.

Every loop works on stripes of elements, whose codes are in the cache with one byte each. Rounding is a loop over 32-bit lanes,
packing is a loop over bytes, and both compile to vector instructions. Only the stripe is allocated.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu_bits import pack_ascending, unpack_ascending
from thinwire.kernels.cpu_dense import add_floats, add_signs, carry, encode_floats, encode_signs, nesterov
from thinwire.kernels.cpu_sparse import (
    add_at,
    add_sent,
    divide_sent,
    mean_sent,
    pack,
    select_drawn,
    select_largest,
    unpack,
)
from thinwire.kernels.grid import Grid, Scale
from thinwire.kernels.numba_support import (
    INFINITE,
    ONE,
    STRIPE,
    TWO,
    ZERO,
    bits_of,
    compiled,
    drawn,
    f32,
    i32,
    inlined,
    left,
    magnitude,
    real_of,
    right,
    u8,
    u64,
)

__all__ = [
    "add_at",
    "add_blocks",
    "add_floats",
    "add_sent",
    "add_signs",
    "carry",
    "divide_sent",
    "encode_blocks",
    "encode_floats",
    "encode_signs",
    "mean_sent",
    "nesterov",
    "pack",
    "pack_ascending",
    "select_drawn",
    "select_largest",
    "unpack",
    "unpack_ascending",
]

_SHORT = u64(1024)  # elements of a stripe that are read twice, and their random numbers: all in the first-level cache
_SCALES = {"exponent": 0, "bf16": 1, "fp32": 2}


def encode_blocks(x: Tensor, payload: Tensor, grid: Grid, block: int, scale: Scale, stream: int | None) -> bool:
    values, form = x.detach().numpy(), _form(grid)
    rest = (payload.numpy(), form, f32(grid.largest), u64(block), _SCALES[scale])
    if stream is None:
        return bool(_round_blocks(values, values.view(np.int32), *rest))
    return bool(_draw_blocks(values, values.view(np.int32), *rest, u64(stream)))


def add_blocks(payload: Tensor, out: Tensor, grid: Grid, block: int, scale: Scale, weight: float) -> None:
    _add_blocks(payload.numpy(), out.detach().numpy(), _form(grid), u64(block), _SCALES[scale], f32(weight))


@cache
def _form(grid: Grid) -> tuple[np.int32, ...]:
    """Bits, mantissa, bits of the least normal number, highest code, highest exponent of a scale; exponent and lower bits of the largest
    value.
    """
    normal, largest = (int(np.float32(x).view(np.int32)) for x in (grid.normal, grid.largest))
    form = (grid.bits, grid.mantissa, normal, grid.top, grid.highest, (largest >> 23) - 126, largest & 0x7FFFFF)
    return tuple(i32(number) for number in form)


# ---- the scale of a block


@inlined
def _most(bits: Any, begin: Any, end: Any) -> Any:
    """The bits of the largest magnitude. Bits have the order of the magnitudes; those of NaN are the highest."""
    most = i32(0)
    for i in range(begin, end):
        most = max(most, magnitude(bits[i]))
    return most


@inlined
def _scale(most: Any, form: Any, largest: Any, kind: Any) -> Any:
    """The fp32 bits of the scale for a block's largest magnitude."""
    _, _, _, _, highest, binade, part = form
    if kind == 0:
        exponent = i32((most >> 23) - 125 - binade - i32((most & 0x7FFFFF) <= part))
        exponent = i32(1 - binade) if most == 0 else exponent
        return i32((min(max(exponent, i32(-126)), highest) + 127) << 23)
    factor = bits_of(real_of(most) / largest)
    factor = min(max(factor, i32(1 << 23)), i32((highest + 127) << 23))  # positive numbers have the order of their bits
    return factor if kind == 2 else i32(i32(factor + i32(0xFFFF)) & i32(-65536))


@inlined
def _write_scale(payload: Any, place: Any, bits: Any, kind: Any) -> Any:
    """Write a scale, and return the position of the next one."""
    if kind == 0:
        payload[place] = u8((bits >> 23) - 127)
        return place + ONE
    word = bits
    size = TWO
    if kind == 1:
        word = i32(bits >> 16)
    else:
        size = TWO + TWO
    for k in range(size):
        payload[place + k] = u8(word & 0xFF)
        word = i32(word >> 8)
    return place + size


@inlined
def _read_scale(payload: Any, number: Any, begin: Any, kind: Any) -> Any:
    if kind == 0:
        return real_of(i32((np.int64(np.int8(payload[begin + number])) + 127) << 23))
    if kind == 1:
        at = begin + number * TWO
        return real_of(i32(np.int64(payload[at]) << 16 | np.int64(payload[at + ONE]) << 24))
    word = np.int64(0)
    at = begin + number * (TWO + TWO)
    for k in range(4):
        word |= np.int64(payload[at + u64(k)]) << (8 * k)
    return real_of(i32(word))


# ---- bytes of several codes


@inlined
def _pack(codes: Any, payload: Any, begin: Any, size: Any, width: Any) -> Any:
    """Pack a stripe's codes from one byte each to `width` bits."""
    share = u64(8) // width
    count = (size + share - ONE) // share
    for j in range(size, count * share):
        codes[j] = 0
    if share == ONE:
        for j in range(count):
            payload[begin + j] = codes[j]
    elif share == TWO:
        pairs = codes.view(np.uint16)
        for j in range(count):
            payload[begin + j] = u8(pairs[j] | pairs[j] >> 4)
    else:
        fours = codes.view(np.uint32)
        for j in range(count):
            payload[begin + j] = u8(fours[j] | fours[j] >> 6 | fours[j] >> 12 | fours[j] >> 18)


@inlined
def _unpack(codes: Any, payload: Any, begin: Any, size: Any, width: Any) -> Any:
    share = u64(8) // width
    count = (size + share - ONE) // share
    if share == ONE:
        for j in range(count):
            codes[j] = payload[begin + j]
    elif share == TWO:
        pairs = codes.view(np.uint16)
        for j in range(count):
            two = i32(payload[begin + j])
            pairs[j] = np.uint16(i32(two | two << 4) & i32(0x0F0F))
    else:
        fours = codes.view(np.uint32)
        for j in range(count):
            four = i32(payload[begin + j])
            fours[j] = np.uint32(i32(four | four << 6 | four << 12 | four << 18) & i32(0x03030303))


# ---- to codes and back


@inlined
def _signed(scaled: Any, code: Any, form: Any) -> Any:
    """Limit the code to the highest, and add the sign unless the code is zero."""
    bits, _, _, top, _, _, _ = form
    code = min(code, top)
    negative = i32(left(i32(1), i32(bits - 1))) if (scaled < i32(0)) & (code > i32(0)) else i32(0)
    return u8(i32(code | negative))


@inlined
def _nearest(x: Any, form: Any) -> Any:
    """Round to the nearest. Below the least normal number steps are equal: adding a number whose last bit is one step rounds to them.
    Above it, a code consists of fp32's upper bits after rounding.
    """
    _, mantissa, normal, _, _, _, _ = form
    dropped, scaled = i32(23 - mantissa), bits_of(x)
    size = magnitude(scaled)
    even = i32(normal + i32(dropped << 23))  # the bits of normal · 2^dropped
    low = i32(bits_of(real_of(size) + real_of(even)) - even)
    last = i32(right(size, dropped) & i32(1))
    least = i32(normal - left(i32(1), i32(23)))  # its code is zero
    high = right(i32(i32(size + last) + i32(left(i32(1), i32(dropped - 1)) - 1 - least)), dropped)
    return _signed(scaled, low if size < normal else high, form)


@inlined
def _either(x: Any, noise: Any, form: Any) -> Any:
    """Round to one of the two neighbours: to the upper one if `noise`, of 24 bits, is below the part that is cut off. Below the least normal
    number, steps are counted in parts of 2^-24, rounded up, because a part counts as soon as it is above the noise.
    """
    _, mantissa, normal, _, _, _, _ = form
    dropped, scaled = i32(23 - mantissa), bits_of(x)
    size = magnitude(scaled)
    parts = np.ceil(real_of(size) * real_of(i32(i32((254 + mantissa + 24) << 23) - normal)))
    low = right(i32(i32(parts) + i32(i32(0xFFFFFF) - noise)), i32(24))
    high = right(i32(size + i32(noise & i32(left(i32(1), dropped) - 1))), dropped)
    high = i32(high - i32(right(normal, dropped) - left(i32(1), mantissa)))
    return _signed(scaled, low if size < normal else high, form)


@inlined
def _stripe_scales(
    bits: Any, payload: Any, place: Any, scales: Any, following: Any, stop: Any, form: Any, largest: Any, block: Any, kind: Any
) -> Any:  # fmt: skip
    """Compute the scales of the blocks that begin in a stripe, before rounding, so that loops do not depend on each other. Returns their
    number, the start of the next block, the position of its scale, and the bits of the largest magnitude.
    """
    number, worst, n = ZERO, i32(0), u64(bits.size)
    while following < stop:
        most = _most(bits, following, min(following + block, n))
        worst = max(worst, most)
        number += ONE
        scales[number] = _scale(most, form, largest, kind)
        place = _write_scale(payload, place, scales[number], kind)
        following += block
    return number, following, place, worst


@compiled
def _round_blocks(x: Any, bits: Any, payload: Any, form: Any, largest: Any, block: Any, kind: Any) -> Any:
    width, n = u64(form[0]), u64(x.size)
    codes, scales = np.empty(_SHORT, np.uint8), np.empty(_SHORT + ONE, np.int32)
    place, worst = (n * width + u64(7)) >> u64(3), i32(0)
    at = following = ZERO  # start of this stripe, and of the next block
    while at < n:
        stop = min(at + _SHORT, n)
        begin, end = at, min(following, stop)  # the rest of the previous block
        number, following, place, most = _stripe_scales(
            bits, payload, place, scales, following, stop, form, largest, block, kind
        )
        worst = max(worst, most)
        for k in range(number + ONE):
            if kind == 0:  # multiplying by a power of two equals the quotient, and is faster
                inverse = real_of(i32(i32(0x7F000000) - scales[k]))
                for i in range(begin, end):
                    codes[i - at] = _nearest(x[i] * inverse, form)
            else:
                factor = real_of(scales[k])
                for i in range(begin, end):
                    codes[i - at] = _nearest(x[i] / factor, form)
            begin, end = end, min(end + block, stop)
        scales[0] = scales[number]  # of the block that continues in the next stripe
        _pack(codes, payload, (at * width) >> u64(3), stop - at, width)
        at = stop
    return worst < INFINITE


@compiled
def _draw_blocks(x: Any, bits: Any, payload: Any, form: Any, largest: Any, block: Any, kind: Any, stream: Any) -> Any:
    """Like `_round_blocks`, with stochastic rounding."""
    width, n = u64(form[0]), u64(x.size)
    codes, scales = np.empty(_SHORT, np.uint8), np.empty(_SHORT + ONE, np.int32)
    noise = np.empty(_SHORT, np.int32)
    words = noise.view(np.uint64)
    place, worst = (n * width + u64(7)) >> u64(3), i32(0)
    at = following = ZERO
    while at < n:
        stop = min(at + _SHORT, n)
        begin, end = at, min(following, stop)
        number, following, place, most = _stripe_scales(
            bits, payload, place, scales, following, stop, form, largest, block, kind
        )
        worst = max(worst, most)
        for j in range((stop - at + ONE) >> ONE):
            words[j] = drawn(stream, (at >> ONE) + j)
        for k in range(number + ONE):
            if kind == 0:
                inverse = real_of(i32(i32(0x7F000000) - scales[k]))
                for i in range(begin, end):
                    codes[i - at] = _either(x[i] * inverse, i32(noise[i - at] & 0xFFFFFF), form)
            else:
                factor = real_of(scales[k])
                for i in range(begin, end):
                    codes[i - at] = _either(x[i] / factor, i32(noise[i - at] & 0xFFFFFF), form)
            begin, end = end, min(end + block, stop)
        scales[0] = scales[number]
        _pack(codes, payload, (at * width) >> u64(3), stop - at, width)
        at = stop
    return worst < INFINITE


@inlined
def _value(code: Any, form: Any) -> Any:
    width, mantissa, normal, _, _, _, _ = form
    sign = left(i32(1), i32(width - 1))
    size, dropped = i32(code & i32(sign - 1)), i32(23 - mantissa)
    step = real_of(i32(normal - i32(mantissa << 23)))
    low = bits_of(f32(size) * step)
    high = i32(left(size, dropped) + i32(normal - (1 << 23)))
    value = low if size < left(i32(1), mantissa) else high
    return real_of(i32(value | left(i32(code & sign), i32(32 - width))))


@compiled
def _add_blocks(payload: Any, out: Any, form: Any, block: Any, kind: Any, weight: Any) -> Any:
    width, n = u64(form[0]), u64(out.size)
    codes = np.empty(STRIPE, np.uint8)
    scales = (n * width + u64(7)) >> u64(3)
    number = at = following = ZERO
    factor = f32(0)
    while at < n:
        stop = min(at + STRIPE, n)
        _unpack(codes, payload, (at * width) >> u64(3), stop - at, width)
        begin = at
        while begin < stop:
            if begin == following:
                factor = _read_scale(payload, number, scales, kind) * weight
                number += ONE
                following += block
            end = min(following, stop)
            for i in range(begin, end):
                out[i] += _value(i32(codes[i - at]), form) * factor
            begin = end
        at = stop
