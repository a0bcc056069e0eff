"""One codec per tensor: small tensors, randomness and claims."""

from __future__ import annotations

import torch

import thinwire as tw
from thinwire.rng import Key
from thinwire.testing.values import roundtrip

SHAPES = ((4, 8), (8, 4), (4, 4), (32,))


def test_matrices_from_the_least_size_on_are_encoded_separately() -> None:
    each = tw.codecs.Each(tw.codecs.Sign(), least=32, shapes=SHAPES)
    assert each.matrices == ((4, 8), (8, 4))
    assert each.nbytes(112) == 2 * (4 + 4) + 4 * (16 + 32)
    x = torch.arange(112.0) - 50
    assert roundtrip(each, x)[64:].equal(x[64:])


def test_each_matrix_has_its_own_random_coordinates() -> None:
    each = tw.codecs.Each(tw.codecs.RandomK(0.25, tw.codecs.Identity()), shapes=SHAPES)
    first, second, *_ = roundtrip(each, torch.ones(112), Key(round=3)).split(32)
    assert first.count_nonzero() == second.count_nonzero() == 8 and not first.equal(second)


def test_each_claims_what_all_its_codecs_claim() -> None:
    assert tw.codecs.Each.needs_shapes and not tw.codecs.Each.biased
    chosen = (tw.codecs.Sign(), tw.codecs.Identity(), tw.codecs.Identity())
    plain = tw.codecs.Each(tw.codecs.Identity(), shapes=SHAPES)
    assert "exact" in plain.claims
    assert tw.codecs.Each(tw.codecs.Identity(), shapes=SHAPES, chosen=chosen).claims == {"contractive"}
    assert tw.codecs.Each(tw.codecs.Sign(), shapes=SHAPES).claims == {"contractive"}
