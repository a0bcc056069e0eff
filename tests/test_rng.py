"""Random streams: each purpose and key has its own, any range of it is the same, and all machines draw alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.rng import Key, derive, draw, normals, quantiles

WORDS = st.integers(0, 2**63 - 1)


def test_a_derived_seed_is_blake2b_of_its_names():
    text = hashlib.blake2b(b"7/data/1/-2", digest_size=8).digest()
    assert derive(7, "data", 1, -2) == int.from_bytes(text, "little") >> 1 < 1 << 63
    others = {derive(*of) for of in ((7, "data"), (7, "data", 1), (8, "data", 1), (7, "date", 1), (7, "data", 1, 0))}
    assert len(others) == 5


def test_a_key_has_a_stream_of_its_own_and_one_that_all_senders_share():
    key = Key(1, 2, 3, 4, 5)
    changed = [replace(key, **{name: 9}) for name in ("seed", "fragment", "round", "part")]
    assert len({one.shared("x") for one in (key, *changed)}) == 5 == len({one.own("x") for one in (key, *changed)})
    other = replace(key, sender=9)
    assert other.shared("x") == key.shared("x") and other.own("x") != key.own("x")
    assert key.own("x") != key.own("y") and key.shared("x") != key.shared("y") and key.own("x") != key.shared("x")
    parts = [Key(sender=sender, part=part) for sender in range(3) for part in range(3)]
    streams = {one.own("x") for one in parts} | {one.shared("x") for one in parts}
    assert len(streams) == 9 + 3, "a part's stream is no other sender's"
    assert Key().own("x") == derive(0, "x", 0, 0, 0) and Key(part=2).shared("x") == derive(0, "x", 0, 0, -2)


def splitmix(stream: int, number: int) -> int:
    """Draw `number` of a stream by the published generator, in Python's integers."""
    z = (stream + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@given(WORDS, st.integers(0, 2**40), st.integers(0, 5))
def test_random_words_are_those_of_splitmix64_in_any_range(stream: int, begin: int, count: int):
    assert [int(z) % 2**64 for z in draw(stream, begin, count)] == [splitmix(stream, begin + i) for i in range(count)]


def test_random_words_are_as_published():
    assert [int(z) % 2**64 for z in draw(1234567, 0, 2)] == [6457827717110365317, 3203168211198807973]
    assert [int(z) % 2**64 for z in draw(0, 0, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@given(WORDS, st.integers(0, 1000), st.integers(0, 9))
def test_any_range_of_normals_is_the_same(stream: int, begin: int, count: int):
    assert torch.equal(normals(stream, begin, count), normals(stream, 0, begin + count)[begin:])


def test_normals_are_quantiles_of_equal_weight():
    """Each 16 bits of a word choose one; with mean 0 and variance 1, in multiples that no library rounds otherwise."""
    table = quantiles().double()
    assert hashlib.blake2b(quantiles().numpy().tobytes(), digest_size=8).hexdigest() == "7070796d47f40ca8"
    assert len(table) == 1 << 16 and torch.equal(table, -table.flip(0)) and (table[1:] > table[:-1]).all()
    assert table.square().mean().item() == pytest.approx(1.0, abs=1e-6) and table[-1].item() == pytest.approx(
        4.32, abs=0.01
    )
    assert table.pow(4).mean().item() == pytest.approx(2.999, abs=0.001) and torch.equal(
        table * 2**18, (table * 2**18).round()
    )
    cumulative = torch.special.ndtr(table)
    assert (cumulative - (torch.arange(1 << 16) + 0.5) / (1 << 16)).abs().max() < 1e-4
    word = splitmix(7, 3)
    signed = [(word >> 16 * i & 0xFFFF) - (1 << 16) * (word >> 16 * i + 15 & 1) for i in range(4)]
    assert torch.equal(normals(7, 12, 4).double(), table[torch.tensor(signed) + (1 << 15)])
