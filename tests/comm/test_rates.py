"""Rates that change over time: when a message has left, the files of traces, and links that follow one."""

from __future__ import annotations

import re

import pytest
import torch

from thinwire.comm import LinkedGroup, ThreadGroup, parse_link
from thinwire.comm.rates import RateTrace
from thinwire.comm.uplink import TracedLink, Uplink, check_link
from thinwire.errors import ConfigurationError


def stepped(trace: RateTrace, now: float, nbytes: int, step: float = 1e-3) -> float:
    """The definition: add up bits in small steps of time."""
    bits, ticks = 8.0 * nbytes, round(now / step)
    while bits > 1e-6:
        at = ticks * step % trace.period
        bits -= step * trace.rates[sum(begin <= at + 1e-9 for begin in trace.begins) - 1]
        ticks += 1
    return ticks * step


@pytest.mark.parametrize("period", [6.0, float("inf")])
def test_a_message_has_left_when_its_bits_have(period):
    trace = RateTrace((0.0, 1.0, 2.5, 4.0), (8e3, 0.0, 24e3, 4e3), 0.0, period)
    for now in (0.0, 0.7, 1.0, 1.7, 3.9, 5.5, 13.0):
        for nbytes in (1, 500, 1000, 4500, 6500, 20_000):
            assert trace.left(now, nbytes) == pytest.approx(stepped(trace, now, nbytes), abs=2e-3)
        assert trace.left(now, 0) == now
    assert trace.mean == (8e3 + 36e3 + 8e3) / 6 if period == 6.0 else trace.mean == 4e3


def test_a_message_of_whole_periods_leaves_with_the_last_bit():
    trace = RateTrace((0.0, 1.0), (8e3, 0.0), period=2.0)
    assert [trace.left(0.0, nbytes) for nbytes in (1000, 2000, 1001)] == [1.0, 3.0, 2.001]
    trace = RateTrace((0.0, 2.4, 4.4), (1 / 3, 0.0, 0.0), period=4.5)  # 80 bits are 100.00000000000001 periods
    assert trace.left(0.0, 10) == pytest.approx(99 * 4.5 + 2.4)


@pytest.mark.parametrize(
    "begins, rates, period",
    [((), (), 1.0), ((1.0,), (1.0,), 2.0), ((0.0, 0.0), (1.0, 1.0), 2.0), ((0.0, 2.0), (1.0, 1.0), 2.0),
     ((0.0, 1.0), (1.0,), 2.0), ((0.0,), (-1.0,), 2.0), ((0.0,), (float("inf"),), 2.0), ((0.0, 1.0), (0.0, 0.0), 2.0),
     ((0.0, 1.0), (1.0, 0.0), float("inf"))],
)  # fmt: skip
def test_impossible_traces_are_refused(begins, rates, period):
    with pytest.raises(ConfigurationError, match="times that ascend"):
        RateTrace(begins, rates, period=period)


def test_both_forms_of_files_are_read(tmp_path):
    path = tmp_path / "up.txt"
    path.write_text("# seconds, Mbit/s\n10.5, 2\n\n11.0 0.5  # slow\n12\t3\n")
    assert RateTrace.load(path, 0.1) == RateTrace((0.0, 0.5, 1.5), (2e6, 5e5, 3e6), 0.1, 2.5)
    path.write_text("0\n0\n99\n100\n350\n")  # milliseconds
    assert RateTrace.load(path) == RateTrace((0.0, 0.1, 0.2, 0.3), (360e3, 120e3, 0.0, 120e3), 0.0, 0.4)


@pytest.mark.parametrize(
    "text, says",
    [("", "has 0 times"), ("1\n", "has 1 times"), ("a b\n", "line 1 of .* is 'a b'. Each line is a time in seconds"),
     ("1 2\n3\n", "line 2"), ("1 2 3\n2 2 3\n", "line 1"), ("0 1\n1 -1\n", "line 2"), ("0 1\n1 nan\n", "line 2"),
     ("0 1\n2 1\n1 1\n", "line 3 .* is at 1, the one before at 2; times must ascend"), ("0 1\n0 1\n", "times must ascend"),
     ("1764357137000\n1764357137012\n", "ends at 1.76436e.12 ms; at most 1,000,000 s are needed"),
     ("5\n4\n", "times must ascend"), ("0 0\n1 0\n", "has no rate above 0"), (b"\xff\xfe\n", "cannot be read")],
)  # fmt: skip
def test_bad_files_are_named_with_their_line(text, says, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=says) as refused:
        RateTrace.load(path)
    assert str(path) in str(refused.value)


def test_links_of_traces_are_parsed_and_printed(tmp_path):
    path = tmp_path / "a,b.txt"
    path.write_text("0 1\n1 3\n")
    for text, delay in ((f"trace:{path}", 0.0), (f"trace:{path},30ms", 0.03)):
        check_link(text)
        link = parse_link(text)
        assert isinstance(link, TracedLink) and str(link) == text
        assert (link.bits_per_second, link.delay_seconds) == (2e6, delay)
    check_link("trace:absent.txt,1s")  # a finished run is read without its trace
    with pytest.raises(ConfigurationError, match=re.escape("the trace absent.txt cannot be read")):
        parse_link("trace:absent.txt,1s")
    for text in ("trace:", "trace:,1s"):
        with pytest.raises(ConfigurationError, match="a file is needed, such as"):
            check_link(text)


def test_an_uplink_follows_its_trace():
    """8 Mbit/s and 0.8 Mbit/s, a second each; messages wait for each other, and the trace began at 100 s."""
    link = TracedLink(4.4e6, 0.5, "up.txt", RateTrace((0.0, 1.0), (8e6, 8e5), period=2.0), began=100.0)
    uplink = Uplink(link)
    assert uplink.book(100.5, 550_000) == (100.5, pytest.approx(101.5 + 0.5))
    assert uplink.book(100.5, 50_000) == (101.5, pytest.approx(102.0 + 0.5))
    assert uplink.book(102.0, 500_000) == (102.0, pytest.approx(102.5 + 0.5))
    assert uplink.busy_seconds == pytest.approx(2.0)


def test_a_group_on_a_traced_link_delivers():
    """Nothing leaves in the first hour, but the trace began before it; the message comes whole."""
    link = TracedLink(4e9, 0.0, "up.txt", RateTrace((0.0, 3600.0), (0.0, 8e9)), began=-1e6)
    sender, receiver = (LinkedGroup(group, link) for group in ThreadGroup.create(2))
    message, room = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    transfers = [receiver.post(1, {}, {0: room}), sender.post(1, {1: message}, {})]
    for transfer in transfers:
        transfer.wait()
    assert torch.equal(room, message) and sender.busy_seconds == pytest.approx(64 * 8 / 8e9, abs=1e-9)
