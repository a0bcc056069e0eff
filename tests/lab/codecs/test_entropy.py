"""Lossless entropy coding of payloads: sizes close to the entropy, at most one byte more than the codec's, safe decoding."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard

import thinwire as tw
from thinwire.catalogue.parsing import parse
from thinwire.codecs import E3M0, TopK, nested
from thinwire.codecs.layout import Places, pack
from thinwire.exchange.chunks import cut
from thinwire.lab.codecs import rice
from thinwire.lab.codecs.streams import PayloadReader, places_coded, places_decoded, symbols_decoded
from thinwire.rng import Key
from thinwire.testing.toy import same_bits
from thinwire.testing.values import gaussian, roundtrip

Entropy = tw.lab.codecs.Entropy
NUMEL = 1 << 18
SOURCES = {
    "normal": lambda n: torch.from_numpy(np.random.default_rng(1).standard_normal(n, np.float32)),
    "Laplace": lambda n: torch.from_numpy(np.random.default_rng(2).laplace(size=n).astype(np.float32)),
    "Student t3": lambda n: torch.from_numpy(np.random.default_rng(3).standard_t(3, n).astype(np.float32)),
}


def entropy_bits(symbols: np.ndarray) -> float:
    """The empirical entropy of all symbols in bits."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def coded(codec: tw.codecs.Codec, x: torch.Tensor) -> torch.Tensor:
    payload = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8)
    return payload[: codec.encode(x, payload, Key())]


