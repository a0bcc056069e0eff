"""Sparse codecs: their defaults, claims and other densities."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from thinwire.codecs.layout import Places
from thinwire.rng import Key

FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)
IDENTITY = tw.codecs.Identity()


def test_codecs_have_the_documented_defaults():
    assert tw.codecs.TopK() == tw.codecs.TopK(0.01, tw.codecs.Cast("bf16"))
    assert tw.codecs.DCT(tw.codecs.E3M0()) == tw.codecs.DCT(tw.codecs.E3M0(), 64, 1)
    assert tw.codecs.RandomK() == tw.codecs.RandomK(0.1, tw.codecs.Cast("bf16"))
    assert tw.codecs.ChunkedTopK() == tw.codecs.ChunkedTopK(4096, 64, tw.codecs.Cast("bf16"))  # SparseLoCo's


@pytest.mark.parametrize("codec", [tw.codecs.TopK(0.1), tw.codecs.ChunkedTopK(256, 16)], ids=repr)
def test_sparse_codecs_are_neither_local_nor_idempotent(codec):
    """Their inner cast is both, but the choice of the largest values is neither."""
    assert codec.claims == {"odd", "contractive", "refuses"}


def test_other_forms_have_the_listed_multiples_of_the_density():
    assert [codec.density for codec in tw.codecs.TopK(0.01).forms()] == pytest.approx([0.01 * f for f in FACTORS])
    assert [codec.count for codec in tw.codecs.ChunkedTopK(4096, 100).forms()] == [math.ceil(100 * f) for f in FACTORS]
    assert [codec.density for codec in tw.codecs.TopK(0.5).forms()[5:]] == [0.55, 0.625, 0.75, 1.0, 1.0]
    assert [codec.count for codec in tw.codecs.ChunkedTopK(10, 6).forms()] == [2, 3, 5, 7, 8, 9, 10]
    assert tw.codecs.ChunkedTopK(10, 6, IDENTITY).forms()[0] == tw.codecs.ChunkedTopK(10, 2, IDENTITY)


@pytest.mark.parametrize(
    ("codec", "density", "due"),
    [
        (tw.codecs.TopK(0.5), 0.25, tw.codecs.TopK(0.5)),
        (tw.codecs.TopK(0.5), 0.75, tw.codecs.TopK(0.75)),
        (tw.codecs.RandomK(0.5, IDENTITY), 0.25, tw.codecs.RandomK(0.5, IDENTITY)),
        (tw.codecs.RandomK(0.5, IDENTITY), 0.75, tw.codecs.RandomK(0.75, IDENTITY)),
        (tw.codecs.ChunkedTopK(10, 6), 0.5, tw.codecs.ChunkedTopK(10, 6)),
        (tw.codecs.ChunkedTopK(10, 6), 0.71, tw.codecs.ChunkedTopK(10, 8)),
    ],
    ids=str,
)
def test_a_codec_becomes_denser_and_never_less_dense(codec, density, due):
    assert codec.denser(density) == due


@pytest.mark.parametrize(
    ("codec", "values", "due"),
    [
        (tw.codecs.TopK(0.5, IDENTITY), [3.0, -1, 2, -4], ([3.0, -4], "02 05")),  # low bits 0, 1; bits 0 + 0, 1 + 1
        (tw.codecs.TopK(0.5, IDENTITY), [1.0, 1, 1, 1, 1], ([1.0, 1, 1], "15")),  # ties: the first; no low bits
        (tw.codecs.TopK(1.0, IDENTITY), [7.0], ([7.0], "01")),
        (tw.codecs.TopK(0.5, IDENTITY), [], ([], "")),
        (tw.codecs.ChunkedTopK(3, 1, IDENTITY), [0.0, 1, -2, 5, 4, 0, 9], ([-2.0, 5, 9], "02")),  # a shorter last chunk
        (tw.codecs.ChunkedTopK(4, 3, IDENTITY), [1.0, 2, 3, 0, 8, 9], ([1.0, 2, 3, 8, 9], "24 01")),
    ],
    ids=str,
)
def test_a_payload_is_the_values_and_then_their_indices(codec, values, due):
    x, (sent, indices) = torch.tensor(values), due
    payload = torch.full((codec.nbytes(len(x)),), 0xAA, dtype=torch.uint8)
    codec.encode(x, payload, Key())
    packed = bytes.fromhex(indices)
    assert payload.numpy().tobytes() == torch.tensor(sent).numpy().tobytes() + packed
    symbols, places = codec.layout(len(x))
    assert (symbols.nbytes, symbols.stride, places.nbytes) == (4 * len(sent), 4, len(packed))
    count = codec.few(len(x))
    assert count == len(sent)
    index, decoded = torch.empty(count, dtype=torch.int64), torch.empty(count)
    codec.sent(payload, len(x), index, decoded, Key())
    assert decoded.tolist() == sent == x[index].tolist()
    codec.sent(payload, len(x), index, decoded, Key(), 2.0)
    assert decoded.tolist() == [2 * value for value in sent]
    out = torch.ones(len(x))
    codec.decode_add(payload, out, Key())
    codec.decode_add(payload, out, Key(), -0.5)
    dense = torch.zeros(len(x)).index_copy(0, index, torch.tensor(sent))
    assert torch.equal(out, 1 + dense / 2)


@pytest.mark.parametrize(
    ("codec", "numel", "indices", "below"),
    [
        (tw.codecs.TopK(0.4, IDENTITY), 5, [1, 1], 5),
        (tw.codecs.TopK(0.4, IDENTITY), 5, [1, 0], 5),
        (tw.codecs.TopK(0.4, IDENTITY), 5, [1, 5], 5),
        (tw.codecs.ChunkedTopK(3, 1, IDENTITY), 6, [3, 2], 3),  # the first index of the next chunk
        (tw.codecs.ChunkedTopK(3, 1, IDENTITY), 6, [0, 3], 3),
        (tw.codecs.ChunkedTopK(4, 2, IDENTITY), 8, [0, 1, 2, 2], 8),
        (tw.codecs.ChunkedTopK(4, 1, IDENTITY), 6, [0, 2], 6),
    ],
    ids=str,
)
def test_indices_that_are_not_ascending_are_refused(codec, numel, indices, below):
    (_, places), begin = codec.layout(numel), 4 * len(indices)
    payload = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
    payload[begin:] = places.pack(torch.tensor(indices))
    out = torch.ones(numel)
    with pytest.raises(tw.PacketError) as told:
        codec.decode_add(payload, out, Key())
    due = f"a packet's indices are not ascending below {below}; run the same version on every replica."
    assert str(told.value) == due and out.tolist() == [1.0] * numel


def test_random_k_draws_the_coordinates_of_a_round_and_scales_their_values():
    """All releases draw the same: 0, 1, 13 and 15 of 16 for this key, the same for every sender."""
    codec, x = tw.codecs.RandomK(0.25, IDENTITY), torch.arange(1.0, 17)
    key, drawn = Key(1, 2, 3, sender=5), [0, 1, 13, 15]
    payload = torch.empty(codec.nbytes(16), dtype=torch.uint8)
    codec.encode(x, payload, key)
    assert payload.view(torch.float32).tolist() == x[drawn].tolist() == codec.project(x, (), key).tolist()
    due = torch.zeros(16)
    due[drawn] = 4 * x[drawn]
    for weight, out in ((1.0, torch.ones(16)), (0.5, torch.zeros(16))):
        given = () if weight == 1.0 else (weight,)
        begin = out.clone()
        codec.decode_add(payload, out, Key(1, 2, 3), *given)
        assert torch.equal(out, begin + weight * due)
    assert torch.equal(codec.expand((x[drawn],), 16, key), due) and codec.sizes(17) == (5,)
    assert codec.layout(17)[0].nbytes == codec.nbytes(17) == 20
    top = torch.finfo(torch.float32).max
    for sign in (1, -1):  # beyond the range of fp32 are its largest values
        huge = torch.full((16,), sign * top)
        codec.encode(huge, payload, key)
        out = torch.zeros(16)
        codec.decode_add(payload, out, key, 0.5)
        assert out[drawn].tolist() == [sign * top / 2] * 4
        assert codec.expand((huge[:4],), 16, key)[drawn].tolist() == [sign * top] * 4
    for bad in (math.inf, math.nan):
        with pytest.raises(tw.NonFiniteError):
            codec.encode(torch.full((16,), bad), payload, key)
        with pytest.raises(tw.NonFiniteError):
            codec.project(torch.full((16,), bad), (), key)
    one, out = torch.full((3,), 5.0), torch.zeros(3)
    codec.encode(one, payload[:4], key)
    codec.decode_add(payload[:4], out, key)
    assert sorted(out.tolist()) == [0.0, 0.0, 15.0] and torch.equal(codec.expand((one[:1],), 3, key), out)
    empty = torch.zeros(0)
    codec.encode(empty, payload[:0], key)
    codec.decode_add(payload[:0], empty, key)
    assert codec.nbytes(0) == 0 and codec.expand((empty,), 0, key).shape == (0,)


@pytest.mark.parametrize(
    ("codec", "claims"),
    [
        (tw.codecs.RandomK(0.5, IDENTITY), "odd shared unbiased"),
        (tw.codecs.RandomK(0.5), "drawn odd shared"),
        (tw.codecs.RandomK(0.5, tw.codecs.Sign()), "drawn shared"),
        (tw.codecs.RandomK(1.0, IDENTITY), "contractive exact idempotent odd"),
        (tw.codecs.RandomK(1.0), "contractive idempotent odd"),
        (tw.codecs.TopK(0.5, tw.codecs.Sign()), "contractive refuses"),
        (tw.codecs.TopK(0.5, tw.codecs.RandomK(0.5, IDENTITY)), "drawn odd refuses shared"),
    ],
    ids=str,
)
def test_claims_follow_from_the_values(codec, claims):
    assert sorted(codec.claims) == claims.split()
    assert codec.any_device and codec.sparse


def test_random_k_is_linear_and_draws_only_below_a_density_of_one():
    codec = tw.codecs.RandomK(0.5)
    assert codec.linear and not codec.biased and codec.samples and not tw.codecs.RandomK(1.0).samples
    assert not tw.codecs.TopK(0.5).linear and tw.codecs.TopK(0.5).biased and not tw.codecs.TopK(0.5).samples


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tw.codecs.TopK(0.0), "TopK(density=0.0): more than 0 and at most 1 is needed; 0.01 is usual."),
        (lambda: tw.codecs.TopK(1.01), "TopK(density=1.01): more than 0 and at most 1 is needed; 0.01 is usual."),
        (lambda: tw.codecs.RandomK(0), "RandomK(density=0): more than 0 and at most 1 is needed; 0.01 is usual."),
        (
            lambda: tw.codecs.ChunkedTopK(4, 0),
            "ChunkedTopK(chunk=4, count=0): 0 < count <= chunk is needed; 64 of 4096 are SparseLoCo's.",
        ),
        (
            lambda: tw.codecs.ChunkedTopK(4, 5),
            "ChunkedTopK(chunk=4, count=5): 0 < count <= chunk is needed; 64 of 4096 are SparseLoCo's.",
        ),
        (
            lambda: tw.codecs.ChunkedTopK(values=3),
            "ChunkedTopK(values=3): a Codec is needed, such as Cast('bf16') or Sign().",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make, said):
    with pytest.raises(tw.ConfigurationError) as told:
        make()
    assert str(told.value) == said


def test_the_limits_of_the_settings_are_allowed():
    assert tw.codecs.TopK(1).nbytes(8) == 16 + 2 and tw.codecs.RandomK(1).nbytes(8) == 16
    assert tw.codecs.ChunkedTopK(1, 1).nbytes(8) == 16 + 1
    assert [tw.codecs.TopK(0.5).layout(numel)[1] for numel in (0, 1)] == [Places(0, 1, 1, True), Places(1, 1, 1, True)]
