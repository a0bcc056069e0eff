"""The stage of stage.py over an open network: each replica is at home behind its own NAT, and `thinwire hub` is in the cloud."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from counting import NAMES, QUICK
from faults import Fault
from namespaces import Namespaces
from nat import CLOUD, Masquerade
from stage import Stage
from stage_figures import shares

from thinwire.net import invite

PORT = 29530
LOST = 4  # packets that a short cut drops at least
SHARE = 0.9  # of the living replicas that take part, over all rounds
MEGABYTES, HUB_NBYTES = 64, 10**6  # most growth of a process; most bytes of the hub's folder


class NatStage(Stage):
    """Three homes and a cloud, in network namespaces. Links can break as well."""

    kinds: ClassVar[dict[str, int]] = {
        "kill -9": 6, "freeze": 4, "damaged bytes": 2, "disk full": 1, "server killed": 2, "server frozen": 1, "wrong model": 1,
        "a name that is taken": 1, "link cut": 5, "all links cut": 2, "link flaps": 3, "address changed": 3,
        "connections reset by the router": 3, "connections forgotten by the router": 3,
    }  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.nat, self.hub = Masquerade(), folder / "hub"
        self.space = Namespaces(1 + len("abc"), self.nat).__enter__()
        self.token = ""
        try:
            super().__init__(folder)
        except BaseException:
            self.space.close()
            raise

    def start_server(self) -> None:
        told = ["--listen", f"{CLOUD}:{PORT}", "--heartbeat-timeout", str(QUICK.heartbeat_timeout)]
        command = [sys.executable, "-m", "thinwire", "hub", "--elastic", "--out", str(self.hub), *told]
        with (self.folder / "hub.err").open("a") as errors:
            self.process = self.space.start(0, command, errors=errors)
        assert self.process.stdout and any("joins by" in line or "come again" in line for line in self.process.stdout)
        self.process.stdout.close()
        self.address = self.address if self.token else str(invite(self.hub, 100))
        self.token = self.address

    @property
    def server_pid(self) -> int:
        return self.process.pid

    def kill_server(self) -> None:
        self.process.kill()
        self.process.wait()

    def namespace(self, name: str) -> str:
        return self.space.namespaces[self.home(name)]

    def home(self, name: str) -> int:
        return 1 + NAMES.index(name) % len(self.names)  # the one of the wrong model is a neighbour

    def clear(self) -> None:
        try:
            super().clear()
        finally:
            self.space.close()

    # ---- faults of links

    def fault(self, fault: Fault) -> None:
        name, home = fault.name, self.home(fault.name)
        match fault.kind:
            case "link cut":
                self.nobody_is_away()
                self.nat.cut([home])
                self.leave(name, self.elapsed(fault), lambda: self.nat.cut([]))
            case "link flaps":
                self.nobody_is_away()
                self.leave(name, self.flaps(home, 2 + fault.steps % 4), lambda: self.nat.cut([]))
            case "all links cut":
                self.nobody_is_away()
                self.nat.cut(range(1, 1 + len(self.names)))
                self.elapse(fault)
                self.nat.cut([])
            case "address changed":
                self.nat.move(home)
            case "connections reset by the router" | "connections forgotten by the router":
                self.nat.forget(home, silent="forgotten" in fault.kind)
            case _:
                super().fault(fault)
                return
        self.done[fault.kind] += 1

    def flaps(self, home: int, times: int) -> Callable[[], bool]:
        """Cuts and heals a link; the returned function goes on with that, and says whether it is over. A cut ends when it has dropped some
        packets, and the next begins when some have passed.
        """
        counts = [(kind, number) for number in range(times) for kind in (self.nat.lost, self.nat.passed)]
        self.nat.cut([home])
        goal = self.nat.lost[home] + LOST

        def over() -> bool:
            nonlocal goal
            kind, _ = counts[0]
            if kind[home] < goal:
                return False
            counts.pop(0)
            if not counts:
                return True
            goal = counts[0][0][home] + LOST
            self.nat.cut([home] if counts[0][0] is self.nat.lost else [])
            return False

        return over

    # ---- bounds

    def begin(self) -> None:
        super().begin()
        self.held = self.peak = self.holds()

    def soak(self, faults: Sequence[Fault]) -> str:
        text = super().soak(faults)
        assert shares(self)[0] >= SHARE, text
        return text

    def play(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            super().play([fault])
            now = self.holds()
            self.peak = {who: Usage(*map(max, was, now[who])) for who, was in self.peak.items()}

    def end(self) -> None:
        """Also checks that the hub, and the replica that was never killed, hold no more than at the begin."""
        self.nobody_is_away()
        self.until(lambda: self.no_more("c"), "a replica keeps threads or open files")
        super().end()
        self.until(lambda: self.no_more("hub"), "the hub keeps connections of replicas that have ended")
        assert self.untouched == {"c"}
        assert all(self.peak[who].megabytes <= held.megabytes + MEGABYTES for who, held in self.held.items()), self.peak
        assert self.hub_nbytes() < HUB_NBYTES

    def no_more(self, who: str) -> bool:
        now, then = self.holds()[who], self.held[who]
        return now.threads <= then.threads and now.files <= then.files

    def holds(self) -> dict[str, Usage]:
        return {"hub": usage(self.server_pid), "c": usage(self.running["c"].pid or 0)}

    def hub_nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.hub.rglob("*") if file.is_file())

    def figures(self, lost: dict[str, float]) -> str:
        most = "; ".join(f"{who}: {self.held[who]} at the begin, {peak} at most" for who, peak in self.peak.items())
        return f"{super().figures(lost)}\n{most}; the hub's folder: {self.hub_nbytes() / 1e3:.0f} kB at the end"


class Usage(NamedTuple):
    """What a process holds."""

    megabytes: int  # resident
    threads: int
    files: int

    def __str__(self) -> str:
        return f"{self.megabytes} MB, {self.threads} threads, {self.files} open files"


def usage(pid: int) -> Usage:
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return Usage(int(status["VmRSS"].split()[0]) // 1000, int(status["Threads"]), files)
    except (OSError, KeyError):  # it has ended
        return Usage(0, 0, 0)
