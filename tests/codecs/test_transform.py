"""Transforms by hand: their runs, signs, weights, claims and settings. Their definitions: test_single_codecs.py."""

from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from thinwire.codecs import DCT, E3M0, Cast, Hadamard, Identity, RandomK, Sign, Squares, TopK, transform
from thinwire.lab.codecs.over_senders import OverSenders
from thinwire.rng import Key

KEY = Key(1, 2, 3)


def sent(codec: tw.codecs.Codec, x: torch.Tensor, key: Key = KEY) -> torch.Tensor:
    """The payload, as fp32."""
    payload = torch.full((codec.nbytes(len(x)),), 0xAA, dtype=torch.uint8)
    codec.encode(x, payload, key)
    return payload


@pytest.mark.parametrize(
    ("codec", "numel", "runs"),
    [
        (DCT(Identity(), 4), 11, [(2, 1, 4), (1, 0, 4), (1, 1, 3)]),
        (DCT(Identity(), 4, 2), 59, [(3, 4, 4), (1, 2, 4), (1, 1, 3)]),
        (DCT(Identity(), 4, 2), 64, [(4, 4, 4), (1, 0, 4), (1, 1, 0)]),
        (Hadamard(Identity(), 8), 21, [(2, 1, 8), (1, 1, 4), (0, 1, 2), (1, 1, 1)]),
        (Hadamard(Identity(), 2), 3, [(1, 1, 2), (1, 1, 1)]),
    ],
    ids=str,
)
def test_a_vector_is_cut_into_runs_and_its_rest(codec, numel, runs):
    assert list(codec.runs(numel)) == runs


@pytest.mark.parametrize(
    ("axes", "values", "due"),
    [
        (1, [1, 3, 5, 5, 7], [4 / math.sqrt(2), -2 / math.sqrt(2), 10 / math.sqrt(2), 0, 7]),
        (2, [1, 3, 5, 11, 2, 4, 6], [10, -4, -6, 2, 6 / math.sqrt(2), -2 / math.sqrt(2), 6]),
    ],
)
def test_the_cosines_of_two_are_a_sum_and_a_difference(axes, values, due):
    got = sent(DCT(Identity(), 2, axes), torch.tensor(values, dtype=torch.float32)).view(torch.float32)
    assert got.tolist() == pytest.approx(due, abs=1e-6)


def test_the_cosines_of_three():
    got = sent(DCT(Identity(), 4), torch.tensor([1.0, 2, 4])).view(torch.float32)
    assert got.tolist() == pytest.approx([7 / math.sqrt(3), -3 / math.sqrt(2), 1 / math.sqrt(6)], abs=1e-6)


def test_hadamard_draws_the_signs_of_a_round():
    """All releases draw the same signs: - + + - for this key. A run of 4, one of 2 and one of 1."""
    codec, x = Hadamard(Identity(), 4), torch.arange(1.0, 8)
    half = math.sqrt(0.5)
    due = [0.0, 2, 1, -5, half, -11 * half, -7]
    got = sent(codec, x).view(torch.float32)
    assert got.tolist() == pytest.approx(due, abs=1e-6)
    assert torch.equal(got, sent(codec, x, Key(1, 2, 3, sender=9)).view(torch.float32))
    assert sent(codec, x, Key(1, 2, 4)).view(torch.float32)[0].item() == -2.0


@pytest.mark.parametrize(
    "codec",
    [DCT(Identity(), 4), DCT(Identity(), 4, 2), Hadamard(Identity(), 4), Squares(Identity(), 2, ((3, 5), (4, 2)))],
    ids=str,
)
def test_a_decoded_packet_is_added_times_its_weight(codec, monkeypatch):
    x, out = torch.linspace(-2, 3, 27), torch.ones(27)
    payload = sent(codec, x)
    codec.decode_add(payload, out, KEY)
    torch.testing.assert_close(out, 1 + x, rtol=0, atol=1e-5)
    codec.decode_add(payload, out, KEY, -0.5)
    torch.testing.assert_close(out, 1 + x / 2, rtol=0, atol=1e-5)
    values = payload.view(torch.float32)
    for weight, due in (((), x), ((3.0,), 3 * x)):
        back = torch.zeros(27)
        codec.back(values, back, KEY, *weight)
        torch.testing.assert_close(back, due, rtol=0, atol=1e-5)
    monkeypatch.setattr(transform, "_CHUNK", 1)  # one run at a time
    assert torch.equal(sent(codec, x), payload)


@pytest.mark.parametrize("make", [lambda inner: DCT(inner, 4), lambda inner: Hadamard(inner, 4), Squares])
def test_packets_of_all_senders_are_decoded_together(make):
    codec, x = make(OverSenders(Identity())), torch.linspace(1, 3, 11)
    packets = [(sent(codec, sign * x), Key(1, 2, 3, sender=k), 1.0 + k) for k, sign in enumerate((1, 5))]
    assert codec.joint and not make(Identity()).joint and not codec.biased
    torch.testing.assert_close(codec.decode_joint(packets, 11), x * (1 + 10) / 3, rtol=0, atol=1e-5)
    torch.testing.assert_close(codec.decode_joint(packets[1:], 11), 5 * x, rtol=0, atol=1e-5)


