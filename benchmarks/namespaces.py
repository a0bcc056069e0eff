"""Network namespaces joined by shaped links: emulated, on Linux, as root.

    bridge = Bridge()
    with Namespaces(2, bridge) as space:
        bridge.shape(20e6)                                  # bits per second that each may send
        process = space.start(0, ["python", "replica.py"])  # runs in namespace 0

A `Bridge` has a rate alone: `tc tbf`, which counts Ethernet frames including headers. The MTU is 1500; there is no added delay, a
queue of 0.1 s, and TCP is cubic, Linux's default, also on machines that have another. router.py has a rate and a delay.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from ipaddress import ip_interface
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

QUEUE_SECONDS = 0.1
MTU = 1500
CONGESTION = "cubic"  # bbr, for one, takes ACKs that wait behind the other way's bulk for a slower link, and sends less
_numbers = count()


def missing() -> str | None:
    """Returns why this machine cannot make namespaces; None if it can."""
    programs = [program for program in ("ip", "tc", "taskset") if shutil.which(program) is None]
    if programs:
        return f"no {', '.join(programs)} here; install iproute2 and util-linux."
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo, or in a container with NET_ADMIN and SYS_ADMIN."
    probe = subprocess.run(["ip", "netns", "add", name := f"thinwire-{os.getpid()}-probe"], capture_output=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None if probe.returncode == 0 else f"`ip netns add` failed: {probe.stderr.decode().strip()}."


class Wires(Protocol):
    """Joins the namespaces: it makes an interface with an address in each."""

    def connect(self, namespaces: Sequence[str], interfaces: Sequence[str], addresses: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class Bridge:
    """A veth pair from each namespace to a bridge in a further one; `tc tbf` limits what leaves a namespace."""

    def __init__(self) -> None:
        self._ends: list[tuple[str, str]] = []
        self._hub = ""

    def connect(self, namespaces: Sequence[str], interfaces: Sequence[str], addresses: Sequence[str]) -> None:
        """Makes the interfaces. Raises `RuntimeError`."""
        self._ends, self._hub = list(zip(namespaces, interfaces)), f"{namespaces[0]}-hub"
        _call("ip", "netns", "add", self._hub)
        _call("ip", "-n", self._hub, "link", "add", "hub", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        _call("ip", "-n", self._hub, "link", "set", "hub", "mtu", str(MTU), "up")
        for number, (namespace, interface, address) in enumerate(zip(namespaces, interfaces, addresses)):
            far = ("peer", "name", f"port{number}", "netns", self._hub)
            _call("ip", "link", "add", "name", interface, "netns", namespace, "type", "veth", *far)
            _call("ip", "-n", self._hub, "link", "set", f"port{number}", "mtu", str(MTU), "master", "hub", "up")
            _call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", interface)
            _call("ip", "-n", namespace, "link", "set", interface, "mtu", str(MTU), "up")
            network = ip_interface(f"{address}/24").network
            route = ("route", "replace", str(network), "dev", interface, "src", address, "congctl", CONGESTION)
            _call("ip", "-n", namespace, *route)

    def shape(self, bits_per_second: float | None) -> None:
        """Lets every namespace send at `bits_per_second`; None removes the limit."""
        for namespace, interface in self._ends:
            device = ("dev", interface, "root")
            if bits_per_second is None:
                subprocess.run(["tc", "-n", namespace, "qdisc", "delete", *device], capture_output=True)
                continue
            burst = int(max(10 * MTU, bits_per_second / 8 * 0.004))  # what an idle link may send at once
            limits = f"rate {bits_per_second:.0f}bit burst {burst} latency {QUEUE_SECONDS * 1e3:.0f}ms"
            _call("tc", "-n", namespace, "qdisc", "replace", *device, "tbf", *limits.split())

    def close(self) -> None:
        """Deletes the bridge; the interfaces disappear with it."""
        if self._hub:
            subprocess.run(["ip", "netns", "delete", self._hub], capture_output=True)


class Namespaces:
    """`count` namespaces, the links between them and the processes started there; all of it is removed after the `with`."""

    def __init__(self, count: int = 2, wires: Wires | None = None) -> None:
        number = next(_numbers)
        self.wires = Bridge() if wires is None else wires
        self.namespaces = tuple(f"thinwire-{os.getpid()}-{number}-{end}" for end in range(count))
        self.interfaces = tuple(f"tw{os.getpid()}x{number}n{end}" for end in range(count))  # at most 15 characters
        self.addresses = tuple(f"10.97.0.{end + 1}" for end in range(count))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        atexit.register(self.close)
        try:
            for namespace in self.namespaces:
                _call("ip", "netns", "add", namespace)
                _call("ip", "-n", namespace, "link", "set", "lo", "up")
                self.tell(namespace, "net.ipv6.conf.all.disable_ipv6=1")  # neighbour discovery would add traffic
            self.wires.connect(self.namespaces, self.interfaces, self.addresses)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tell(self, namespace: str, *settings: str) -> None:
        """Sets a kernel parameter in a namespace, such as net.ipv4.tcp_congestion_control=cubic."""
        for setting in settings:
            name, _, value = setting.partition("=")
            path = Path("/proc/sys", *name.split("."))
            _call("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > {path}")

    def counters(self, end: int) -> dict[str, int]:
        """Returns the kernel's counters of the interface of namespace `end`: tx_bytes, rx_bytes, tx_packets, rx_packets, ..."""
        shown = _call(
            "ip", "-n", self.namespaces[end], "-json", "-statistics", "link", "show", "dev", self.interfaces[end]
        )
        stats = json.loads(shown)[0]["stats64"]
        return {f"{way}_{what}": count for way in ("tx", "rx") for what, count in stats[way].items()}

    def start(
        self, end: int, command: Sequence[str], core: int | None = None, errors: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Runs `command` in namespace `end` (on one `core`, if given), with text pipes; its stderr goes to `errors`.

        The process ends with this object at the latest. gloo is told which interface to use.
        """
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[end], *pinned, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interfaces[end]},
            start_new_session=True,  # Ctrl-C goes to the parent, which ends its processes itself
        )
        self._processes.append(process)
        return process

    def end_processes(self) -> None:
        """Kills what `start` started and is still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def close(self) -> None:
        """Ends the processes and deletes the namespaces with their links. Idempotent."""
        self.end_processes()
        self.wires.close()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        atexit.unregister(self.close)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
