"""The bytes of coded symbols and indices: the form that each begins with, its lengths, and what a decoder refuses."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import zstandard

from thinwire.codecs.layout import Places, pack
from thinwire.errors import PacketError
from thinwire.lab.codecs.streams import PayloadReader, places_coded, places_decoded, symbols_coded, symbols_decoded

REPEAT = "Run the same strategy and version of Thinwire on every replica."


def unframed(coded: bytes) -> bytes:
    """The content of a zstd frame behind its length."""
    form = zstandard.FORMAT_ZSTD1_MAGICLESS
    assert struct.unpack("<I", coded[:4]) == (len(coded) - 4,)
    return zstandard.ZstdDecompressor(format=form).decompress(coded[4:])


def packed(places: object, of: Places) -> np.ndarray:
    return pack(torch.as_tensor(places), of.width).numpy()


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
    places = np.cumsum(65 * 128 + low + 1) - 1
    of = Places(int(places[-1]) + 1, int(places[-1]) + 1, 1000)
    plain = packed(places, of)
    coded = places_coded(plain, of).tobytes()
    assert coded[:1] == b"\x87" and coded[1:876] == pack(torch.from_numpy(low), 7).numpy().tobytes()
    assert unframed(coded[876:]) == bytes([65]) * 1000
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


def framed(first: int, high: list[int], low: bytes = b"") -> bytes:
    """Coded indices by hand: a frame of the high parts of their gaps, after the low bits."""
    form = zstandard.ZstdCompressionParameters.from_level(1, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    frame = zstandard.ZstdCompressor(compression_params=form).compress(bytes(high))
    return bytes([first]) + low + struct.pack("<I", len(frame)) + frame


def test_the_gaps_of_a_frame_are_read_up_to_the_end_of_each_chunk():
    short, one, none = Places(35, 16, 3), Places(300, 300, 1), Places(0, 1, 1)
    low, bits = Places(16, 16, 2), pack(torch.tensor([3, 4]), 4).numpy().tobytes()
    for of, coded, due in (
        (short, framed(0x80, [0, 0, 13, 13, 0, 0, 2]), [0, 1, 15, 13, 14, 15, 2]),
        (one, framed(0x80, [5]), [5]),
        (one, framed(0x80, [255, 44]), [299]),
        (none, framed(0x80, []), []),
        (none, b"\0", []),
        (low, framed(0x84, [0, 0], bits), [3, 8]),
    ):
        assert places_decoded(read(coded), of).tolist() == packed(torch.tensor(due).long(), of).tolist()
    for of, coded in (
        (short, framed(0x80, [0, 0, 14, 5, 0, 0, 2])),
        (short, framed(0x80, [0, 0, 13, 14, 0, 0, 2])),
        (short, framed(0x80, [0, 0, 13, 5, 0, 0, 3])),
        (one, framed(0x80, [255, 45])),
        (one, framed(0x80, [5, 255])),
        (one, framed(0x80, [5, 6])),
        (one, framed(0x80, [255])),
        (low, framed(0x85, [0, 0], bits + b"\0")),
    ):
        with pytest.raises(PacketError, match=f"coded indices are not {of.kept} ascending numbers below {of.numel}"):
            places_decoded(read(coded), of)
    many = Places(300 << 4, 300 << 4, 2)  # two high parts, and one more byte for gaps of 255 << 4
    for high, said in (([0, 1, 2], "coded indices are not 2 ascending"), ([0] * 4, "declares 4 bytes, 2 to 3 were")):
        with pytest.raises(PacketError, match=said):
            places_decoded(read(framed(0x84, high, b"\0")), many)


def test_small_gaps_have_no_low_bits_of_their_own():
    """Where the Rice parameter is 5 or less. Here a bit of each gap is random."""
    places = np.cumsum(33 + np.random.default_rng(4).integers(0, 2, 4000)) - 1
    of = Places(int(places[-1]) + 1, int(places[-1]) + 1, 4000)
    assert places_coded(packed(places, of), of)[0] == 0x80
