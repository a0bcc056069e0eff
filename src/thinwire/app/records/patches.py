"""Patches: the lossless difference between two versions of bf16 weights.

PULSE (arXiv 2602.03839) sends only the weights whose bf16 value has changed. Here the bit patterns are mapped to integers in the order
of the values, so a small change is a small difference. Zigzag coding makes small differences of either sign small numbers; their low
and high bytes are coded separately by zlib (run lengths and Huffman codes). An unchanged weight costs a fraction of a bit.

A patch: the bytes of the first code (uint32, little-endian), the code of the low bytes, that of the high bytes.
"""

from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import PacketError

Bits = NDArray[np.uint16]  # patterns of bf16

_HEAD = struct.Struct("<I")


def state_of(bits: Bits) -> str:
    """The name of a state: the SHA-256 of its values."""
    return hashlib.sha256(bits.tobytes()).hexdigest()


def encode_patch(old: Bits, new: Bits) -> bytes:
    """The patch from `old` to `new`, which has as many values."""
    difference = (_ordered(new) - _ordered(old)).view(np.int16)
    zigzag = ((difference << 1) ^ (difference >> 15)).view(np.uint16)
    low, high = (_coded((zigzag >> shift).astype(np.uint8).tobytes()) for shift in (0, 8))
    return _HEAD.pack(len(low)) + low + high


def apply_patch(old: Bits, patch: bytes) -> Bits:
    """Apply `patch` to `old`. Raises `PacketError`; it allocates no more than `old` has."""
    if len(patch) < _HEAD.size or (split := _HEAD.size + _HEAD.unpack_from(patch)[0]) > len(patch):
        raise PacketError(f"a patch of {len(patch)} bytes is cut off; fetch it again.")
    low, high = (_decoded(code, len(old)) for code in (patch[_HEAD.size : split], patch[split:]))
    zigzag = low.astype(np.uint16) | high.astype(np.uint16) << 8
    difference = (zigzag >> 1) ^ (~(zigzag & 1) + 1)
    return _pattern(_ordered(old) + difference)


def _ordered(bits: Bits) -> Bits:
    """Integers in the order of the values, -0.0 just below 0.0."""
    return np.where(bits >> 15, ~bits, bits | 0x8000).astype(np.uint16)


def _pattern(ordered: Bits) -> Bits:
    return np.where(ordered >> 15, ordered & 0x7FFF, ~ordered).astype(np.uint16)


def _coded(data: bytes) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return coder.compress(data) + coder.flush()


def _decoded(code: bytes, nbytes: int) -> NDArray[np.uint8]:
    decoder = zlib.decompressobj(-15)
    try:
        data = decoder.decompress(code, nbytes + 1)
    except zlib.error as error:
        raise PacketError(f"a patch cannot be read ({error}); fetch it again.") from None
    if len(data) != nbytes or not decoder.eof or decoder.unused_data:
        raise PacketError(f"a patch is not of {nbytes} values; fetch it again.")
    return np.frombuffer(data, np.uint8)
