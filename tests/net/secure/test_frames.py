"""Frames, tokens and requests from a peer are either valid or refused by name. No other error is raised, and no length causes an allocation."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.net import Token, frames
from thinwire.net.admission import opened_join
from thinwire.net.audit import LINES, AuditLog, plain
from thinwire.net.keys import opened_request
from thinwire.net.posted import Pull
from thinwire.net.relay import natural

ALL = range(22)


def test_frames_survive_serialisation():
    pull = Pull(7, 3, 1 << 40, 1 << 20)
    raw = frames.head(frames.PULL, 5, 9, 4) + frames.packed(frames.PULL, *pull)
    frame = frames.opened(raw, 9, [frames.PULL], 4)
    assert (frame.kind, frame.rank, frame.fields) == (frames.PULL, 5, tuple(pull))
    welcome = frames.packed_welcome(3, 4, 1, ["oslo", "lima"], [(0, 77)])
    assert frames.opened_welcome(welcome) == frames.Welcome(3, 4, 1, ("oslo", "lima"), ((0, 77),))
    names = frames.packed_names(["oslo", "lima"])
    assert frames.opened_names(names) == ("oslo", "lima") and frames.opened_names(b"") == ()
    for wrong in (names[:-1], names * 33, b"\4\x1b[2J", b"\0"):
        with pytest.raises(PacketError, match="the hub's list of waiting members cannot be read"):
            frames.opened_names(wrong)
    offset, receivers, chunk = frames.opened_data(frames.packed_data(1 << 33, [(1, 2), (3, 4)], b"abc"))
    assert (offset, receivers, bytes(chunk)) == (1 << 33, [(1, 2), (3, 4)], b"abc")
    assert frames.opened_passed(frames.packed_passed(2, 5, memoryview(b"abc"))) == (2, 5, b"abc")


@given(st.binary(max_size=200), st.integers(0, 21))
def test_arbitrary_bytes_are_a_frame_or_refused(raw, kind):
    tracemalloc.start()
    try:
        for given_bytes in (raw, bytes([kind, 4]) + raw):
            try:
                frame = frames.opened(given_bytes, 0, ALL, 4)
            except PacketError:
                continue
            assert frame.kind in ALL
        for read in (frames.opened_welcome, frames.opened_names, frames.opened_data, frames.opened_passed):
            try:
                read(raw)
            except PacketError:
                continue
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_request_or_refused(raw):
    for read in (opened_join, opened_request):
        with pytest.raises((PacketError, ConfigurationError, LinkError)):
            read(raw)


@given(st.text(max_size=200))
def test_arbitrary_text_is_a_token_or_refused(text):
    for given_text in (text, "tw1." + text):
        with pytest.raises(ConfigurationError, match="join token of"):
            Token.read(given_text)


def test_a_token_prints_without_its_secret():
    token = Token("hub.example", 1, 2, bytes(32), bytes(8), b"\x07" * 16)
    assert Token.read(f" {token}\n") == token and "7" not in repr(token) and str(token)[4:] not in repr(token)


@given(st.text())
def test_an_audit_log_entry_is_one_plain_line(text):
    line = plain(text)
    assert line.isascii() and line.isprintable() and len(line) <= 10 * 300


def test_strangers_cannot_fill_the_audit_log(tmp_path):
    log = AuditLog(tmp_path / "audit.txt")
    for number in range(5000):
        log.stranger("refused", f"192.0.2.{number % 250}:7\x1b[2J", "x" * 1000)
    lines = (tmp_path / "audit.txt").read_text().splitlines()
    assert len(lines) == LINES and all(len(line) < 500 and line.isprintable() for line in lines)
    log.flush()
    counted = (tmp_path / "audit.txt").read_text().splitlines()[LINES:]
    assert len(counted) == 1 and "counted 5,000 strangers" in counted[0] and "192.0.2." in counted[0]
    log.flush()
    assert len((tmp_path / "audit.txt").read_text().splitlines()) == LINES + 1


def test_names_are_sorted_by_their_numbers():
    names = ["replica-10", "replica-2", "oslo", "lima-2", "lima-10", "replica-2-a", "2", "10"]
    assert sorted(names, key=natural) == [
        "2",
        "10",
        "lima-2",
        "lima-10",
        "oslo",
        "replica-2",
        "replica-2-a",
        "replica-10",
    ]
