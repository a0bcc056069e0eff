"""The code of ascending indices, in numba. See `Kernels.pack_ascending`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers
from torch import Tensor

from thinwire.kernels.numba_support import ONE, ZERO, compiled, inlined, u8, u64

zeros_below: Any = numbers.trailing_zeros  # below the lowest bit that is set
_WORD = u64(8)  # bytes


def pack_ascending(index: Tensor, packed: Tensor, low: int) -> None:
    _pack_ascending(index.numpy(), packed.numpy(), u64(low))


def unpack_ascending(packed: Tensor, index: Tensor, low: int, numel: int) -> bool:
    return bool(_unpack_ascending(packed.numpy(), index.numpy(), u64(low), u64(numel)))


@inlined
def _write(packed: Any, at: Any, word: Any) -> None:
    """Write a word at byte `at`, or what fits of it."""
    for byte in range(min(_WORD, u64(packed.size) - at)):
        packed[at + byte] = u8((word >> (u64(byte) << u64(3))) & u64(0xFF))


@inlined
def _read(packed: Any, at: Any) -> Any:
    """The word at byte `at`, with zeros behind the end."""
    word = ZERO
    if at + _WORD <= u64(packed.size):  # one instruction
        for byte in range(_WORD):
            word |= u64(packed[at + byte]) << (u64(byte) << u64(3))
    else:
        for byte in range(u64(packed.size) - at):
            word |= u64(packed[at + byte]) << (u64(byte) << u64(3))
    return word


@compiled
def _pack_ascending(index: Any, packed: Any, low: Any) -> None:
    count, mask = u64(index.size), (ONE << low) - ONE
    begin = (count * low + u64(7)) >> u64(3)
    lows, highs = packed[:begin], packed[begin:]
    word, bits, at = ZERO, ZERO, ZERO
    for i in range(count if low > ZERO else ZERO):
        part = u64(index[i]) & mask
        word |= part << bits
        bits += low
        if bits >= u64(64):
            _write(lows, at, word)
            bits, at = bits - u64(64), at + _WORD
            word = part >> (low - bits)
    if bits > ZERO:
        _write(lows, at, word)
    word, filled = ZERO, ZERO
    for i in range(count):
        place = (u64(index[i]) >> low) + u64(i)
        while place >> u64(6) > filled:
            _write(highs, filled << u64(3), word)
            word, filled = ZERO, filled + ONE
        word |= ONE << (place & u64(63))
    while filled << u64(3) < u64(highs.size):
        _write(highs, filled << u64(3), word)
        word, filled = ZERO, filled + ONE


@compiled
def _unpack_ascending(packed: Any, index: Any, low: Any, numel: Any) -> Any:
    count, mask = u64(index.size), (ONE << low) - ONE
    begin = (count * low + u64(7)) >> u64(3)
    lows, highs = packed[:begin], packed[begin:]
    held, used, ahead = ZERO, u64(64), ZERO  # a word of low bits, those of it that are used, and the byte of the next
    found, at, good, least = ZERO, ZERO, True, ZERO
    while at < u64(highs.size):
        word = _read(highs, at)
        while word != ZERO:
            if found >= count:
                return False
            part = (held >> used) if used < u64(64) else ZERO
            used += low
            if used > u64(64):
                held = _read(lows, ahead)
                used, ahead = used - u64(64), ahead + _WORD
                part |= held << (low - used)
            value = (((at << u64(3)) + u64(zeros_below(word)) - found) << low) | (part & mask)
            good &= value >= least
            index[found] = np.int64(value)
            least, found, word = value + ONE, found + ONE, word & (word - ONE)
        at += _WORD
    return good & (found == count) & (least <= numel)
