"""Sparse codecs: their defaults, claims and other densities."""

from __future__ import annotations

import math

import pytest

import thinwire as tw

FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0)


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
