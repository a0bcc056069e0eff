"""A router in user space that gives every namespace an uplink with a rate and a delay: what `tc tbf` cannot, and netem can where it exists.

    with Namespaces(3, Router(Link.parse("100mbit,40ms"))) as space: ...

`shape` gives every end a link of its own while it runs.

One TUN device in each namespace, one Python process that carries packets between them. A packet waits for its sender's uplink, occupies
it for as long as its bytes take at the rate (IP and TCP headers included; an MTU of 1500), and is handed over `delay_seconds` after its
last bit left, never earlier. When more than `QUEUE_SECONDS` of bytes wait, the packet is dropped. Downlinks have no limit.

The kernel is told that the device segments and checks by itself, so what comes is up to 64 kB in one read, with the size of its segments
beside it; the headers that each segment would have are counted. That is why Python is fast enough (about 1 Gbit/s on a core here):
how late the router was is in what it says when it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from thinwire.comm import Link
from thinwire.comm.uplink import Uplink

QUEUE_SECONDS = 0.1
MTU = 1500
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02  # checksums, TCP over IPv4
_VNET = struct.Struct("<BBHHHH")  # flags, kind of segmentation, length of headers, size of segments, two for checksums
_NETWORK = "10.97.0.0/24"
_READ = _VNET.size + 65535
_TIMERSLACK = 29  # of prctl: how much later than asked a sleep may end


@dataclass
class Router:
    """Joins namespaces by one process; `said` is what it reported of itself in the end."""

    link: Link
    congestion: str = "cubic"  # what TCP does there; Linux's default
    said: dict[str, Any] | None = None
    process: subprocess.Popen[str] | None = None

    def connect(self, namespaces: Sequence[str], interfaces: Sequence[str], addresses: Sequence[str]) -> None:
        """Make the devices, in the namespaces, and start carrying. Raises `RuntimeError`."""
        asked = {
            "link": str(self.link),
            "congestion": self.congestion,
            "namespaces": namespaces,
            "interfaces": interfaces,
            "addresses": addresses,
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the router could not start; its own message says why.")

    def shape(self, links: Sequence[Link]) -> dict[str, Any]:
        """From now on end number i sends over `links[i]`. Returns the report of the time before; raises `RuntimeError`."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        print(
            json.dumps([[link.bits_per_second, link.delay_seconds] for link in links]),
            file=self.process.stdin,
            flush=True,
        )
        told = self.process.stdout.readline()
        if not told:
            raise RuntimeError("the router has ended; its own message says why.")
        report: dict[str, Any] = json.loads(told)
        return report

    def close(self) -> None:
        """End the process; with it its devices go."""
        if self.process is not None:
            told, _ = self.process.communicate(timeout=10)  # its input ends, and it says what it saw
            self.said = json.loads(told) if told.strip() else None
            self.process = None


