"""A lighthouse or hub and counting replicas, each a process; faults that happen to them, and the checks at the end."""

from __future__ import annotations

import ctypes
import json
import math
import multiprocessing
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import counting
from counting import NAMES, PLACES, QUICK, UNIT
from faults import MORTAL, Fault
from stage_figures import figures

from thinwire.membership.lighthouse import Lighthouse

LIMIT = 600.0  # only ends a hang
CLONE_NEWNET = 0x40000000
Line = dict[str, Any]

# Each process is forked from one that has imported torch already, because importing takes long on a busy machine.
FORKS = multiprocessing.get_context("forkserver")
# It finds no module of tests/support. torch loads _dynamo when it makes an optimizer.
PRELOADED = ["torch._dynamo", "thinwire.replica", "grpc.aio"]
FORKS.set_forkserver_preload(PRELOADED)


def serve_lighthouse(told: Connection, port: int) -> None:
    """Runs a lighthouse until it is killed."""
    lighthouse = Lighthouse("127.0.0.1", port, heartbeat_timeout=QUICK.heartbeat_timeout)
    told.send((lighthouse.address, lighthouse.port))
    signal.pause()


def serve_hub(told: Connection, folder: Path, heartbeat_timeout: float = QUICK.heartbeat_timeout) -> None:
    """Runs a hub until it is killed."""
    from thinwire.membership.registry import MemberRegistry
    from thinwire.net import Hub

    hub = Hub(folder, registry=lambda: MemberRegistry(heartbeat_timeout))
    told.send((str(hub.invite(100)), hub.port))
    signal.pause()


def run_replica(namespace: str, err: str, *arguments: str) -> None:
    """Runs a replica in a network namespace ("": in that of the tests); its stderr is appended to the file `err`."""
    if namespace:
        with Path("/run/netns", namespace).open() as file:
            failed = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET)
            assert not failed, os.strerror(ctypes.get_errno())
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    counting.main(*arguments)


