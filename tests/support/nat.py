"""Machines behind routers that masquerade (NAT), and a cloud machine that cannot reach them first: links between network namespaces.

    nat = Masquerade()
    with Namespaces(3, nat) as space: ...    # namespace 0 is the cloud, at CLOUD; the others are homes, all at HOME

A TUN device in each namespace, and one thread that carries TCP over IPv4 between them. A packet that leaves a home gets the address
and a port of its router; a packet to a port from which nothing has left is dropped. As with Linux's masquerading, packets of a
connection that the router has forgotten open a new port; the other end knows no such connection, and resets it. A `silent`
router drops such packets instead, as stateful firewalls do, so that neither end is told. Links can be cut and healed.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

CLOUD, HOME, ROUTERS = "198.51.100.1", "192.168.1.2", "203.0.113"  # two of them are for documentation (RFC 5737)
DEVICE = "/dev/net/tun"
MTU = 1500
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_TCP, _SOURCE, _TARGET = 6, 12, 16  # the protocol number; the offsets of the two addresses
_FLAGS, _SYN = 13, 2  # the offset of the flags in TCP's header; the flag that opens a connection


class Masquerade:
    """Carries packets until `close`. `dropped` counts unsolicited packets to a home, `moves` how often the address of each home changed."""

    def __init__(self, silent: bool = False) -> None:
        self._silent, self.unknown = silent, 0  # dropped packets of forgotten connections
        self._silent_of: dict[int, bool] = {}  # routers that differ from that
        self.dropped, self.moves = 0, Counter[int]()
        self.lost, self.passed = Counter[int](), Counter[int]()  # packets of each home: on a cut link, and others
        self._cut: set[int] = set()  # homes
        self._one = threading.Lock()  # held while a packet is carried
        self._numbers = count()
        self.routers: list[bytes] = []  # their current addresses; the first is unused
        self._ports: dict[tuple[int, int], int] = {}  # (home, its port) -> port of its router
        self._back: dict[tuple[bytes, int], tuple[int, int]] = {}  # (router, its port) -> (home, its port)
        self._left: Counter[int] = Counter()  # bytes that left each home
        self._move_at: dict[int, int] = {}
        self._devices: list[int] = []
        self._wake: tuple[int, ...] = ()
        self._thread: threading.Thread | None = None

    def connect(self, namespaces: Sequence[str], interfaces: Sequence[str], addresses: Sequence[str]) -> None:
        """Makes the devices and starts to carry packets; `addresses` are not used."""
        self._wake = os.pipe()
        for place, (namespace, interface) in enumerate(zip(namespaces, interfaces)):
            file = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._devices.append(file)
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _TUN_WITHOUT_HEADER))
            for command in (
                f"ip link set {interface} netns {namespace}",
                f"ip -n {namespace} link set {interface} mtu {MTU} txqueuelen 1000 up",
                f"ip -n {namespace} address add {HOME if place else CLOUD}/32 dev {interface}",
                f"ip -n {namespace} route add {'default' if place else f'{ROUTERS}.0/24'} dev {interface}",
            ):
                subprocess.run(command.split(), check=True)
            self.routers.append(socket.inet_aton(f"{ROUTERS}.{place}"))
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def move_after(self, home: int, nbytes: int) -> None:
        """Once `nbytes` have left `home`, gives its router a new address and no memory of connections. Call it before any have left."""
        self._move_at[home] = nbytes

    def move(self, home: int) -> None:
        """Gives the router of `home` a new address and no memory of connections."""
        with self._one:
            self._move(home)

    def forget(self, home: int, silent: bool = False) -> None:
        """Lets the router of `home` forget all connections. From now on it is `silent`, or resets such connections."""
        with self._one:
            self._silent_of[home] = silent
            self._forget(home)

    def cut(self, homes: Sequence[int]) -> None:
        """Drops all packets from and to these homes, and no others."""
        with self._one:
            self._cut = set(homes)

    def close(self) -> None:
        """Ends the thread; the devices disappear with it."""
        if self._thread:
            os.write(self._wake[1], b"x")
            self._thread.join()
        for file in (*self._devices, *self._wake):
            os.close(file)
        self._devices, self._wake, self._thread = [], (), None

    def _carry(self) -> None:
        while True:
            readable, _, _ = select.select([*self._devices, self._wake[0]], [], [])
            if self._wake[0] in readable:
                return
            for file in readable:
                place = self._devices.index(file)
                with suppress(BlockingIOError):
                    packet = bytearray(os.read(file, MTU))
                    if packet[0] >> 4 == 4 and packet[9] == _TCP:
                        with self._one:
                            self._into_home(packet) if place == 0 else self._out_of_home(place, packet)

    def _out_of_home(self, home: int, packet: bytearray) -> None:
        if not self._passes(home):
            return
        self._left[home] += len(packet)
        if self._left[home] > self._move_at.get(home, 1 << 62):
            del self._move_at[home]
            self._move(home)
        (port,) = struct.unpack_from("!H", packet, ports := 4 * (packet[0] & 15))
        if (home, port) not in self._ports:
            if self._silent_of.get(home, self._silent) and not packet[ports + _FLAGS] & _SYN:
                self.unknown += 1
                return
            self._ports[home, port] = 20_000 + next(self._numbers) % 40_000
            self._back[self.routers[home], self._ports[home, port]] = home, port
        _rewrite(packet, _SOURCE, self.routers[home], ports, self._ports[home, port])
        self._hand_over(0, packet)

    def _into_home(self, packet: bytearray) -> None:
        ports = 4 * (packet[0] & 15) + 2
        router, (port,) = bytes(packet[_TARGET : _TARGET + 4]), struct.unpack_from("!H", packet, ports)
        if (router, port) not in self._back or router not in self.routers:
            self.dropped += 1
            return
        home, port = self._back[router, port]
        if not self._passes(home):
            return
        _rewrite(packet, _TARGET, socket.inet_aton(HOME), ports, port)
        self._hand_over(home, packet)

    def _passes(self, home: int) -> bool:
        """Counts a packet, and says whether the link of `home` carries it."""
        (self.lost if home in self._cut else self.passed)[home] += 1
        return home not in self._cut

    def _hand_over(self, place: int, packet: bytearray) -> None:
        with suppress(OSError):  # a namespace that is being removed accepts nothing
            os.write(self._devices[place], packet)

    def _move(self, home: int) -> None:
        self.moves[home] += 1
        self.routers[home] = socket.inet_aton(f"{ROUTERS}.{10 * (self.moves[home] % 24) + home}")
        self._forget(home)

    def _forget(self, home: int) -> None:
        self._back = {key: there for key, there in self._back.items() if there[0] != home}
        self._ports = {key: port for key, port in self._ports.items() if key[0] != home}


def _rewrite(packet: bytearray, at: int, address: bytes, port_at: int, port: int) -> None:
    """Replaces an address and a port in a packet, and updates both checksums (RFC 1624)."""
    tcp = 4 * (packet[0] & 15) + 16
    old, new = bytes(packet[at : at + 4] + packet[port_at : port_at + 2]), address + struct.pack("!H", port)
    packet[at : at + 4], packet[port_at : port_at + 2] = new[:4], new[4:]
    for check, words in ((10, 2), (tcp, 3)):
        total = sum(struct.unpack_from(f"!{words}H", new))
        total += sum(
            0xFFFF ^ word for word in (*struct.unpack_from(f"!{words}H", old), *struct.unpack_from("!H", packet, check))
        )
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into("!H", packet, check, 0xFFFF ^ total)
