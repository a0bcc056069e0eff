"""Floats of 32 and 16 bits: where they are made, and what takes a codec's place in a round that travels in full."""

from __future__ import annotations

import thinwire as tw
from thinwire.codecs.cast import Dense, Identity, in_full


def test_they_run_on_any_device() -> None:
    assert all(codec.any_device for codec in (Identity(), Dense(2), tw.codecs.Cast()))


def test_in_full_cuts_where_the_codec_does() -> None:
    assert in_full(tw.codecs.E3M0(32)) == Dense(32)
    assert in_full(tw.codecs.TopK()) == in_full(Identity()) == Identity()
    assert [codec.grain for codec in (Identity(), Dense(32))] == [1, 32]
