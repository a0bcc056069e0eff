"""The bytes of coded symbols and indices: the form that each begins with, its lengths, and what a decoder refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import zstandard

from thinwire.codecs.base import Places
from thinwire.codecs.bits import pack
from thinwire.codecs.streams import PayloadReader, places_coded, places_decoded, symbols_coded, symbols_decoded
from thinwire.errors import PacketError

REPEAT = "Run the same strategy and version of Thinwire on every replica."


def unframed(coded: bytes) -> bytes:
    """The content of a zstd frame behind its length."""
    form = zstandard.FORMAT_ZSTD1_MAGICLESS
    assert struct.unpack("<I", coded[:4]) == (len(coded) - 4,)
    return zstandard.ZstdDecompressor(format=form).decompress(coded[4:])


def packed(places: object, of: Places) -> np.ndarray:
    return pack(torch.tensor(places), of.width).numpy()


def read(coded: bytes) -> PayloadReader:
    return PayloadReader(np.frombuffer(bytearray(coded), np.uint8))


def test_symbols_are_a_frame_or_unchanged_if_that_is_not_longer():
    assert symbols_coded(np.frombuffer(b"abcd", np.uint8)).tobytes() == b"\0abcd"
    assert symbols_coded(np.empty(0, np.uint8)).tobytes() == b"\0"
    coded = symbols_coded(np.zeros(100, np.uint8)).tobytes()
    assert coded[:1] == b"\1" and unframed(coded[1:]) == bytes(100)
    shortest = next(n for n in range(1, 100) if symbols_coded(np.zeros(n, np.uint8))[0])
    assert len(symbols_coded(np.zeros(shortest, np.uint8))) == shortest  # the frame is one byte shorter
    reader = read(coded + b"\0abcd" + b"rest")
    assert symbols_decoded(reader, 100).tobytes() == bytes(100) and symbols_decoded(reader, 4).tobytes() == b"abcd"
    assert reader.data.tobytes() == b"rest"
    for refused, said in (
        (b"", "a coded payload ends after 0 bytes, 1 more were expected."),
        (b"\0abc", "a coded payload ends after 3 bytes, 4 more were expected."),
        (b"\2abcd", "coded symbols begin with the byte 2, which no encoder writes."),
        (coded, "a coded payload declares 100 bytes, 4 to 4 were expected."),
    ):
        with pytest.raises(PacketError) as told:
            symbols_decoded(read(refused), 4)
        assert str(told.value) == f"{said} {REPEAT}"


@pytest.mark.parametrize(
    ("of", "places", "due"),
    [
        (Places(40, 40, 3), [3, 17, 39], "03 56 57"),
        (Places(32, 16, 2), [0, 15, 7, 8], "02 38 1b"),
        (Places(35, 16, 2), [0, 15, 7, 8, 1], "02 38 1b 02"),  # a shorter last chunk
    ],
)
def test_few_indices_are_a_rice_code(of, places, due):
    coded = places_coded(packed(places, of), of)
    assert coded.tobytes().hex(" ") == due
    assert np.array_equal(places_decoded(PayloadReader(coded), of), packed(places, of))


@pytest.mark.parametrize("gap", [0, 254, 255, 256, 509, 510, 765])
def test_gaps_that_repeat_are_a_frame_with_255_for_more(gap):
    """The last gap ends at the last index."""
    of = Places(70 * (gap + 1), 70 * (gap + 1), 70)
    plain = packed([70 * (gap + 1) - 1 - i * (gap + 1) for i in range(69, -1, -1)], of)
    if gap:
        coded = places_coded(plain, of).tobytes()
        assert coded[:1] == b"\x80" and unframed(coded[1:]) == (b"\xff" * (gap // 255) + bytes([gap % 255])) * 70
    else:
        coded = places_coded(plain, of).tobytes()
        assert coded == b"\0" + bytes(9)
    assert np.array_equal(places_decoded(read(coded), of), plain)


def test_low_bits_of_gaps_stand_before_the_frame_of_their_high_parts():
    """The low 7 bits are random, and the high parts are equal. A Rice code has 13.5 bits for each gap, and these are 7."""
    low = np.random.default_rng(3).integers(0, 128, 1000)
    places = np.cumsum(64 * 128 + low + 1) - 1
    of = Places(int(places[-1]) + 1, int(places[-1]) + 1, 1000)
    plain = packed(places, of)
    coded = places_coded(plain, of).tobytes()
    assert coded[:1] == b"\x87" and coded[1:876] == pack(torch.from_numpy(low), 7).numpy().tobytes()
    assert unframed(coded[876:]) == bytes([64]) * 1000
    assert np.array_equal(places_decoded(read(coded), of), plain)
    lower = Places(of.numel - 1, of.numel - 1, 1000)  # the last index is beyond
    with pytest.raises(PacketError) as told:
        places_decoded(read(coded), lower)
    assert str(told.value) == f"coded indices are not 1000 ascending numbers below {lower.numel}. {REPEAT}"


def test_a_frame_may_have_the_smallest_window_and_none_that_is_larger_than_its_content():
    """Frames by hand: a size of 2 bytes, a window of 1024 or 1152 bytes, and one block of equal bytes. The smallest window is 1 KiB."""

    def coded(size: int, window: int) -> bytes:
        frame = bytes([0x40, window]) + struct.pack("<H", size - 256)
        frame += (size << 3 | 3).to_bytes(3, "little") + b"\7"
        return b"\1" + struct.pack("<I", len(frame)) + frame

    for size, window, allowed in ((256, 0, True), (1024, 0, True), (1151, 1, False), (1152, 1, True), (256, 1, False)):
        if allowed:
            assert symbols_decoded(read(coded(size, window)), size).tobytes() == b"\7" * size
        else:
            with pytest.raises(PacketError, match=f"declares {size} bytes"):
                symbols_decoded(read(coded(size, window)), size)
