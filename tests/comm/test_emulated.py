"""The emulated link: its text, its bookings, and that no message arrives early."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from pieces import over

from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup, ThreadGroup, parse_link
from thinwire.comm.uplink import Uplink
from thinwire.errors import ConfigurationError, LinkError


@pytest.mark.parametrize(
    "text, rate, delay",
    [
        ("50mbit,30ms", 50e6, 0.03),
        ("2.5mbit", 2.5e6, 0.0),
        ("1gbit,0.5s", 1e9, 0.5),
        ("300kbit,250us", 300e3, 250e-6),
        ("9600bit,1s", 9600.0, 1.0),
        ("1000mbit,0ms", 1e9, 0.0),
        ("0.1gbit,1500ms", 100e6, 1.5),
    ],
)
def test_link_texts_are_parsed_and_printed(text, rate, delay):
    link = Link.parse(text)
    assert link == Link(rate, delay)
    assert Link.parse(str(link)) == link
    assert parse_link(text) == link


@over("rate", [1.0, 0.3, 1 / 3, 1e6 / 7, 123456789.125, 2.5e11, 1e20])
@over("delay", [0.0, 0.03, 1 / 3, 1e-7 / 3, 12.0, 3e-5])
def test_every_link_parses_from_its_own_text(rate, delay):
    assert Link.parse(str(Link(rate, delay))) == Link(rate, delay)


def test_link_text_uses_the_largest_unit():
    assert str(Link(50e6, 0.03)) == "50mbit,30ms"
    assert str(Link(2.5e9)) == "2.5gbit"
    assert str(Link(100.0, 2.0)) == "100bit,2s"


@pytest.mark.parametrize(
    "text",
    ["", "50", "mbit", "50mb", "50Mbit/s", "50 mbit", "-5mbit", "0mbit", "0.0bit,3ms", "5mbit,", "5mbit,-3ms",
     "5mbit,3", "30ms", "30ms,5mbit", "5mbit,3ms,1", "nanmbit", "infbit", "1e6bit", "5mbit;3ms", "none,3ms", "٣mbit"],
)  # fmt: skip
def test_malformed_link_texts_are_refused(text):
    with pytest.raises(ConfigurationError, match="given"):
        parse_link(text)


@pytest.mark.parametrize(
    "rate, delay", [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, -0.1), (1.0, float("nan"))]
)
def test_impossible_links_are_refused(rate, delay):
    with pytest.raises(ConfigurationError, match="given"):
        Link(rate, delay)


def test_the_text_none_means_no_link():
    assert parse_link("none") is None


def test_an_uplink_queues_serialisations_and_overlaps_delays():
    """Serialisations queue; delays overlap; an idle link starts at once."""
    uplink = Uplink(Link(bits_per_second=8000.0, delay_seconds=2.0))
    assert uplink.book(100.0, 1000) == (100.0, 103.0)
    assert uplink.book(100.0, 500) == (101.0, 103.5)
    assert uplink.book(101.25, 250) == (101.5, 103.75)
    assert uplink.book(200.0, 1000) == (200.0, 203.0)
    assert uplink.busy_seconds == 2.75
    assert (uplink.waiting_seconds(200.0), uplink.waiting_seconds(200.75), uplink.waiting_seconds(300.0)) == (
        1.0,
        0.25,
        0.0,
    )
    assert Link(8000.0, 2.0).seconds(1000) == 3.0


def linked_pair(link):
    sender, receiver = ThreadGroup.create(2, 600.0)  # ends a hang
    return LinkedGroup(sender, link), receiver


def test_no_message_arrives_early_on_an_emulated_link():
    link = Link(bits_per_second=8e6, delay_seconds=0.05)  # 20 kB take 0.02 s
    sender, receiver = linked_pair(link)
    begin = time.monotonic()
    transfers = [sender.post(tag, {1: torch.full((20_000,), tag, dtype=torch.uint8)}, {}) for tag in range(3)]
    for tag in range(3):
        landing = torch.zeros(20_000, dtype=torch.uint8)
        receiver.post(tag, {}, {0: landing}).wait()
        assert time.monotonic() - begin >= 0.02 * (tag + 1) + 0.05
        assert torch.all(landing == tag)
    for tag, transfer in enumerate(transfers):
        transfer.wait()
        assert transfer.transfer_seconds == pytest.approx(0.07)
        assert 0.0 <= transfer.queued_seconds <= 0.02 * tag + 1e-9  # each was posted shortly after the first
    assert sender.busy_seconds == pytest.approx(0.06)
    sender.close()


def test_a_message_to_each_peer_is_serialised_for_each():
    groups = ThreadGroup.create(3)
    sender = LinkedGroup(groups[0], Link(8e6, 0.01))
    message = torch.zeros(10_000, dtype=torch.uint8)
    transfer = sender.post(0, {1: message, 2: message}, {})
    assert transfer.transfer_seconds == pytest.approx(0.03) and sender.busy_seconds == pytest.approx(0.02)
    transfer.wait()
    assert sender.post(1, {1: message[:0]}, {}).transfer_seconds == 0.0  # an empty message takes no time
    assert sender.busy_seconds == pytest.approx(0.02)
    sender.close()


def test_the_ledger_counts_what_left_the_link():
    ledger = Ledger()
    sender, receiver = ThreadGroup.create(2)
    linked = LinkedGroup(CountedGroup(sender, ledger), Link(8e3, 0.0))  # a byte takes 1 ms
    transfer = linked.post(0, {1: torch.zeros(20, dtype=torch.uint8)}, {}, "packet")
    linked.post(1, {1: torch.zeros(1_000_000, dtype=torch.uint8)}, {}, "packet")  # 1000 s
    transfer.wait()
    assert ledger.sent() == 20
    linked.close()
    assert ledger.sent() == 20
    receiver.close()


def test_close_wakes_waiters_for_the_uplink():
    sender, _ = linked_pair(Link(8.0, 0.0))
    transfer = sender.post(0, {1: torch.zeros(1000, dtype=torch.uint8)}, {})
    threading.Timer(0.02, sender.close).start()
    with pytest.raises(LinkError, match="replica 0 is closed"):
        transfer.wait()
    with pytest.raises(LinkError, match="closed"):
        sender.post(0, {}, {})


def test_an_error_of_the_carrier_reaches_the_waiter():
    sender, receiver = linked_pair(Link(1e9, 0.01))
    transfer = sender.post(0, {1: torch.zeros(10, dtype=torch.uint8)}, {})
    sender.group.close()  # the carrier below the link ends
    with pytest.raises(LinkError, match="group of replica 0 is closed"):
        transfer.wait()
    receiver.close()
    sender.close()