class Stage:
    """Three replicas and a lighthouse. A fault of each kind of `kinds` can happen to them; the numbers are weights."""

    kinds: ClassVar[dict[str, int]] = {
        "kill -9": 6, "freeze": 5, "damaged bytes": 3, "disk full": 2, "server killed": 2, "server frozen": 1, "all killed": 1,
        "wrong model": 1, "a name that is taken": 1,
    }  # fmt: skip

    def __init__(self, folder: Path, names: str = "abc") -> None:
        FORKS.set_forkserver_preload([*PRELOADED, "thinwire.kernels.cpu_block", "thinwire.net.rendezvous"])
        self.folder, self.names, self.port = folder, names, 0
        self.running: dict[str, BaseProcess] = {}
        self.done: Counter[str] = Counter()  # faults, by kind
        self.untouched = set(names)  # never killed, so no step of theirs may be lost
        # Whether it is over, and what ends it.
        self.away: dict[str, tuple[Callable[[], bool], Callable[[], object]]] = {}
        self.out: list[tuple[str, float, float]] = []  # when a replica did not run, was frozen or had no link
        self.starts: list[tuple[str, float]] = []  # of replicas
        self.started: dict[str, float] = {}  # the last of these, by name
        self.since: dict[str, float] = {}  # when it was started or came back
        self._read: dict[Path, tuple[int, list[Line]]] = {}  # of each log: how far it is read, and its lines
        self.start_server()

    # ---- processes

    def start_server(self) -> None:
        hear, tell = FORKS.Pipe(duplex=False)
        self.lighthouse = FORKS.Process(target=self.server_call[0], args=(tell, *self.server_call[1:]), daemon=True)
        self.lighthouse.start()
        self.address, self.port = hear.recv()

    @property
    def server_call(self) -> tuple[Any, ...]:
        """The function, with its arguments, that runs in the process of the server."""
        return serve_lighthouse, self.port

    @property
    def server_pid(self) -> int:
        return self.lighthouse.pid or 0

    def kill_server(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def start(self, name: str, size: int = PLACES) -> BaseProcess:
        arguments = (
            self.namespace(name),
            str(self.folder / f"{name}.err"),
            self.address,
            name,
            str(self.folder),
            str(size),
        )
        process = FORKS.Process(target=run_replica, args=arguments, daemon=True)
        process.start()
        return process

    def namespace(self, name: str) -> str:
        """Returns the network namespace in which a replica runs; "": that of the tests."""
        return ""

    def begin(self) -> None:
        for name in self.names:
            self.restart(name)
        self.until_all_take_part()

    def restart(self, name: str) -> None:
        self.since[name] = self.started[name] = time.monotonic()
        self.starts.append((name, self.started[name]))
        self.running[name] = self.start(name)

    def kill(self, name: str) -> None:
        self.untouched.discard(name)
        self.running[name].kill()
        self.running[name].join()

    def leave(self, name: str, over: Callable[[], bool], back: Callable[[], object]) -> None:
        """Notes that a replica is away from now on, until it is `over`; `back` ends it then."""
        self.away[name] = over, back
        self.out.append((name, time.monotonic(), math.inf))

    def bring_back(self, names: Iterable[str]) -> None:
        for name in names:
            self.away.pop(name)[1]()
            self.since[name] = time.monotonic()
            at = max(at for at, (who, _, _) in enumerate(self.out) if who == name)
            self.out[at] = (*self.out[at][:2], self.since[name])

    def restart_ended(self) -> None:
        """Ends what is over, and restarts replicas that have ended, as the operator of a run would until it `end`s."""
        self.bring_back([name for name, (over, _) in self.away.items() if over()])
        if (self.folder / "stop").exists():
            return
        for name, process in self.running.items():
            if process.exitcode is not None and name not in self.away:
                problems = (self.folder / f"{name}.err").read_text()
                assert process.exitcode == -signal.SIGKILL or "LinkError" in problems[-600:], problems
                self.untouched.discard(name)
                self.restart(name)

    def signal(self, name: str, number: int) -> None:
        process = self.running[name]
        if process.exitcode is None and process.pid is not None:
            os.kill(process.pid, number)

    def clear(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()
        self.kill_server()

    # ---- logs of the replicas

    def lines(self, name: str, *kinds: str) -> list[Line]:
        """Returns what a replica has written so far, over all its processes."""
        every = [line for file in sorted(self.folder.glob(f"{name}-*.jsonl")) for line in self.lines_of(file)]
        return [line for line in every if not kinds or line["kind"] in kinds]

    def lines_of(self, file: Path) -> list[Line]:
        at, lines = self._read.get(file, (0, []))
        with file.open("rb") as opened:
            opened.seek(at)
            whole, _, _ = opened.read().rpartition(b"\n")
        if whole:
            self._read[file] = at + len(whole) + 1, lines
            lines += map(json.loads, whole.split(b"\n"))
        return lines

    def commits(self, name: str, since: float) -> list[Line]:
        """Returns the rounds that a replica has committed since a moment."""
        newest = sorted(self.folder.glob(f"{name}-*.jsonl"))[-3:]  # also of processes before
        lines = [line for file in newest for line in self.lines_of(file)]
        return [line for line in lines if line["at"] > since and line["kind"] == "commit"]

    def rounds_since(self, since: float, names: Sequence[str]) -> int:
        return len({line["id"] for name in names for line in self.commits(name, since)})

    def takes_part(self, name: str) -> bool:
        """Whether a round has counted this replica since it was started or came back."""
        there = name not in self.away and self.running[name].exitcode is None
        return there and any(name in line["counted"] for line in self.commits(name, self.since[name]))

    def steps(self, name: str) -> int:
        """Returns the inner steps of a replica over all its processes."""
        return int(struct.unpack("<q", (self.folder / f"{name}.steps").read_bytes())[0])

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.said()}"
            self.restart_ended()
            time.sleep(0.05)

    def until_all_take_part(self) -> None:
        now = time.monotonic()

        def counted() -> bool:
            return all(any(name in line["counted"] for line in self.commits(name, now)) for name in self.names)

        self.until(counted, "somebody does not take part")

    def said(self) -> Any:
        errors = {file.name: file.read_text()[-1500:] for file in self.folder.glob("*.err")}
        return errors, {name: self.lines(name)[-4:] for name in self.names}

    # ---- faults

    def play(self, faults: Sequence[Fault]) -> None:
        """Lets the faults happen, one after another or several at once; waits for rounds between them."""
        for fault in faults:
            began = time.monotonic()
            self.fault(fault)
            self.until(lambda: self.rounds_since(began, self.names) >= fault.pause, f"no rounds after {fault}")  # noqa: B023

    def elapsed(self, fault: Fault) -> Callable[[], bool]:
        """Returns a function that says whether the others have done the steps and rounds of a fault, counted from now."""
        now, others = time.monotonic(), [name for name in self.names if name != fault.name]
        before = sum(map(self.steps, others))
        return lambda: (
            sum(map(self.steps, others)) - before >= fault.steps and self.rounds_since(now, others) >= fault.rounds
        )

    def elapse(self, fault: Fault) -> None:
        """Waits for the steps of a fault; there are no rounds meanwhile."""
        self.until(self.elapsed(replace(fault, rounds=0)), f"no steps after {fault}")

    def somebody_trains(self, fault: Fault) -> None:
        """Waits until one that is counted in `elapse` takes part; without a server, a replica that starts never trains."""
        others = [name for name in self.names if name != fault.name]
        self.until(lambda: any(map(self.takes_part, others)), f"nobody trains before {fault}")

    def nobody_is_away(self) -> None:
        self.until(lambda: not self.away, "somebody stays away")

    def fault(self, fault: Fault) -> None:
        self.done[fault.kind] += 1
        name = fault.name
        match fault.kind:
            case "kill -9":
                self.kill_one(fault)
            case "freeze":
                self.nobody_is_away()
                self.signal(name, signal.SIGSTOP)
                self.leave(name, self.elapsed(fault), lambda: self.signal(name, signal.SIGCONT))
            case "damaged bytes":
                self.until(lambda: self.has_started(name), f"{name} does not start")
                self.signal(name, signal.SIGUSR1)
            case "disk full":
                self.until(self.fills_disk(name), f"{name} never says that it could not save")
            case "server killed":
                self.somebody_trains(fault)
                self.kill_server()
                self.elapse(fault)
                self.start_server()
            case "server frozen":
                self.somebody_trains(fault)
                os.kill(self.server_pid, signal.SIGSTOP)
                self.elapse(fault)
                os.kill(self.server_pid, signal.SIGCONT)
            case "all killed":
                self.bring_back([*self.away])
                for each in self.names:
                    self.kill(each)
                self.kill_server()
                self.start_server()
            case "wrong model" | "a name that is taken":
                self.until_all_take_part()  # a replica killed a moment ago holds no name
                wrong = self.start("d", PLACES // 2) if fault.kind == "wrong model" else self.start(name)
                wrong.join(LIMIT)
                assert wrong.exitcode == 1, self.said()

    def kill_one(self, fault: Fault) -> None:
        """Kills a replica when another has all that was agreed on. It is restarted after the steps and rounds of the fault."""
        name, others = fault.name, [other for other in MORTAL if other != fault.name]
        safe = lambda: name not in self.away and all(map(self.takes_part, others))  # noqa: E731
        self.until(safe, f"nobody but {name} takes part")
        rounds = 0 if self.away else fault.rounds  # a round needs two replicas
        self.leave(name, self.elapsed(replace(fault, rounds=rounds)), lambda: self.restart(name))
        self.kill(name)

    def fills_disk(self, name: str) -> Callable[[], bool]:
        """Returns a function that fills the disk of each process of a replica, and says whether one could not save for that."""
        before, told = len(self.lines(name, "not saved")), set[float]()

        def said() -> bool:
            if len(self.lines(name, "not saved")) > before:
                return True
            if self.started[name] not in told and self.has_started(name):
                told.add(self.started[name])
                self.signal(name, signal.SIGUSR2)
            return False

        return said

    def has_started(self, name: str) -> bool:
        return any(line["at"] > self.started[name] for line in self.lines(name, "start"))

    def soak(self, faults: Sequence[Fault]) -> str:
        """Runs a whole soak with its checks; returns its figures as text."""
        began = time.monotonic()
        self.begin()
        self.play(faults)
        self.end()
        text = self.figures(self.check_anchors())
        return f"{text}\n{time.monotonic() - began:.0f} s"

    # ---- checks at the end

    def end(self) -> None:
        """Stops all replicas; each ends by itself."""
        self.nobody_is_away()
        self.until_all_take_part()
        (self.folder / "stop").touch()
        for name, process in self.running.items():
            process.join(LIMIT)
            assert process.exitcode == 0, (name, self.said())

    def history(self) -> list[Line]:
        """Returns the rounds that led to the final state, in order."""
        commits = {line["state_digest"]: line for name in self.names for line in self.lines(name, "commit")}
        state_digest, rounds = self.lines(self.names[0], "done")[-1]["state_digest"], []
        while state_digest in commits:
            rounds.append(commits[state_digest])
            state_digest = rounds[-1]["before"]
        return rounds[::-1]

    def check_anchors(self) -> dict[str, float]:
        """Checks that all hold the same bits, and that these are the deltas of the committed rounds, each once. Returns the steps lost by name."""
        ends = {name: self.lines(name, "done")[-1] for name in self.names}
        first = ends[self.names[0]]
        assert all(
            (end["digest"], end["state_digest"]) == (first["digest"], first["state_digest"]) for end in ends.values()
        ), ends
        brought = {(line["id"], name): line["steps"] for name in self.names for line in self.lines(name, "brings")}
        due, counted = [[0.0] * 4 for _ in range(2)], [[0.0] * 4 for _ in range(2)]
        for line in self.history():
            for name in line["counted"]:
                place, steps = NAMES.index(name), brought[line["id"], name]
                due[line["fragment"]][place] += UNIT * steps / line["whole"]
                counted[line["fragment"]][place] += steps
            sums = zip(line["anchor"], due[line["fragment"]], strict=True)
            assert all(abs(found - expected) < 0.01 * UNIT for found, expected in sums), f"a wrong sum: {line}"
        for fragment in range(2):
            for place, name in enumerate(self.names):
                assert abs(first["anchors"][fragment][place] - due[fragment][place]) < 0.01 * UNIT, (name, due, first)
                assert counted[fragment][place] <= self.steps(name) + 0.01, f"{name} was counted twice"
                if name in self.untouched:
                    assert abs(counted[fragment][place] - self.steps(name)) < 0.01, f"steps of {name} are lost"
        return {name: self.steps(name) - min(c[NAMES.index(name)] for c in counted) for name in self.names}

    def figures(self, lost: dict[str, float]) -> str:
        """Returns the figures of the run as text."""
        return figures(self, lost)


class HubStage(Stage):
    """The same with a hub in place of the lighthouse."""

    @property
    def server_call(self) -> tuple[Any, ...]:
        return serve_hub, self.folder / "hub"
