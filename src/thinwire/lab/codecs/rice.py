"""Rice codes of ascending indices, in numba: the gaps between them are encoded.

A gap g (the indices skipped since the last one) is ⌊g / 2^k⌋ one bits, a zero bit, and k bits of g mod 2^k; lowest bits first. The code
is best for geometric gaps, such as those of the largest of many values; k is chosen for each message. Each `chunk` has `count` indices
(a shorter last one has the rest), which are relative to the chunk; gaps start again in each chunk.

Decoding is bounded by the number of bits and of indices: it allocates nothing, and reads no byte twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.numba_support import ONE, ZERO, compiled, u8, u64

LARGEST_K = 32  # the largest k


def parameter(places: Tensor, count: int) -> int:
    """The k with the shortest code, among those near the mean gap."""
    if not len(places):
        return 0
    between = gaps(places, count)
    guess = max(1, int(between.mean() * 0.69) + 1).bit_length() - 1  # ln 2 times the mean, for geometric gaps
    near = range(max(0, guess - 2), min(LARGEST_K, guess + 2) + 1)
    return min(near, key=lambda k: int((between >> k).sum()) + k * len(between))


def nbytes(places: Tensor, count: int, k: int) -> int:
    """Bytes of the code."""
    return -(-int((gaps(places, count) >> k).sum() + (k + 1) * len(places)) // 8)


def encode(places: Tensor, count: int, k: int, out: NDArray[np.uint8]) -> None:
    """Write the code of flat int64 `places` into `out`, which has `nbytes` of it."""
    _encode(places.numpy(), u64(count), u64(k), out)


def decode(code: NDArray[np.uint8], chunk: int, count: int, numel: int, k: int, places: Tensor) -> int:
    """Fill `places` from the front of `code`. Returns the number of bytes read, or -1 if they do not encode indices below `numel`."""
    if k > LARGEST_K:
        return -1
    return int(_decode(code, u64(chunk), u64(count), u64(numel), u64(k), places.numpy()))


def gaps(places: Tensor, count: int) -> NDArray[np.int64]:
    """The number of indices skipped between each of `places` and the previous one in its chunk."""
    found: NDArray[np.int64] = np.diff(places.numpy(), prepend=-1) - 1
    found[::count] = places.numpy()[::count]
    return found


@compiled
def _encode(places: Any, count: Any, k: Any, out: Any) -> Any:
    held, bits, at = ZERO, ZERO, ZERO
    left, following = ZERO, ZERO  # indices left in the chunk; the least possible next index
    low = (ONE << k) - ONE
    for i in range(places.size):
        if left == ZERO:
            left, following = count, ZERO
        place = u64(places[i])
        gap = place - following
        left, following = left - ONE, place + ONE
        ones = gap >> k
        while ones > ZERO or bits >= u64(8):  # at most seven bits are held when the loop ends
            more = min(ones, u64(32))
            held |= ((ONE << more) - ONE) << bits
            bits, ones = bits + more, ones - more
            while bits >= u64(8):
                out[at] = u8(held & u64(0xFF))
                held, bits, at = held >> u64(8), bits - u64(8), at + ONE
        held |= (gap & low) << (bits + ONE)  # after a zero
        bits += k + ONE
    while bits > ZERO:
        out[at] = u8(held & u64(0xFF))
        held, bits, at = held >> u64(8), bits - min(bits, u64(8)), at + ONE


@compiled
def _decode(code: Any, chunk: Any, count: Any, numel: Any, k: Any, places: Any) -> Any:
    held, bits, at, size = ZERO, ZERO, ZERO, u64(code.size)
    left, following, limit, begin = ZERO, ZERO, ZERO, ZERO
    low = (ONE << k) - ONE
    for i in range(places.size):
        if left == ZERO:
            left, following, limit = count, ZERO, min(chunk, numel - begin)
            begin += chunk
        most = (limit - following) >> k  # most one bits of an index below the limit
        ones = ZERO
        while True:
            if bits == ZERO:
                if at == size:
                    return -1
                held, bits, at = u64(code[at]), u64(8), at + ONE
            one = held & ONE
            held, bits = held >> ONE, bits - ONE
            if one == ZERO:
                break
            ones += ONE
            if ones > most:
                return -1
        while bits < k:
            if at == size:
                return -1
            held |= u64(code[at]) << bits
            bits, at = bits + u64(8), at + ONE
        place = following + (ones << k) + (held & low)
        held, bits = held >> k, bits - k
        if place >= limit:
            return -1
        places[i] = np.int64(place)
        left, following = left - ONE, place + ONE
    return np.int64(at)
