"""One codec per tensor: small tensors, randomness and claims."""

from __future__ import annotations

import re

import pytest
import torch

import thinwire as tw
from thinwire.codecs.layout import Symbols
from thinwire.errors import ConfigurationError, PacketError
from thinwire.rng import Key
from thinwire.testing.values import encoded, roundtrip

SHAPES = ((4, 8), (8, 4), (4, 4), (32,))


def test_matrices_from_the_least_size_on_are_encoded_separately() -> None:
    each = tw.lab.codecs.Each(tw.codecs.Sign(), least=32, shapes=SHAPES)
    assert each.matrices == ((4, 8), (8, 4))
    assert each.nbytes(112) == 2 * (4 + 4) + 4 * (16 + 32)
    x = torch.arange(112.0) - 50
    assert roundtrip(each, x)[64:].equal(x[64:])


def test_each_matrix_has_its_own_random_coordinates() -> None:
    each = tw.lab.codecs.Each(tw.codecs.RandomK(0.25, tw.codecs.Identity()), shapes=SHAPES)
    first, second, *_ = roundtrip(each, torch.ones(112), Key(round=3)).split(32)
    assert first.count_nonzero() == second.count_nonzero() == 8 and not first.equal(second)


def test_each_claims_what_all_its_codecs_claim() -> None:
    assert tw.lab.codecs.Each.needs_shapes and not tw.lab.codecs.Each.biased
    chosen = (tw.codecs.Sign(), tw.codecs.Identity(), tw.codecs.Identity())
    plain = tw.lab.codecs.Each(tw.codecs.Identity(), shapes=SHAPES)
    assert "exact" in plain.claims
    assert tw.lab.codecs.Each(tw.codecs.Identity(), shapes=SHAPES, chosen=chosen).claims == {"contractive"}
    assert tw.lab.codecs.Each(tw.codecs.Sign(), shapes=SHAPES).claims == {"contractive"}


def test_the_bytes_are_those_of_one_matrix_after_another_and_of_the_rest() -> None:
    """Matrix k has the streams of part k·2^20 after the packet's part."""
    inner, rest = tw.codecs.RandomK(0.25, tw.codecs.Cast()), tw.codecs.Int(8, 4)
    each = tw.lab.codecs.Each(inner, rest, least=17).fitted(SHAPES)
    x = torch.linspace(-1, 1, 112).sin()
    parts = [encoded(inner, x[32 * k : 32 * k + 32], Key(2, 0, 5, 1, 3 + (k << 20))) for k in range(2)]
    assert encoded(each, x, Key(2, 0, 5, 1, 3)) == b"".join([*parts, encoded(rest, x[64:])])
    assert each.layout(112) == (Symbols(16, 2), Symbols(16, 2), Symbols(48, 1), Symbols(12, 1))
    assert [part.tolist() for part in each.split(x)] == [x[:32].view(4, 8).tolist(), x[32:64].view(8, 4).tolist()]
    assert each.spans_of_rest(112) == ((64, 80), (80, 112), (112, 112))
    x[40] = torch.nan
    with pytest.raises(tw.NonFiniteError, match="1 of 112 values"):
        encoded(each, x)


def test_a_packet_that_cannot_be_decoded_changes_nothing() -> None:
    """Only the indices of the second matrix are wrong."""
    each, out = tw.lab.codecs.Each(tw.codecs.TopK(0.1), shapes=((8, 8), (8, 8))), torch.ones(128)
    payload = torch.tensor(list(encoded(each, torch.arange(128.0))), dtype=torch.uint8)
    payload[-1] = payload[-2] = payload[-3] = 0
    with pytest.raises(PacketError, match="indices are not ascending"):
        each.decode_add(payload, out, Key())
    assert out.equal(torch.ones(128))


def test_chosen_codecs_last_as_long_as_the_shapes() -> None:
    chosen = (tw.codecs.Sign(), tw.codecs.Identity(), tw.codecs.Cast())
    each = tw.lab.codecs.Each(tw.codecs.Sign(), shapes=SHAPES, chosen=chosen)
    assert each.fitted([list(shape) for shape in SHAPES]) is each and each.fitted(SHAPES[:3]).chosen == ()
    assert tw.lab.codecs.Each(tw.codecs.Sign()) == tw.lab.codecs.Each(tw.codecs.Sign(), tw.codecs.Identity(), 0, (), ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("Sign()",), "Each(codec='Sign()'): a codec for one matrix is needed, such as TopK(0.01)."),
        ((tw.codecs.Sign,), "a codec for one matrix is needed"),
        ((tw.lab.codecs.Each(tw.codecs.Sign()),), "a codec for one matrix is needed"),
        (
            (tw.lab.codecs.Entropy(tw.codecs.Sign()),),
            "its size would have to be known here; make it the outermost codec.",
        ),
        ((tw.lab.codecs.OverSenders(tw.codecs.TopK()),), "`joint` would never be called inside this codec"),
        ((tw.codecs.Sign(), tw.lab.codecs.LowRank()), "Each(rest=LowRank("),
        ((tw.codecs.Sign(), tw.codecs.Cast(), -1), "Each(least=-1): 0 or more elements are needed."),
        (
            (tw.codecs.Sign(), tw.codecs.Cast(), 0, SHAPES, (tw.codecs.Sign(),)),
            "Each with 1 chosen codecs for 3 matrices: one for each is needed, or none.",
        ),
        ((tw.codecs.Sign(), tw.codecs.Cast(), 0, SHAPES, ("Sign()",) * 3), "Each(codec='Sign()'): a codec for one"),
    ],
)
def test_invalid_settings_are_refused(given, said) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        tw.lab.codecs.Each(*given)
