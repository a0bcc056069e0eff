"""A lighthouse or hub and counting replicas, each a process; faults that happen to them, and the checks at the end."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import struct
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import counting
from counting import NAMES, PLACES, QUICK, UNIT

from thinwire.membership.lighthouse import Lighthouse

LIMIT = 600.0  # only ends a hang
Line = dict[str, Any]

# Each process is forked from one that has imported torch already, because importing takes long on a busy machine.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["stage", "pytest"])


def serve_lighthouse(told: Connection, port: int) -> None:
    """Runs a lighthouse until it is killed."""
    lighthouse = Lighthouse("127.0.0.1", port, heartbeat_timeout=QUICK.heartbeat_timeout)
    told.send((lighthouse.address, lighthouse.port))
    signal.pause()


def serve_hub(told: Connection, folder: Path, heartbeat_timeout: float = QUICK.heartbeat_timeout) -> None:
    """Runs a hub until it is killed."""
    from thinwire.comm.secure import Hub
    from thinwire.membership.registry import MemberRegistry

    hub = Hub(folder, registry=lambda: MemberRegistry(heartbeat_timeout))
    told.send((str(hub.invite(100)), hub.port))
    signal.pause()


def run_replica(err: str, *arguments: str) -> None:
    """Runs a replica; its stderr is appended to the file `err`."""
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    counting.main(*arguments)


class Stage:
    def __init__(self, folder: Path, names: str = "abc") -> None:
        self.folder, self.names, self.port = folder, names, 0
        self.running: dict[str, BaseProcess] = {}
        self.done: Counter[str] = Counter()  # faults, by kind
        self.untouched = set(names)  # never killed, so no step of theirs may be lost
        self.frozen: dict[str, float] = {}  # until when
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

    def kill_server(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.join()

    def start(self, name: str, size: int = PLACES) -> BaseProcess:
        arguments = (str(self.folder / f"{name}.err"), self.address, name, str(self.folder), str(size))
        process = FORKS.Process(target=run_replica, args=arguments, daemon=True)
        process.start()
        return process

    def begin(self) -> None:
        for name in self.names:
            self.running[name] = self.start(name)
        self.until_all_take_part()

    def kill(self, name: str) -> None:
        self.untouched.discard(name)
        self.frozen.pop(name, None)
        self.running[name].kill()
        self.running[name].join()

    def restart_ended(self) -> None:
        """Resumes replicas whose freeze is over, and restarts those that have ended, as the operator of a run would."""
        for name, until in list(self.frozen.items()):
            if time.monotonic() >= until:
                self.signal(name, signal.SIGCONT)
                del self.frozen[name]
        for name, process in self.running.items():
            if process.exitcode is not None:
                problems = (self.folder / f"{name}.err").read_text()
                assert process.exitcode == -signal.SIGKILL or "LinkError" in problems[-600:], problems
                self.untouched.discard(name)
                self.running[name] = self.start(name)

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
        files = sorted(self.folder.glob(f"{name}-*.jsonl"), key=lambda file: file.name)
        whole = [line for file in files for line in file.read_text().split("\n")[:-1]]
        return [line for line in map(json.loads, whole) if not kinds or line["kind"] in kinds]

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
            return all(
                any(line["at"] > now and name in line["counted"] for line in self.lines(name, "commit")[-5:])
                for name in self.names
            )

        self.until(counted, "somebody does not take part")

    def said(self) -> Any:
        errors = {file.name: file.read_text()[-1500:] for file in self.folder.glob("*.err")}
        return errors, {name: self.lines(name)[-4:] for name in self.names}

    # ---- faults

    def fault(self, kind: str, chance: random.Random) -> None:
        self.done[kind] += 1
        name = chance.choice(self.names)
        match kind:
            case "kill -9":
                self.kill(name)
            case "freeze":
                self.signal(name, signal.SIGSTOP)
                self.frozen[name] = time.monotonic() + chance.uniform(0.2, 3.0)
            case "damaged bytes":
                self.signal(name, signal.SIGUSR1)
            case "disk full":
                self.signal(name, signal.SIGUSR2)
            case "lighthouse killed":
                self.kill_server()
                time.sleep(chance.uniform(0.0, 1.5))
                self.start_server()
            case "lighthouse frozen":
                os.kill(self.lighthouse.pid or 0, signal.SIGSTOP)
                time.sleep(chance.uniform(0.2, 1.0))
                os.kill(self.lighthouse.pid or 0, signal.SIGCONT)
            case "all killed":
                for each in self.names:
                    self.kill(each)
                self.kill_server()
                self.start_server()
            case "wrong model" | "a name that is taken":
                self.until_all_take_part()  # a replica killed a moment ago holds no name
                wrong = self.start("d", PLACES // 2) if kind == "wrong model" else self.start(name)
                wrong.join(LIMIT)
                assert wrong.exitcode == 1, self.said()

    # ---- checks at the end

    def end(self) -> None:
        """Stops all replicas; each ends by itself."""
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
        history = self.history()
        for line in history:
            for name in line["counted"]:
                place, steps = NAMES.index(name), brought[line["id"], name]
                due[line["fragment"]][place] += UNIT * steps / line["whole"]
                counted[line["fragment"]][place] += steps
        for fragment in range(2):
            for place, name in enumerate(self.names):
                assert abs(first["anchors"][fragment][place] - due[fragment][place]) < 0.01 * UNIT, (name, due, first)
                assert counted[fragment][place] <= self.steps(name) + 0.01, f"{name} was counted twice"
                if name in self.untouched:
                    assert abs(counted[fragment][place] - self.steps(name)) < 0.01, f"steps of {name} are lost"
        return {name: self.steps(name) - min(c[NAMES.index(name)] for c in counted) for name in self.names}

    def figures(self, lost: dict[str, float]) -> str:
        """Returns the figures of the run as text."""
        rounds = [line for name in self.names for line in self.lines(name, "round") if line["fragment"] >= 0]
        ids = {(line["round"], tuple(line["members"])): line["committed"] for line in rounds}
        finish = [line for name in self.names for line in self.lines(name, "finish")]
        back = []
        for name in self.names:
            lives = [line["at"] for line in self.lines(name, "start")][1:]
            ins = [line["at"] for line in self.lines(name, "commit") if name in line["counted"]]
            back += [min(later) - life for life in lives if (later := [at for at in ins if at > life])]
        kills = self.done["kill -9"] + len(self.names) * self.done["all killed"]
        text = [
            f"{sum(self.done.values())} faults: " + ", ".join(f"{n} {kind}" for kind, n in self.done.most_common()),
            f"rounds: {len(self.history())} committed, {sum(not c for c in ids.values())} dropped or in doubt",
            f"main threads spent {sum(f['spent'] for f in finish):.2f} s of {sum(f['seconds'] for f in finish):.0f} s in departures and "
            f"landings; the longest inner step of the last lives was held up {max(f['worst'] for f in finish):.3f} s",
            f"steps lost: {sum(lost.values()):.0f} of {sum(map(self.steps, self.names))}, "
            f"{sum(lost.values()) / max(1, kills):.1f} per kill; of those never killed none ({', '.join(sorted(self.untouched)) or 'nobody'})",
        ]
        if back:
            text.append(
                f"{len(back)} returns, counted again after {median(back):.1f} s (median), {max(back):.1f} s at most"
            )
        return "\n".join(text)


class HubStage(Stage):
    """The same with a hub in place of the lighthouse."""

    @property
    def server_call(self) -> tuple[Any, ...]:
        return serve_hub, self.folder / "hub"