@pytest.mark.parametrize("source", SOURCES)
def test_codes_of_four_bits_come_within_two_percent_of_their_entropy(source):
    x, plain = SOURCES[source](NUMEL), torch.empty(E3M0().nbytes(NUMEL), dtype=torch.uint8)
    E3M0().encode(x, plain, Key())
    codes, scales = plain[: NUMEL // 2].numpy(), plain[NUMEL // 2 :].numpy()
    due = entropy_bits(np.concatenate([codes & 15, codes >> 4])) + entropy_bits(scales)
    assert 0.9 * due < 8 * len(coded(Entropy(E3M0()), x)) < 1.02 * due
    assert len(coded(Entropy(E3M0()), x)) < 0.93 * len(plain)


@pytest.mark.parametrize(("chunk", "count"), [(4096, 64), (4096, 1024), (NUMEL, 300), (NUMEL, 20_000)])
def test_places_come_within_two_percent_of_their_entropy(chunk, count):
    """Random places. At a density of 1/64 the Rice parameter is 5, as published: 7.53 bits per gap, where the entropy is 7.43."""
    of = Places(NUMEL, chunk, count)
    drawn = np.random.default_rng(4).random((NUMEL // chunk, chunk)).argpartition(count, axis=1)[:, :count]
    places = torch.from_numpy(np.sort(drawn, axis=1).reshape(-1))
    k, p = rice.parameter(places, count), count / chunk
    assert abs(k - np.log2(np.log(2) / p)) <= 1 and (count / chunk != 1 / 64 or k == 5)
    due = of.kept * (-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p  # the entropy of geometric gaps
    assert 8 * rice.nbytes(places, count, k) < 1.025 * due
    code, back = np.zeros(rice.nbytes(places, count, k) + 3, np.uint8), torch.empty_like(places)
    rice.encode(places, count, k, code[:-3])
    assert rice.decode(code, chunk, count, NUMEL, k, back) == len(code) - 3 and torch.equal(places, back)
    plain = pack(places, of.width).numpy()
    reader = PayloadReader(places_coded(plain, of))
    assert (
        len(reader.data) <= len(code) - 2 and np.array_equal(places_decoded(reader, of), plain) and not len(reader.data)
    )


def test_repeated_gaps_get_a_better_code_than_rice():
    """Real matrices have their large values in few columns, and a Rice code is far from the entropy of such gaps.

    Some gaps do not fit in a byte.
    """
    random = np.random.default_rng(6)
    gaps = np.where(random.random(60_000) < 0.7, random.choice([15, 63, 127], 60_000), random.geometric(1 / 64, 60_000))
    places = np.cumsum(gaps + 1) - 1
    of = Places(int(places[-1]) + 1, int(places[-1]) + 1, len(places))
    plain = pack(torch.from_numpy(places), of.width).numpy()
    reader = PayloadReader(places_coded(plain, of))
    assert gaps.max() > 255 and len(reader.data) < 0.85 * rice.nbytes(torch.from_numpy(places), len(places), 5)
    assert 8 * len(reader.data) < 1.06 * entropy_bits(gaps)  # a code has a whole number of bits per symbol
    assert np.array_equal(places_decoded(reader, of), plain)


def test_chunked_top_k_gets_a_quarter_smaller():
    codec = tw.codecs.ChunkedTopK(4096, 64, tw.codecs.Codebook())
    x = gaussian(NUMEL)
    assert len(coded(Entropy(codec), x)) < 0.75 * codec.nbytes(NUMEL)
    for of in (codec, tw.codecs.ChunkedTopK(4096, 64, E3M0())):  # two parts, and three
        assert same_bits(roundtrip(Entropy(of), x), roundtrip(of, x))
        plain, places = torch.empty(of.nbytes(NUMEL), dtype=torch.uint8), of.layout(NUMEL)[-1]
        of.encode(x, plain, Key())
        found = places_decoded(PayloadReader(coded(Entropy(of), x)[1:].numpy()), places)  # indices come first
        assert np.array_equal(found, plain[-places.nbytes :].numpy())


@pytest.mark.parametrize("codec", [E3M0(), tw.codecs.Identity(), TopK(0.01), tw.codecs.Sign()], ids=str)
def test_entropy_coding_adds_at_most_one_byte(codec):
    """This holds for any values. A round has as many messages as without the coding, so there are no more headers."""
    noise = torch.from_numpy(np.random.default_rng(5).integers(0, 2**32, 4096, np.uint32).view(np.float32)).nan_to_num(
        1
    )
    for x in (noise, gaussian(1), gaussian(300), torch.zeros(5000)):
        assert len(coded(Entropy(codec), x)) <= codec.nbytes(len(x)) + 1
    for numel in (0, 1, 3_000_000):
        ours, theirs = (tw.exchange.Direct().nbytes_sent(one, numel, 2) for one in (Entropy(codec), codec))
        assert 0 <= ours - theirs <= len(cut(codec, 0, numel))


def test_a_payload_begins_with_its_form_and_ends_with_zeros():
    """It is coded where that is shorter. No tensor has no byte."""
    forms = set()
    for numel in range(40):
        codec, x = tw.codecs.Cast(), torch.ones(numel)
        plain, payload = (torch.full((one.nbytes(numel),), 0xAA, dtype=torch.uint8) for one in (codec, Entropy(codec)))
        codec.encode(x, plain, Key())
        used = Entropy(codec).encode(x, payload, Key())
        out = torch.full((numel,), 2.0)
        Entropy(codec).decode_add(payload, out, Key())
        assert out.tolist() == [3.0] * numel
        if not numel:
            assert used == len(payload) == Entropy(codec).nbytes(0) == 0
            continue
        forms.add(int(payload[0]))
        assert len(payload) == len(plain) + 1 and payload[0] == (used < len(payload)) and not payload[used:].any()
        assert payload[0] or torch.equal(payload[1:], plain)
        if used < len(payload):  # a frame for the first bytes, and one for the second
            reader = PayloadReader(payload[1:used].numpy())
            for place in (0, 1):
                assert np.array_equal(symbols_decoded(reader, numel), plain[place::2].numpy())
            assert not len(reader.data)
    assert forms == {0, 1}


@pytest.mark.parametrize("codec", [3, None, E3M0])
def test_only_a_codec_is_compressed(codec):
    with pytest.raises(tw.ConfigurationError) as told:
        Entropy(codec)
    assert str(told.value) == (
        f"Entropy(codec={codec!r}): a codec of known size is needed, such as E3M0() or ChunkedTopK()."
    )


def test_a_round_of_several_messages_decodes_to_the_codecs_values():
    codec, x = tw.codecs.Cast(), gaussian(2_000_000)

    def replica(group: tw.Group) -> torch.Tensor:
        context = tw.exchange.SendContext(group)
        found, _ = tw.exchange.once(tw.exchange.Direct(), context, Entropy(codec), x, Key(sender=group.rank), {})
        context.close()
        return found

    assert all(same_bits(found, roundtrip(codec, x)) for found in tw.run_threads(2, replica, 600.0))


# ---- hostile packets


def refusal_of(codec: tw.codecs.Codec, payload: bytes, numel: int) -> str:
    before, out = torch.ones(numel), torch.ones(numel)
    with pytest.raises(tw.PacketError) as told:
        codec.decode_add(torch.frombuffer(bytearray(payload), dtype=torch.uint8), out, Key())
    assert same_bits(before, out)
    return str(told.value)


def zstd_frame(data: bytes, **settings) -> bytearray:
    form = zstandard.FORMAT_ZSTD1_MAGICLESS
    made = zstandard.ZstdCompressionParameters.from_level(1, format=form, **settings)
    return bytearray(zstandard.ZstdCompressor(compression_params=made).compress(data))


def with_length(frame: bytes) -> bytes:
    """A payload in coded form with one frame, after its length."""
    return b"\1\1" + struct.pack("<I", len(frame)) + bytes(frame)


def test_a_frame_of_another_size_is_refused_before_it_is_unpacked():
    due, codec = E3M0().nbytes(4096), Entropy(E3M0())
    bomb = zstd_frame(bytes(1 << 20))  # a megabyte in few bytes, which claims to be a gigabyte
    bomb[:5] = bytes([0xA0]) + struct.pack("<I", 1 << 30)
    for frame in (
        bomb,
        zstd_frame(bytes(due + 1)),
        zstd_frame(bytes(due - 1)),
        zstd_frame(bytes(due), write_content_size=False),
    ):
        assert "were expected" in refusal_of(codec, with_length(frame), 4096)
    honest = zstd_frame(bytes(due))
    assert "damaged" in refusal_of(codec, with_length(honest[:-1]), 4096)
    assert "more were expected" in refusal_of(codec, with_length(honest)[:-1], 4096)
    assert "more were expected" in refusal_of(codec, b"\1\1\xff\xff\xff\xff" + bytes(honest), 4096)
    assert "no encoder writes" in refusal_of(codec, b"\1\2" + bytes(honest), 4096)
    assert "begins with the byte 2, which no" in refusal_of(codec, b"\2" + bytes(due), 4096)
    assert "more were expected" in refusal_of(codec, b"\0" + bytes(due - 1), 4096)
    out = torch.zeros(4096)
    codec.decode_add(torch.frombuffer(bytearray(with_length(honest) + b"more"), dtype=torch.uint8), out, Key())
    assert not out.any()


@pytest.mark.parametrize(
    ("k", "byte"), [(0, 0xFF), (5, 0x55), (5, 0xFF), (32, 0x00), (32, 0xFF), (33, 0x00), (127, 0x55), (255, 0x55)]
)
def test_invalid_rice_codes_are_refused(k, byte):
    """Gaps beyond the tensor, codes that end too early, and invalid k."""
    codec, numel = Entropy(TopK(0.5)), 1000
    payload = bytes([1, k]) + bytes([byte]) * (codec.nbytes(numel) - 2)
    assert "coded indices" in refusal_of(codec, payload, numel)


@pytest.mark.parametrize(
    "high",
    [bytes([2]) * 500, bytes(499) + bytes([255]), bytes(501), bytes([255]) * 500],
    ids=["beyond the tensor", "an unfinished gap", "one gap too many", "no complete gap"],
)
def test_invalid_frames_of_gaps_are_refused(high):
    codec, numel = Entropy(TopK(0.5)), 1000
    assert "coded indices" in refusal_of(codec, b"\1\x80" + with_length(zstd_frame(high))[2:], numel)
    assert "were expected" in refusal_of(codec, b"\1\x80" + with_length(zstd_frame(bytes(1 << 16)))[2:], numel)
    assert "coded indices" in refusal_of(codec, b"\1\xff" + with_length(zstd_frame(bytes(500)))[2:], numel)


@pytest.mark.parametrize(
    "codec",
    [tw.codecs.E3M0(), tw.codecs.RandomK(0.5), tw.lab.codecs.OverSenders(tw.codecs.TopK()), tw.lab.codecs.LowRank()],
    ids=str,
)
def test_entropy_declares_the_properties_of_its_codec(codec):
    outside = tw.lab.codecs.Entropy(codec)
    for name in ("grain", "biased", "samples", "needs_fixed_group", "needs_shapes", "sparse", "joint"):
        assert getattr(outside, name) == getattr(codec, name), name
    assert outside.claims == (codec.claims - {"local"}) | {"refuses"} and outside.varies and not outside.any_device
    assert outside.forms() == tuple(map(tw.lab.codecs.Entropy, codec.forms()))
    assert outside.denser(0.7) == tw.lab.codecs.Entropy(codec.denser(0.7))


def test_the_indices_of_several_matrices_are_decoded():
    each = tw.lab.codecs.Each(TopK(0.3), rest=E3M0(8), shapes=((8, 8), (4, 16)))
    x = gaussian(140)
    assert same_bits(roundtrip(Entropy(each), x), roundtrip(each, x))
    smooth = torch.arange(140) % 3 + 1.0  # its indices and its values are coded
    assert len(coded(Entropy(each), smooth)) < each.nbytes(140)
    assert same_bits(roundtrip(Entropy(each), smooth), roundtrip(each, smooth))
    assert Entropy(each).spans_of_rest(140) == each.spans_of_rest(140) != Entropy(TopK()).spans_of_rest(140)


@pytest.mark.parametrize(
    "inner",
    [
        tw.lab.codecs.Each(TopK(0.3), rest=TopK(0.3), shapes=((8, 8),)),
        tw.lab.codecs.LowRank(2, values=TopK(0.3), shapes=((64,),)),
    ],
    ids=["no rest", "no matrix"],
)
def test_a_part_without_elements_is_decoded(inner):
    """Also from bytes that say that its gaps are a frame."""
    x = gaussian(64)
    assert same_bits(roundtrip(Entropy(inner), x), roundtrip(inner, x))
    empty = next(part for part in inner.layout(64) if isinstance(part, Places) and not part.numel)
    framed = np.frombuffer(b"\x80" + with_length(zstd_frame(b""))[2:], np.uint8)
    assert len(places_decoded(PayloadReader(framed), empty)) == 0


def test_packets_of_all_senders_are_decoded_together():
    codec, x = tw.lab.codecs.OverSenders(E3M0()), (torch.ones(300), gaussian(300))
    packets = {
        one: [(coded(one, values), Key(), weight) for values, weight in zip(x, (1.0, 3.0))]
        for one in (Entropy(codec), codec)
    }
    assert len(packets[Entropy(codec)][0][0]) < codec.nbytes(300)
    assert same_bits(*(one.decode_joint(said, 300) for one, said in packets.items()))


def test_entropy_must_be_the_outermost_codec():
    for make in (
        lambda inner: Entropy(inner),
        lambda inner: tw.lab.codecs.OverSenders(inner),
        lambda inner: tw.codecs.DCT(inner),
        lambda inner: tw.lab.codecs.Each(inner),
        lambda inner: TopK(0.1, inner),
    ):
        with pytest.raises(tw.ConfigurationError, match=r"outermost|known size"):
            make(Entropy(E3M0()))
    made = Entropy(tw.codecs.Squares(tw.codecs.DCT(tw.codecs.ChunkedTopK())))
    assert parse(repr(made)) == made and sum(one.varies for one in nested(made)) == 1
    assert made.needs_shapes and made.fitted(((64, 64),)).codec.shapes == ((64, 64),)
    assert replace(made, codec=TopK(0.01)).denser(0.1) == Entropy(TopK(0.1))
