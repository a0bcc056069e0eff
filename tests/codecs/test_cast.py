"""Casts to 32 and 16 bits: the devices they run on, and the codec of a round that is sent uncompressed."""

from __future__ import annotations

import thinwire as tw
from thinwire.codecs.cast import Dense, Identity, in_full


def test_casts_run_on_any_device() -> None:
    assert all(codec.any_device for codec in (Identity(), Dense(2), tw.codecs.Cast()))


def test_in_full_keeps_the_grain_of_the_codec() -> None:
    assert [in_full(tw.codecs.E3M0(block)) for block in (2, 32)] == [Dense(2), Dense(32)]
    assert in_full(tw.codecs.TopK()) == in_full(Identity()) == Identity()
    assert [codec.grain for codec in (Identity(), Dense(32))] == [1, 32]
