"""Hostile payloads for every codec cause no crash, no hang, and no memory beyond the declared size."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hostile import NUMELS, check_payload, check_python_memory, decoded
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import CODECS, over

import thinwire as tw
from thinwire.rng import Key
from thinwire.testing.values import encoded

places = pytest.mark.parametrize("place", range(len(CODECS)), ids=lambda place: str(CODECS[place]))


@places
@given(st.sampled_from(NUMELS), st.binary(max_size=600))
@settings(max_examples=12)
def test_arbitrary_payloads_raise_only_packet_errors(place, numel, raw):
    check_payload(place, numel, raw)


@places
@given(st.sampled_from(NUMELS), st.lists(st.tuples(st.integers(0, 2800), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=12)
def test_altered_payloads_raise_only_packet_errors(place, numel, changes):
    """The payloads are nearly honest, so that code behind the first check is reached."""
    codec = CODECS[place].piece
    raw = bytearray(encoded(codec, torch.linspace(-3, 2, numel), Key(round=1, sender=1)))
    for at, byte in changes:
        if raw:
            raw[at % len(raw)] = byte
    check_payload(place, numel, bytes(raw))


@places
@over("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_decoding_hostile_payloads_allocates_bounded_memory(place, byte):
    for numel in NUMELS:
        check_python_memory(place, numel, bytes([byte]))


def test_a_hostile_scale_is_caught_by_the_anchor_check():
    """Decoding may give infinity and NaN. All replicas see the same values, and no anchor takes them over (`flight`)."""
    codecs = (
        tw.codecs.Identity(),
        tw.codecs.Cast(),
        tw.codecs.Sign(),
        tw.codecs.Int(8, 64, "fp32"),
        tw.codecs.Codebook(),
        tw.codecs.DCT(tw.codecs.Identity()),
    )
    for codec in (*codecs, tw.codecs.Hadamard(tw.codecs.Identity()), tw.lab.codecs.LowRank(1, shapes=((20, 30),))):
        raw = b"\x00\x00\x80\x7f" * 600  # infinity in fp32; scales and tables are at the end of a payload
        _, after, refused, _ = decoded(codec, raw[-codec.nbytes(600) :], 600)
        assert not refused and not torch.isfinite(after).all(), codec


def test_the_memory_check_finds_a_codec_that_trusts_a_length():
    """This codec allocates as much as the bytes say."""

    class Believing:
        def decode_add(self, payload, out, key, weight=1.0):
            out.add_(torch.zeros(int(payload[0]) * 1000 + len(out))[: len(out)])

    _, _, _, made = decoded(Believing(), b"\x00" * 100, 100)
    _, _, _, more = decoded(Believing(), b"\xff" * 100, 100)
    assert more.largest > 1_000_000 > made.total


@pytest.mark.slow
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed: pip install atheris")
def test_atheris_finds_no_crash_in_a_minute(tmp_path):
    script = Path(__file__).parents[1] / "support" / "fuzz.py"
    done = subprocess.run(
        [sys.executable, script, "-max_total_time=60", f"-artifact_prefix={tmp_path}/"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
