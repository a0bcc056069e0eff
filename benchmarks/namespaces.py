"""Two network namespaces joined by one shaped link: emulated, on Linux, as root.

    with Namespaces() as link:
        link.shape(20e6)                                  # bits per second, in both directions
        process = link.start(0, ["python", "replica.py"])  # runs in namespace 0, on core 0

A veth pair with an end in each namespace; `tc tbf` on both ends delays what leaves. The token bucket counts Ethernet
frames, headers included. MTU 1500, no added delay, a queue of 0.1 s, TCP's congestion control as the kernel has it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import IO, Self

QUEUE_SECONDS = 0.1
_MTU = 1500
_numbers = count()


def missing() -> str | None:
    """Why this machine cannot make namespaces, in words; None if it can."""
    programs = [program for program in ("ip", "tc", "taskset") if shutil.which(program) is None]
    if programs:
        return f"no {', '.join(programs)} here; install iproute2 and util-linux."
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo, or in a container with NET_ADMIN and SYS_ADMIN."
    probe = subprocess.run(["ip", "netns", "add", name := f"thinwire-{os.getpid()}-probe"], capture_output=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None if probe.returncode == 0 else f"`ip netns add` failed: {probe.stderr.decode().strip()}."


class Namespaces:
    """The namespaces, the link between them and the processes started there; all of it is gone after the `with`."""

    addresses = ("10.97.0.1", "10.97.0.2")

    def __init__(self) -> None:
        number = next(_numbers)
        self.namespaces = tuple(f"thinwire-{os.getpid()}-{number}-{end}" for end in "ab")
        self.interfaces = tuple(f"tw{os.getpid()}x{number}{end}" for end in "ab")  # at most 15 characters
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        atexit.register(self.close)
        try:
            for namespace in self.namespaces:
                _call("ip", "netns", "add", namespace)
            ends = [("name", i, "netns", n) for i, n in zip(self.interfaces, self.namespaces)]
            _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for namespace, interface, address in zip(self.namespaces, self.interfaces, self.addresses):
                _call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", interface)
                _call("ip", "-n", namespace, "link", "set", interface, "mtu", str(_MTU), "up")
                _call("ip", "-n", namespace, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shape(self, bits_per_second: float | None) -> None:
        """Let both ends send at `bits_per_second`; None takes the limit away."""
        for namespace, interface in zip(self.namespaces, self.interfaces):
            device = ("dev", interface, "root")
            if bits_per_second is None:
                subprocess.run(["tc", "-n", namespace, "qdisc", "delete", *device], capture_output=True)
                continue
            burst = int(max(10 * _MTU, bits_per_second / 8 * 0.004))  # what an idle link may send at once
            limits = f"rate {bits_per_second:.0f}bit burst {burst} latency {QUEUE_SECONDS * 1e3:.0f}ms"
            _call("tc", "-n", namespace, "qdisc", "replace", *device, "tbf", *limits.split())

    def start(
        self, end: int, command: Sequence[str], core: int | None = None, errors: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Run `command` in namespace `end` (on one `core`, if given), with text pipes; its stderr goes to `errors`.

        It ends with this object at the latest. gloo is told which interface to use.
        """
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[end], *pinned, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": self.interfaces[end]},
            start_new_session=True,  # Ctrl-C is for the parent, which ends its processes itself
        )
        self._processes.append(process)
        return process

    def end_processes(self) -> None:
        """Kill what `start` started and is still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def close(self) -> None:
        """End the processes and delete both namespaces, the link with them. Idempotent."""
        self.end_processes()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        atexit.unregister(self.close)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
