"""Predicted = counted = what the kernel's counters saw, in network namespaces. Linux and root; else skipped, saying why.

The model, for one replica that sends P bytes in S messages and receives Q bytes in R messages, over veth with an MTU of 1500 and
segmentation in the kernel's TCP, so that the interface counts real segments:

* a segment: up to 1448 bytes, behind 66 of Ethernet (14), IP (20) and TCP with timestamps (32)
* gloo: 48 bytes before each message, 48 to a sender to say that its receiver is ready; at most 48 more to a receiver that is not
* at least: all of that in full segments, every ACK on the back of data
* at most: each message of gloo ends a segment, and every segment received is acknowledged by one of our own

Nothing is lost on veth, so nothing is sent twice. What an idle second carries (the store's traffic, ARP) is subtracted: it is nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from namespaces import Namespaces, missing

SEGMENT, HEADERS, GLOO = 1448, 66, 48
REASON = missing()


def segments(nbytes: int) -> int:
    return -(-nbytes // SEGMENT)


def least(nbytes: int, sent: int, received: int) -> int:
    """Bytes at the interface for `nbytes` in `sent` messages, with `received` messages coming the other way."""
    framed = nbytes + GLOO * (sent + received)
    return framed + HEADERS * segments(framed)


def most(nbytes: int, sent: int, received: int, nbytes_received: int) -> int:
    framed, incoming = nbytes + GLOO * (2 * sent + received), nbytes_received + GLOO * (2 * received + sent)
    own = segments(framed) + 3 * sent + received
    acknowledged = segments(incoming) + 3 * received + sent
    return framed + HEADERS * (own + acknowledged)


def total(said: dict[str, Any], way: str, field: str) -> int:
    """Of all purposes and peers, since the line on stdin."""
    after, before = (
        sum(count[field] for peers in said[when][way].values() for count in peers.values())
        for when in ("after", "before")
    )
    return after - before


class Bench:
    """Replicas in namespaces, told what to do together."""

    def __init__(self, space: Namespaces, size: int) -> None:
        self.space, self.size = space, size
        for namespace, interface in zip(space.namespaces, space.interfaces):
            device = ["ip", "-n", namespace, "link", "set", interface, "gso_max_segs", "1"]
            subprocess.run(device, check=True)  # TCP cuts segments itself, so the interface counts what a wire would
        program = [sys.executable, str(Path(__file__).with_name("wire_replica.py"))]
        self.running = [
            space.start(rank, [*program, str(rank), str(size), space.addresses[0], "29500"]) for rank in range(size)
        ]

    def do(self, what: str) -> tuple[list[dict[str, Any]], list[int], list[int]]:
        """What each said, and what its interface sent and received meanwhile."""
        before = [self.space.counters(rank) for rank in range(self.size)]
        for process in self.running:
            print(what, file=process.stdin, flush=True)
        lines = [process.stdout.readline() if process.stdout else "" for process in self.running]
        assert all(lines), "a replica ended early"
        if what == "rounds":
            self.do("idle")  # the last ACKs
        after = [self.space.counters(rank) for rank in range(self.size)]
        sent, received = (
            [b[name] - a[name] for a, b in zip(before, after, strict=True)] for name in ("tx_bytes", "rx_bytes")
        )
        return [json.loads(line) for line in lines], sent, received


@pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_predicted_is_counted_is_what_the_kernel_saw(size):
    with Namespaces(size) as space:
        limit = threading.Timer(60.0, space.end_processes)
        limit.start()
        try:
            bench = Bench(space, size)
            bench.do("idle")  # whoever joins is done
            _, idle, _ = bench.do("idle")
            said, sent, received = bench.do("rounds")
        finally:
            limit.cancel()
    assert max(idle) < 1000
    # No segment was lost on the way; the bridge's own multicast (70 bytes now and then) is received and not sent.
    assert 0 <= sum(received) - sum(sent) < SEGMENT
    for rank, replica in enumerate(said):
        nbytes, messages = total(replica, "sent", "nbytes"), total(replica, "sent", "messages")
        votes = replica["after"]["sent"]["vote"].values()
        assert nbytes == replica["predicted"] + sum(vote["nbytes"] for vote in votes)
        came, arrived = total(replica, "received", "nbytes"), total(replica, "received", "messages")
        seen = sent[rank] - 2 * idle[rank]  # of two seconds or so
        assert least(nbytes, messages, arrived) <= seen <= most(nbytes, messages, arrived, came)
        assert most(nbytes, messages, arrived, came) < 1.1 * nbytes  # the model says something
