"""The router of the benchmarks: the size of a packet on a wire, when it is delivered, and reports of drops. No root needed."""

from __future__ import annotations

import struct

import pytest
from router import QUEUE_SECONDS, Books, Router, wire_nbytes

from thinwire.comm import Link


def packet(nbytes, receiver=2, segment=0, network=b"\x0a\x61\x00", version=4):
    """Returns a virtio header and an IP packet of `nbytes` for 10.97.0.`receiver`, with TCP segments if `segment` is given."""
    virtio = struct.pack("<BBHHHH", 0, 1 if segment else 0, 52, segment, 0, 0)
    address = bytes([version << 4]) + bytes(15) + network + bytes([receiver])
    return virtio + address + bytes(nbytes - len(address))


@pytest.mark.parametrize(
    "nbytes, segment, on_the_wire",
    [(40, 0, 40), (1500, 0, 1500), (52 + 1448, 1448, 1500), (52 + 2 * 1448, 1448, 3000), (52 + 1449, 1448, 1501 + 52)],
)
def test_each_segment_has_its_own_headers(nbytes, segment, on_the_wire):
    assert wire_nbytes(packet(nbytes, segment=segment)) == on_the_wire


def test_packets_wait_for_their_senders_uplink_then_for_the_delay():
    books = Books(Link(8e6, 0.5), 3)  # 1000 bytes take 1 ms
    for receiver in (2, 3):
        books.take(10.0, 0, packet(1000, receiver))
    books.take(10.0, 2, packet(1000, 1))
    assert books.wait_seconds(10.0) == pytest.approx(0.501) and books.due(10.5) == []
    assert [receiver for receiver, _ in books.due(10.5011)] == [1, 0]
    assert [receiver for receiver, _ in books.due(10.6)] == [2]
    report = books.report()
    assert (report["packets"], report["nbytes"], report["dropped"]) == (3, 3000, 0)
    assert report["late_seconds"]["worst"] == pytest.approx(0.098)


def test_a_full_router_queue_drops_packets():
    books = Books(Link(8e5), 2)  # 1000 bytes take 10 ms
    for _ in range(20):
        books.take(0.0, 0, packet(1000))
    kept = int(QUEUE_SECONDS / 0.01)
    assert kept <= len(books.due(9.0)) <= kept + 1 and books.report()["dropped"] == 20 - books.packets


@pytest.mark.parametrize("strange", [{"receiver": 0}, {"receiver": 9}, {"network": b"\x0a\x00\x00"}, {"version": 6}])
def test_packets_for_unknown_addresses_are_skipped(strange):
    books = Books(Link(8e6), 2)
    books.take(0.0, 0, packet(100, **strange))
    assert books.due(1.0) == [] and books.packets == 0


def test_a_router_that_is_closed_says_what_it_saw():
    router = Router(Link(8e6))
    router.connect([], [], [])  # no namespaces, so no root
    assert router.shape([])["packets"] == 0
    router.close()
    assert router.said is not None and router.said["packets"] == 0