def test_values_beyond_the_range_of_fp32_become_its_largest():
    top = torch.finfo(torch.float32).max
    for codec in (DCT(Identity(), 4), Hadamard(Identity(), 4)):
        coded = sent(codec, sent(codec, torch.eye(4)[0]).view(torch.float32).sign() * top).view(torch.float32)
        assert coded.abs().max() == top
        out = torch.zeros(4)
        codec.decode_add(torch.full((4,), top).view(torch.uint8), out, KEY, 0.5)
        assert out.abs().max() <= top / 2
        out = torch.zeros(4)
        codec.decode_add(torch.full((4,), math.inf).view(torch.uint8), out, KEY)
        assert not torch.isfinite(out).any()
        for bad in (math.inf, math.nan):
            with pytest.raises(tw.NonFiniteError):
                sent(codec, torch.full((4,), bad))


@pytest.mark.parametrize(
    ("inner", "dct", "hadamard", "squares"),
    [
        (Identity(), "contractive odd", "contractive drawn odd shared", "contractive exact idempotent odd"),
        (E3M0(), "contractive odd", "contractive drawn odd shared", "contractive odd"),
        (Sign(), "contractive", "contractive drawn shared", "contractive"),
        (TopK(0.5), "contractive odd refuses", "contractive drawn odd refuses shared", "contractive odd refuses"),
        (RandomK(0.5, Identity()), *["odd shared unbiased"] * 3),
        (RandomK(0.5), *["drawn odd shared"] * 3),
    ],
    ids=str,
)
def test_claims_are_those_of_the_codec_inside(inner, dct, hadamard, squares):
    for kind, claims in ((DCT, dct), (Hadamard, hadamard), (Squares, squares)):
        assert sorted(kind(inner).claims) == claims.split(), kind
        assert kind(inner).nbytes(999) == inner.nbytes(999) and kind(inner).layout(999) == inner.layout(999)


def test_packets_are_cut_where_runs_and_blocks_end():
    assert [DCT(Identity()).grain, DCT(Identity(), 6, 2).grain, DCT(E3M0(128), 48).grain] == [64, 36, 384]
    assert [Hadamard(Identity()).grain, Hadamard(E3M0(64), 256).grain, DCT(TopK()).grain] == [128, 256, None]


def test_defaults_and_limits_are_the_documented_ones():
    assert DCT(Cast()) == DCT(Cast(), 64, 1) and Hadamard(Cast()) == Hadamard(Cast(), 128)
    assert Squares(Cast()) == Squares(Cast(), 64, ()) and Squares(Cast()).needs_shapes and not DCT(Cast()).needs_shapes
    assert Squares(Cast(), 2).fitted([[2, 4]]) == Squares(Cast(), 2, ((2, 4),))
    assert [DCT(Cast(), 2).size, DCT(Cast(), 1024).size, DCT(Cast(), 3, 2).size] == [2, 1024, 9]
    assert Hadamard(Cast(), 2).size == 2 and Squares(Cast(), 2).side == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *[
            (
                lambda side=side, axes=axes: DCT(Cast(), side, axes),
                f"DCT(side={side}, axes={axes}): a side of 2 to 1024 and 1 or 2 axes are needed; 64 and 1 are usual.",
            )
            for side, axes in ((1, 1), (1025, 1), (64, 0), (64, 3))
        ],
        *[
            (
                lambda block=block: Hadamard(Cast(), block),
                f"Hadamard(block={block}): a power of two is needed; 128 is usual.",
            )
            for block in (-2, 0, 1, 3, 6)
        ],
        (lambda: Squares(Cast(), 1), "Squares(side=1): at least 2 is needed; 64 is usual."),
        (lambda: DCT(3), "DCT(codec=3): a Codec is needed, such as Cast('bf16') or Sign()."),
        (lambda: Hadamard(Cast), f"Hadamard(codec={Cast!r}): a Codec is needed, such as Cast('bf16') or Sign()."),
        (lambda: Squares(None), "Squares(codec=None): a Codec is needed, such as Cast('bf16') or Sign()."),
    ],
)
def test_settings_that_cannot_work_are_refused(make, said):
    with pytest.raises(tw.ConfigurationError) as told:
        make()
    assert str(told.value) == said


def test_squares_are_cut_out_of_each_matrix():
    """Two matrices, an edge to the right, an edge below, a vector, and what no shape covers."""
    order = sent(Squares(Identity(), 2, ((3, 5), (3,), (2, 2, 3))), torch.arange(31.0)).view(torch.float32)
    squares = [0, 1, 5, 6, 2, 3, 7, 8, 18, 19, 24, 25, 20, 21, 26, 27, 22, 23, 28, 29]
    assert order.tolist() == [*squares, 4, 9, 10, 11, 12, 13, 14, 15, 16, 17, 30]
