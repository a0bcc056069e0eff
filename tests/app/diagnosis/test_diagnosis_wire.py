"""The fault matrix over real sockets: four gloo processes in network namespaces. It needs Linux and root; otherwise it is skipped.

Links are shaped to 40 Mbit/s (`tc tbf`). The fault slows one link, egress or ingress to a tenth (`tc htb`, one class for each peer).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import Bridge, Namespaces, missing
from run_folders import read_events

from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.diagnosis import diagnose

REASON = missing()
RATE, SIZE, HEALTHY, MORE = 40e6, 4, 12, 14
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")]


class Bench:
    """Four replicas that train. `rounds()` returns the number of rounds that replica 0 has ended."""

    def __init__(self, space: Namespaces, folder: Path) -> None:
        self.space, self.folder = space, folder
        program = [sys.executable, str(Path(__file__).parents[2] / "support" / "wire_diagnosed.py")]
        # Otherwise htb passes a large segment in one piece.
        for namespace, interface in zip(space.namespaces, space.interfaces):
            subprocess.run(["ip", "-n", namespace, "link", "set", interface, "gso_max_segs", "1"], check=True)
        quiet = (folder / "stderr").open("w")
        self.running = [
            space.start(rank, [*program, str(rank), str(SIZE), space.addresses[0], str(folder)], errors=quiet)
            for rank in range(SIZE)
        ]

    def rounds(self) -> int:
        path = self.folder / "events" / "replica-0.jsonl"
        return sum(event["event"] == "wire" for event in read_events(path)) if path.exists() else 0

    def wait(self, done: Callable[[], bool], seconds: float = 600.0) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, f"{self.rounds()} rounds within {seconds} s"
            time.sleep(0.05)

    def tell(self, rank: int, what: str) -> None:
        print(what, file=self.running[rank].stdin, flush=True)

    def tc(self, namespace: str, *command: str) -> None:
        subprocess.run(["tc", "-n", namespace, *command], check=True, capture_output=True)

    def slow_egress(self, rank: int) -> None:
        self._shape(self.space.namespaces[rank], self.space.interfaces[rank])

    def slow_ingress(self, rank: int) -> None:
        self._shape(f"{self.space.namespaces[0]}-hub", f"port{rank}")

    def _shape(self, namespace: str, device: str) -> None:
        self.tc(
            namespace,
            "qdisc",
            "replace",
            "dev",
            device,
            "root",
            "tbf",
            *f"rate {RATE / 10:.0f}bit burst 15000 latency 200ms".split(),
        )

    def slow_link(self, sender: int, receiver: int, bits_per_second: float = RATE / 10) -> None:
        namespace, device = self.space.namespaces[sender], ("dev", self.space.interfaces[sender])
        self.tc(namespace, "qdisc", "replace", *device, "root", "handle", "1:", "htb", "default", "10")
        for number, rate in ((10, RATE), (20, bits_per_second)):
            shape = f"htb rate {rate:.0f}bit burst 15000 quantum 3000".split()
            self.tc(namespace, "class", "replace", *device, "parent", "1:", "classid", f"1:{number}", *shape)
        match = f"u32 match ip dst {self.space.addresses[receiver]}/32 flowid 1:20".split()
        self.tc(namespace, "filter", "replace", *device, "parent", "1:", "protocol", "ip", "prio", "1", *match)

    def cut(self, a: int, b: int) -> None:
        self.slow_link(a, b, 8.0)
        self.slow_link(b, a, 8.0)


CASES: dict[str, tuple[Callable[[Bench], None], str | None, set[str]]] = {
    "healthy": (lambda bench: None, None, set()),
    "stopped before entering": (lambda bench: bench.tell(2, "before"), "non-communication hang: replica", {"2"}),
    "stopped during": (lambda bench: bench.tell(2, "during"), "communication hang: replica", {"2"}),
    "link cut": (lambda bench: bench.cut(1, 3), "communication hang: link", {"1", "3"}),
    "link 10x slower": (lambda bench: bench.slow_link(0, 1), "communication slow: link", {"0", "1"}),
    "egress 10x slower": (lambda bench: bench.slow_egress(1), "communication slow: sender side", {"1"}),
    "ingress 10x slower": (lambda bench: bench.slow_ingress(2), "communication slow: receiver side", {"2"}),
    "sleeps in every step": (lambda bench: bench.tell(3, "sleep"), "non-communication slow: replica", {"3"}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_over_real_sockets_is_diagnosed(case, tmp_path):
    fault, expected, culprits = CASES[case]
    hangs = expected is not None and "hang" in expected
    bridge = Bridge()
    with Namespaces(SIZE, bridge) as space:
        bridge.shape(RATE)
        bench = Bench(space, tmp_path)
        bench.wait(lambda: bench.rounds() >= HEALTHY)
        before = diagnose(RunRecord.load(tmp_path))
        fault(bench)
        if hangs:
            others = [
                process for rank, process in enumerate(bench.running) if str(rank) not in culprits or case == "link cut"
            ]
            bench.wait(lambda: all(process.poll() is not None for process in others))
        else:
            seen = bench.rounds()
            bench.wait(lambda: bench.rounds() >= seen + MORE)
        during = diagnose(RunRecord.load(tmp_path))
    print(f"\n{case}: " + " | ".join(during.lines()[:2]))
    assert not before.findings, before.verdict
    found = {(f"{finding.syndrome}: {finding.side}", frozenset(finding.who)) for finding in during.findings}
    assert found == ({(expected, frozenset(culprits))} if expected else set()), during.lines()
