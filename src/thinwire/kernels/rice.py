"""numba: ascending places by a Rice code of the gaps between them.

A gap g (places left out since the last one) is ⌊g / 2^k⌋ one bits, a zero bit, and k bits of g mod 2^k; lowest bits first. Best where
gaps are geometric, as those of the largest among many are: k is chosen for each message. Of each `chunk` neighbours `count`
have places within it, of a last, shorter one the rest of them, and gaps begin anew in each.

Decoding is bounded by the bits there are and by the places that are due: it allocates nothing, and looks at no byte twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.numba_support import ONE, ZERO, compiled, u8, u64

MOST = 32  # for k


def parameter(places: Tensor, count: int) -> int:
    """The k with the shortest code, of those near the mean gap."""
    if not len(places):
        return 0
    between = gaps(places, count)
    guess = max(1, int(between.mean() * 0.69) + 1).bit_length() - 1  # ln 2 of the mean, for geometric gaps
    near = range(max(0, guess - 2), min(MOST, guess + 2) + 1)
    return min(near, key=lambda k: int((between >> k).sum()) + k * len(between))


def nbytes(places: Tensor, count: int, k: int) -> int:
    """Bytes of the code."""
    return -(-int((gaps(places, count) >> k).sum() + (k + 1) * len(places)) // 8)


def encode(places: Tensor, count: int, k: int, out: NDArray[np.uint8]) -> None:
    """Write the code of flat int64 `places` into `out`, which has `nbytes` of it."""
    _encode(places.numpy(), u64(count), u64(k), out)


def decode(code: NDArray[np.uint8], chunk: int, count: int, numel: int, k: int, places: Tensor) -> int:
    """Fill `places` from the front of `code`: how many bytes that took, or -1 where no places below `numel` are in it."""
    if k > MOST:
        return -1
    return int(_decode(code, u64(chunk), u64(count), u64(numel), u64(k), places.numpy()))


def gaps(places: Tensor, count: int) -> NDArray[np.int64]:
    """What lies between each of `places` and the one before it in its chunk."""
    found: NDArray[np.int64] = np.diff(places.numpy(), prepend=-1) - 1
    found[::count] = places.numpy()[::count]
    return found


@compiled
def _encode(places: Any, count: Any, k: Any, out: Any) -> Any:
    held, bits, at = ZERO, ZERO, ZERO
    left, following = ZERO, ZERO  # of the chunk; the least place that may come
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
        held |= (gap & low) << (bits + ONE)  # behind a zero
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
        most = (limit - following) >> k  # ones that a place below the limit may have
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
