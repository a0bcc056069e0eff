"""The programs that run on the GPU, in Triton's language; `gpu.py` launches them.

A tile is [ROWS, COLS]: `COLS` elements of each of `ROWS` blocks. Names in capitals are constants of the compilation. Offsets are 64-bit,
because a fragment may have more than 2³¹ elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ---- the part of a program


@triton.jit
def _flat(numel, TILE: tl.constexpr):
    """The elements of this program if there are no blocks: their indices, and a mask."""
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return index, index < numel


@triton.jit
def _part(numel, block, pieces, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The blocks of this program, and the first column of its part of them."""
    row = (tl.program_id(0) // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, (tl.program_id(0) % pieces).to(tl.int64) * COLS


@triton.jit
def _tile(row, numel, block, first, COLS: tl.constexpr):
    column = first + tl.arange(0, COLS)[None, :]
    index = row[:, None] * block + column
    return index, (column < block) & (index < numel)


@triton.jit
def _bytes(row, numel, block, first, SHARE: tl.constexpr, COLS: tl.constexpr):
    """The bytes of a tile, with `SHARE` elements each; a block has whole bytes."""
    column = first // SHARE + tl.arange(0, COLS // SHARE)[None, :]
    byte = row[:, None] * (block // SHARE) + column
    return byte, (column * SHARE < block) & (byte * SHARE < numel)


@triton.jit
def _bits(x):
    """The bits of the magnitudes. They have the order of the magnitudes; those of NaN are the highest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _report(worst, most):
    """Report only values that are not finite, so that programs do not wait for each other."""
    tl.atomic_max(worst, most, mask=most >= 0x7F800000)


@triton.jit
def _real(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power(exponent):
    """2^exponent, for exponents from −126 to 127."""
    return _real((exponent + 127) << 23)


@triton.jit
def _read(begin, mask, NBYTES: tl.constexpr):
    """Read little-endian words at unaligned addresses."""
    word = tl.load(begin, mask, 0).to(tl.int32)
    for k in tl.static_range(1, NBYTES):
        word |= tl.load(begin + k, mask, 0).to(tl.int32) << (8 * k)
    return word


@triton.jit
def _write(begin, word, mask, NBYTES: tl.constexpr):
    for k in tl.static_range(NBYTES):
        tl.store(begin + k, (word >> (8 * k)).to(tl.uint8), mask)


# ---- formats with a scale per block


@triton.jit(do_not_specialize=["stream"])
def encode_blocks(
    x, payload, worst, numel, codes, stream, block,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, STEP: tl.constexpr, TOP: tl.constexpr,
    LARGEST: tl.constexpr, PART: tl.constexpr, BINADE: tl.constexpr, HIGHEST: tl.constexpr, SCALE: tl.constexpr,
    NBYTES: tl.constexpr, DRAWN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Reads the blocks twice; the second time they are in the cache, unless they are very long."""
    SHARE: tl.constexpr = 8 // BITS
    row, _ = _part(numel, block, 1, ROWS, COLS)
    most = tl.zeros([ROWS], tl.int32)
    for first in range(0, block, COLS):
        index, mask = _tile(row, numel, block, first, COLS)
        most = tl.maximum(most, tl.max(_bits(tl.load(x + index, mask, 0.0)), 1))
    _report(worst, tl.max(most, 0))
    stored, factor = _scale(most, LARGEST, PART, BINADE, HIGHEST, SCALE)
    _write(payload + codes + row * NBYTES, stored, row * block < numel, NBYTES)
    for first in range(0, block, COLS):
        index, mask = _tile(row, numel, block, first, COLS)
        value = tl.load(x + index, mask, 0.0)
        if SCALE == "exponent":  # multiplying by a power of two equals the quotient, and is faster
            scaled = value * _power(-stored)[:, None]
        else:
            scaled = tl.div_rn(value, tl.broadcast_to(factor[:, None], value.shape))
        code = _code(scaled, stream, index, BITS, MANTISSA, NORMAL, STEP, TOP, DRAWN)
        shares = tl.reshape(code, [ROWS, COLS // SHARE, SHARE]) << (tl.arange(0, SHARE) * BITS)[None, None, :]
        byte, inside = _bytes(row, numel, block, first, SHARE, COLS)
        tl.store(payload + byte, tl.sum(shares, 2).to(tl.uint8), inside)


@triton.jit
def _scale(most, LARGEST: tl.constexpr, PART: tl.constexpr, BINADE: tl.constexpr, HIGHEST: tl.constexpr, SCALE: tl.constexpr):  # fmt: skip
    """The stored scale of each block from the bits of its largest magnitude, and the scale in fp32."""
    if SCALE == "exponent":
        exponent = (most >> 23) - 125 - BINADE - ((most & 0x7FFFFF) <= PART).to(tl.int32)
        stored = tl.where(most == 0, 1 - BINADE, tl.minimum(tl.maximum(exponent, -126), HIGHEST))
        factor = _power(stored)
    else:
        bits = tl.div_rn(_real(most), tl.full(most.shape, LARGEST, tl.float32)).to(tl.int32, bitcast=True)
        stored = tl.minimum(tl.maximum(bits, 1 << 23), (HIGHEST + 127) << 23)  # ordered as their bits
        if SCALE == "bf16":
            stored = (stored + 0xFFFF) >> 16
            factor = _real(stored << 16)
        else:
            factor = _real(stored)
    return stored, factor


@triton.jit
def _code(
    scaled, stream, index, BITS: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, STEP: tl.constexpr,
    TOP: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Below the least normal number steps are equal, and adding 2²³ rounds to them. Above it, a code consists of fp32's upper bits after
    rounding.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = _bits(scaled)
    low = tl.minimum(_real(bits) * (1 / STEP), 1 << MANTISSA)  # larger values are not used
    if DRAWN:
        noise = _noise(stream, index)
        low_code = low.to(tl.int32)
        # the last factor is 2^-24
        low_code += (low - low_code.to(tl.float32) > noise.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32)
        high = bits + (noise & ((1 << DROPPED) - 1))
    else:
        low_code = (low + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        high = bits + ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)
    high_code = (high >> DROPPED) - ((NORMAL >> DROPPED) - (1 << MANTISSA))
    code = tl.minimum(tl.where(bits < NORMAL, low_code, high_code), TOP)
    return code | tl.where((scaled < 0) & (code > 0), 1 << (BITS - 1), 0)


@triton.jit
def _noise(stream, index):
    """24 bits of each half of a stream's draws (rng.py)."""
    z = ((index >> 1) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15 + stream.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (((z ^ (z >> 31)) >> ((index & 1) * 32).to(tl.uint64)) & 0xFFFFFF).to(tl.int32)


@triton.jit
def add_blocks(
    payload, out, numel, codes, block, pieces, weight,
    BITS: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    NBYTES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = 8 // BITS
    row, first = _part(numel, block, pieces, ROWS, COLS)
    stored = _read(payload + codes + row * NBYTES, row * block < numel, NBYTES)
    if SCALE == "exponent":
        factor = _power((stored << 24) >> 24)
    elif SCALE == "bf16":
        factor = _real(stored << 16)
    else:
        factor = _real(stored)
    factor = factor * weight
    byte, inside = _bytes(row, numel, block, first, SHARE, COLS)
    packed = tl.load(payload + byte, inside, 0).to(tl.int32)
    code = tl.reshape(packed[:, :, None] >> (tl.arange(0, SHARE) * BITS)[None, None, :], [ROWS, COLS])
    value = _value(code, BITS, MANTISSA, NORMAL, STEP)
    index, mask = _tile(row, numel, block, first, COLS)
    tl.store(out + index, tl.load(out + index, mask, 0.0) + value * factor[:, None], mask)


@triton.jit
def _value(code, BITS: tl.constexpr, MANTISSA: tl.constexpr, NORMAL: tl.constexpr, STEP: tl.constexpr):
    """The values of the lowest `BITS` bits."""
    size = code & ((1 << (BITS - 1)) - 1)
    low = (size.to(tl.float32) * STEP).to(tl.int32, bitcast=True)
    high = (size << (23 - MANTISSA)) + (NORMAL - (1 << 23))
    negative = ((code >> (BITS - 1)) & 1) << 31
    return _real(tl.where(size < (1 << MANTISSA), low, high) | negative)


# ---- floats


@triton.jit
def encode_floats(x, payload, worst, numel, FORM: tl.constexpr, NBYTES: tl.constexpr, TILE: tl.constexpr):
    index, mask = _flat(numel, TILE)
    value = tl.load(x + index, mask, 0.0)
    bits = _bits(value)
    _report(worst, tl.max(bits, 0))
    word = value.to(tl.int32, bitcast=True)
    if FORM == "bf16":
        size = tl.minimum(bits, 0x7F7F0000)
        size = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
        word = size | ((word >> 16) & 0x8000)
    elif FORM == "fp16":
        size = tl.minimum(_real(bits), 65504.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        word = size | ((word >> 16) & 0x8000)
    _write(payload + index * NBYTES, word, mask, NBYTES)


@triton.jit
def add_floats(payload, out, numel, weight, FORM: tl.constexpr, NBYTES: tl.constexpr, TILE: tl.constexpr):
    index, mask = _flat(numel, TILE)
    word = _read(payload + index * NBYTES, mask, NBYTES)
    if FORM == "bf16":
        value = _real(word << 16)
    elif FORM == "fp16":
        value = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = _real(word)
    tl.store(out + index, tl.load(out + index, mask, 0.0) + value * weight, mask)


# ---- signs


@triton.jit
def encode_signs(x, payload, worst, numel, TILE: tl.constexpr):
    index, mask = _flat(numel, TILE)
    value = tl.load(x + index, mask, 0.0)
    _report(worst, tl.max(_bits(value), 0))
    eight = tl.reshape((value < 0).to(tl.int32), [TILE // 8, 8]) << tl.arange(0, 8)[None, :]
    byte = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
    tl.store(payload + byte, tl.sum(eight, 1).to(tl.uint8), byte * 8 < numel)


@triton.jit
def sums(x, parts, numel, block, pieces, blocks, TERM: tl.constexpr, HALVINGS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One sum for each part of a block: the upper half is added to the lower half until one value is left."""
    row, first = _part(numel, block, pieces, ROWS, COLS)
    index, mask = _tile(row, numel, block, first, COLS)
    total = tl.load(x + index, mask, 0.0).to(tl.float64)
    if TERM == "mean":
        total = tl.abs(total)
    elif TERM == "l2":
        total = total * total
    for k in tl.static_range(HALVINGS):
        total = tl.sum(tl.reshape(total, [ROWS, 2, COLS >> (k + 1)]), 1)
    tl.store(parts + row * pieces + tl.program_id(0) % pieces, tl.reshape(total, [ROWS]), row < blocks)


@triton.jit
def add_signs(payload, out, numel, codes, block, pieces, weight, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, first = _part(numel, block, pieces, ROWS, COLS)
    scale = _real(_read(payload + codes + row * 4, row * block < numel, 4)) * weight
    index, mask = _tile(row, numel, block, first, COLS)
    bit = (tl.load(payload + index // 8, mask, 0).to(tl.int32) >> (index % 8).to(tl.int32)) & 1
    value = (1 - 2 * bit).to(tl.float32) * scale[:, None]
    tl.store(out + index, tl.load(out + index, mask, 0.0) + value, mask)


# ---- integers, and the outer step


@triton.jit
def pack(numbers, packed, count, nbytes, WIDTH: tl.constexpr, TILE: tl.constexpr):
    index, mask = _flat(nbytes, TILE)
    byte = tl.zeros([TILE], tl.int32)
    for k in tl.static_range(8):
        bit = index * 8 + k
        number = tl.load(numbers + bit // WIDTH, mask & (bit < count * WIDTH), 0)
        byte |= ((number >> (bit % WIDTH)) & 1).to(tl.int32) << k
    tl.store(packed + index, byte.to(tl.uint8), mask)


@triton.jit
def unpack(packed, numbers, count, WIDTH: tl.constexpr, TILE: tl.constexpr):
    index, mask = _flat(count, TILE)
    bit = index * WIDTH
    number = tl.zeros([TILE], tl.int64)
    for k in tl.static_range(WIDTH):
        byte = tl.load(packed + (bit + k) // 8, mask, 0).to(tl.int64)
        number |= ((byte >> ((bit + k) % 8)) & 1) << k
    tl.store(numbers + index, number, mask)


@triton.jit
def nesterov(anchor, delta, momentum, out_anchor, out_momentum, worst, lr, mu, numel, TILE: tl.constexpr):
    index, mask = _flat(numel, TILE)
    step = tl.load(delta + index, mask, 0.0)
    velocity = tl.load(momentum + index, mask, 0.0) * mu + step
    moved = tl.load(anchor + index, mask, 0.0) - (velocity * mu + step) * lr
    _report(worst, tl.max(_bits(moved), 0))
    tl.store(out_momentum + index, velocity, mask)
    tl.store(out_anchor + index, moved, mask)