class Books:
    """One uplink for each sender, and what is on its way to whom."""

    def __init__(self, link: Link, count: int) -> None:
        self.uplinks = [Uplink(link) for _ in range(count)]
        self.packets = self.nbytes = self.dropped = 0
        self._late: list[float] = []  # after it was due, each packet
        self._ways: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()  # of packets that are due at one instant
        self._cpu = 0.0  # at the last `shape`

    def shape(self, links: Sequence[Link]) -> dict[str, Any]:
        """Give each uplink its link, and count from zero. Returns the report of the time before."""
        report = self.report()
        for uplink, link in zip(self.uplinks, links, strict=True):
            uplink.link = link
        self.nbytes = self.dropped = self.packets = 0
        self._late.clear()
        self._cpu = time.process_time()
        return report

    def take(self, now: float, sender: int, packet: bytes) -> None:
        """Book a packet that left its namespace, with the virtio header before it."""
        if packet[_VNET.size] >> 4 != 4 or packet[_VNET.size + 16 : _VNET.size + 19] != b"\x0a\x61\x00":
            return  # not for one of us: IPv6's neighbour talk
        receiver = packet[_VNET.size + 19] - 1
        if not 0 <= receiver < len(self.uplinks):
            return
        nbytes = wire_nbytes(packet)
        uplink = self.uplinks[sender]
        if uplink.waiting_seconds(now) > QUEUE_SECONDS:
            self.dropped += 1
            return
        _, due = uplink.book(now, nbytes)
        self.packets += 1
        self.nbytes += nbytes
        heapq.heappush(self._ways, (due, next(self._order), receiver, packet))

    def wait_seconds(self, now: float) -> float:
        """Until a packet is due; a look now and then when there is none."""
        return max(0.0, self._ways[0][0] - now) if self._ways else 0.1

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """What is to be handed over by now: to whom, and what."""
        found = []
        while self._ways and self._ways[0][0] <= now:
            due, _, receiver, packet = heapq.heappop(self._ways)
            self._late.append(now - due)
            found.append((receiver, packet))
        return found

    def report(self) -> dict[str, Any]:
        late = sorted(self._late) or [0.0]
        ranks = {"median": 0.5, "p99": 0.99, "worst": 1.0}
        return {
            "packets": self.packets, "nbytes": self.nbytes, "dropped": self.dropped,
            "late_seconds": {name: late[int(share * (len(late) - 1))] for name, share in ranks.items()},
            "cpu_seconds": time.process_time() - self._cpu, "queue_seconds": QUEUE_SECONDS, "mtu": MTU,
        }  # fmt: skip


def wire_nbytes(packet: bytes) -> int:
    """Bytes of the IP packets that a packet with a virtio header before it is on a real wire: one header for each segment."""
    _, kind, headers, segment, _, _ = _VNET.unpack_from(packet)
    whole = len(packet) - _VNET.size
    if not kind or not segment:
        return whole
    return whole + headers * (max(1, -(-(whole - headers) // segment)) - 1)


def _device(namespace: str, interface: str, address: str, congestion: str) -> int:
    """A TUN device in `namespace`; the file that its packets are read from."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _OFFLOADS)
    for command in (
        f"ip link set {interface} netns {namespace}",
        f"ip -n {namespace} link set {interface} mtu {MTU} txqueuelen 1000 up",
        f"ip -n {namespace} address add {address}/24 dev {interface} noprefixroute",
        f"ip -n {namespace} route add {_NETWORK} dev {interface} src {address} congctl {congestion}",
    ):
        subprocess.run(command.split(), check=True)
    return file


def main() -> None:
    asked = json.loads(sys.argv[1])
    books = Books(Link.parse(asked["link"]), len(asked["namespaces"]))
    ctypes.CDLL(None).prctl(_TIMERSLACK, 1)  # nanosecond
    places = zip(asked["namespaces"], asked["interfaces"], asked["addresses"], strict=True)
    devices = [_device(*place, asked["congestion"]) for place in places]
    orders, over = sys.stdin.fileno(), False
    print("ready", flush=True)
    while not over:
        readable, _, _ = select.select([*devices, orders], [], [], books.wait_seconds(time.monotonic()))
        for file in readable:
            if file == orders:
                if not (order := sys.stdin.readline()):
                    over = True  # who started it ends it, or is gone
                    break
                print(json.dumps(books.shape([Link(*pair) for pair in json.loads(order)])), flush=True)
                continue
            sender = devices.index(file)
            for _ in range(16):  # then look at what is due
                try:
                    packet = os.read(file, _READ)
                except BlockingIOError:
                    break
                books.take(time.monotonic(), sender, packet)
        for receiver, packet in books.due(time.monotonic()):
            with suppress(OSError):  # a namespace that is going takes nothing
                os.write(devices[receiver], packet)
    with suppress(BrokenPipeError):
        print(json.dumps(books.report()), flush=True)


if __name__ == "__main__":
    main()
