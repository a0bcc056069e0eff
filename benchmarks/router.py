"""A router in user space: sites in network namespaces, joined by links with a rate and a delay. Emulated; Linux, root.

    with Router([Link(20e6, 0.010), Link(5e6, 0.025)]) as router:  # one uplink a site
        process = router.start(0, ["python", "replica.py"])         # runs in site 0

Every site is a namespace with a TUN device whose other end this process holds. A packet from site a leaves when a's
uplink is free (rate, first in first out, bytes of IP), and is handed to its destination a's delay later. So the round trip
of two sites is the sum of their delays. `netem` would do it in the kernel, where the kernel has it. Queues are long: nothing
is dropped. Python carries some 100 Mbit/s in all.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from namespaces import missing as no_namespaces

from thinwire.group import Link

_MTU = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_numbers = count()


def missing() -> str | None:
    """Why this machine cannot do it, in words; None if it can."""
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun here."
    return no_namespaces()


class Router:
    """Sites, their uplinks and the processes started in them; all of it is gone after the `with`."""

    def __init__(self, uplinks: Sequence[Link]) -> None:
        self.uplinks = list(uplinks)
        number = next(_numbers)
        self.namespaces = [f"thinwire-{os.getpid()}-r{number}-{site}" for site in range(len(uplinks))]
        self.interfaces = [f"twr{os.getpid() % 100000}x{number}{site}" for site in range(len(uplinks))]
        self.addresses = [f"10.98.0.{site + 1}" for site in range(len(uplinks))]
        self._tuns: list[int] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._route, name="router", daemon=True)

    def __enter__(self) -> Self:
        try:
            for namespace, interface, address in zip(self.namespaces, self.interfaces, self.addresses):
                tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                self._tuns.append(tun)
                fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", interface.encode(), _IFF_TUN | _IFF_NO_PI))
                for command in (
                    f"ip netns add {namespace}",
                    f"ip link set {interface} netns {namespace}",
                    f"ip -n {namespace} address add {address}/24 dev {interface}",
                    f"ip -n {namespace} link set {interface} mtu {_MTU} txqueuelen 10000 up",
                    f"ip -n {namespace} link set lo up",
                ):
                    done = subprocess.run(command.split(), capture_output=True, text=True)
                    if done.returncode:
                        raise RuntimeError(f"{command}: {done.stderr.strip()}")
        except BaseException:
            self._clear()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._stop, b".")
        self._thread.join()
        self._clear()

    def start(self, site: int, command: Sequence[str]) -> subprocess.Popen[str]:
        """Run `command` in `site`, with text pipes. gloo is told which interface to use."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[site], *command],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interfaces[site]},
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _route(self) -> None:
        """Take packets in, and hand each over when it is due."""
        site_of = {bytes(map(int, address.split("."))): site for site, address in enumerate(self.addresses)}
        source_of = {tun: site for site, tun in enumerate(self._tuns)}
        free_at = [0.0] * len(self._tuns)
        due: list[tuple[float, int, int, bytes]] = []
        order = count()
        while True:
            wait = max(0.0, due[0][0] - time.perf_counter()) if due else None
            # `select` rounds up to milliseconds on some systems: the last one is spent looking
            ready, _, _ = select.select([self._wake, *self._tuns], [], [], wait if wait is None or wait > 1e-3 else 0)
            if self._wake in ready:
                return
            now = time.perf_counter()
            for tun in ready:
                site = source_of[tun]
                for _ in range(64):
                    try:
                        packet = os.read(tun, 65536)
                    except BlockingIOError:
                        break
                    target = site_of.get(packet[16:20])  # IPv4's destination
                    if packet[0] >> 4 != 4 or target is None:
                        continue
                    link = self.uplinks[site]
                    free_at[site] = max(now, free_at[site]) + link.serialisation_seconds(len(packet))
                    heapq.heappush(due, (free_at[site] + link.delay_seconds, next(order), target, packet))
            now = time.perf_counter()
            while due and due[0][0] <= now:
                _, _, target, packet = heapq.heappop(due)
                try:
                    os.write(self._tuns[target], packet)
                except OSError:  # the site's queue is full: as on a real link, the packet is lost
                    continue

    def _clear(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for tun in self._tuns:
            os.close(tun)
        self._tuns.clear()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        for end in (self._wake, self._stop):
            os.close(end)
