"""Lossless coding of bytes: streams of symbols by zstd, and ascending indices by the gaps between them.

Decoders accept arbitrary bytes, because peers send them: they refuse them, or decode exactly the expected number, in memory of
a size that is known beforehand.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.layout import Places, pack, packed_nbytes, unpack
from thinwire.errors import PacketError

Bytes = NDArray[np.uint8]
Gaps = NDArray[np.int64]
LEVEL = 1  # zstd's level: higher ones take longer, and do not shorten codes of a few bits
REPEAT = "Run the same strategy and version of Thinwire on every replica."
_PLAIN, _FRAME = 0, 1  # the first byte of symbols
_FRAMED = 0x80  # a bit of the first byte of indices: the gaps are a frame, not a Rice code
_MORE = 255  # in a frame of gaps: 255, and the next byte is added
_LENGTH = struct.Struct("<I")
_LEAST_WINDOW = 1 << 10  # the smallest window of a zstd frame, in bytes


class PayloadReader:
    """Reads from the front of `data`. Raises `PacketError` if that ends too early."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def take(self, count: int) -> Bytes:
        if len(self.data) < count:
            raise PacketError(
                f"a coded payload ends after {len(self.data)} bytes, {count} more were expected. {REPEAT}"
            )
        taken, self.data = self.data[:count], self.data[count:]
        return taken


# ---- symbols


def symbols_coded(symbols: Bytes) -> Bytes:
    """A byte that names the form, then either the length in four bytes and a zstd frame (RFC 8878, level 1, without its magic number),
    or `symbols` unchanged if that is shorter.
    """
    frame = _framed(symbols)
    return _joined(_PLAIN, symbols) if len(frame) >= len(symbols) else _joined(_FRAME, frame)


def symbols_decoded(reader: PayloadReader, count: int) -> Bytes:
    """The next `count` symbols. Raises `PacketError`."""
    kind = int(reader.take(1)[0])
    if kind not in (_PLAIN, _FRAME):
        raise PacketError(f"coded symbols begin with the byte {kind}, which no encoder writes. {REPEAT}")
    return reader.take(count) if kind == _PLAIN else _unframed(reader, count, count)


def _framed(data: Bytes) -> Bytes:
    zstandard = _zstandard()
    settings = zstandard.ZstdCompressionParameters.from_level(LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    frame = zstandard.ZstdCompressor(compression_params=settings).compress(np.ascontiguousarray(data).data)
    return np.frombuffer(_LENGTH.pack(len(frame)) + frame, np.uint8)


def _unframed(reader: PayloadReader, least: int, most: int) -> Bytes:
    """The content of the next frame, `least` to `most` bytes. Its size is checked before memory is allocated."""
    zstandard = _zstandard()
    frame = reader.take(_LENGTH.unpack(reader.take(_LENGTH.size).tobytes())[0])
    try:
        said = zstandard.get_frame_parameters(frame.data, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        if least <= said.content_size <= most and said.window_size <= max(most, _LEAST_WINDOW):
            unpacker = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
            return np.frombuffer(unpacker.decompress(frame.data), np.uint8)
    except zstandard.ZstdError as error:
        raise PacketError(f"a coded payload is damaged ({error}). {REPEAT}") from None
    raise PacketError(f"a coded payload declares {said.content_size} bytes, {least} to {most} were expected. {REPEAT}")


# ---- ascending indices


def places_coded(plain: Bytes, of: Places) -> Bytes:
    """The shorter of two codes of the gaps between packed indices.

    The first is a byte k, then their Rice code with parameter k (lab/codecs/rice.py): it is the shortest for random gaps. The second is a byte
    0x80 + s, then the s low bits of all gaps, and a frame of their high parts, one byte each: it is the shortest if gaps repeat, as in real
    deltas, whose large values are in the same columns of a matrix. A high part of 255 or more is a byte 255 and then the remainder.
    """
    from thinwire.lab.codecs import rice

    places = torch.empty(of.kept, dtype=torch.int64)
    of.unpack(torch.from_numpy(plain), places)
    k, gaps = rice.parameter(places, of.count), rice.gaps(places, of.count)
    # 5: most high parts are below 255
    found = min((_gaps_framed(gaps, shift) for shift in {0, max(0, k - 5)}), key=len)
    nbytes = rice.nbytes(places, of.count, k)
    if len(found) <= nbytes:
        return found
    code = np.empty(nbytes, np.uint8)
    rice.encode(places, of.count, k, code)
    return _joined(k, code)


def _gaps_framed(gaps: Gaps, shift: int) -> Bytes:
    low = pack(torch.from_numpy(gaps & ((1 << shift) - 1)), shift).numpy() if shift else np.empty(0, np.uint8)
    whole, rest = np.divmod(gaps >> shift, _MORE)
    high = np.full(len(gaps) + int(whole.sum()), _MORE, np.uint8)
    high[np.cumsum(whole + 1) - 1] = rest
    return _joined(_FRAMED | shift, low, _framed(high))


def places_decoded(reader: PayloadReader, of: Places) -> Bytes:
    """Decode the next indices, packed. Raises `PacketError`."""
    from thinwire.lab.codecs import rice

    kind = int(reader.take(1)[0])
    if kind & _FRAMED:
        places = torch.from_numpy(_summed(_gaps(reader, kind ^ _FRAMED, of), of))
    else:
        places = torch.empty(of.kept, dtype=torch.int64)
        used = rice.decode(reader.data, of.chunk, of.count, of.numel, kind, places)
        if used < 0:
            raise _not_ascending(of)
        reader.take(used)
    return np.asarray(of.pack(places).numpy())


def _gaps(reader: PayloadReader, shift: int, of: Places) -> Gaps:
    if shift > of.width:
        raise _not_ascending(of)
    low = reader.take(packed_nbytes(of.kept, shift)) if shift else None
    high = _unframed(reader, of.kept, of.kept + (of.numel >> shift) // _MORE)
    ends = np.flatnonzero(high != _MORE)
    if len(ends) != of.kept or (len(high) and high[-1] == _MORE):
        raise _not_ascending(of)
    gaps: Gaps = np.diff(np.cumsum(high, dtype=np.int64)[ends], prepend=0) << shift
    if low is not None:
        gaps |= unpack(torch.from_numpy(low), of.kept, shift).numpy()
    return gaps


def _summed(gaps: Gaps, of: Places) -> Gaps:
    """The indices with these `gaps`, chunk by chunk."""
    places, whole = gaps + 1, of.numel // of.chunk * of.count
    for part, limit in ((places[:whole].reshape(-1, of.count), of.chunk), (places[None, whole:], of.numel % of.chunk)):
        np.cumsum(part, axis=1, out=part)
        if part.size and part[:, -1].max() > limit:
            raise _not_ascending(of)
    places -= 1
    return places


def _not_ascending(of: Places) -> PacketError:
    return PacketError(f"coded indices are not {of.kept} ascending numbers below {of.numel}. {REPEAT}")


def _joined(first: int, *parts: Bytes) -> Bytes:
    return np.concatenate([np.array([first], np.uint8), *parts])


def _zstandard() -> Any:
    import zstandard  # the extra zstd

    return zstandard
