"""Real processes are killed, frozen and joined, and a lighthouse dies and returns. No test depends on a time limit."""

from __future__ import annotations

import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from listening import addresses
from membership_process import DEADLINES

from thinwire.app.cli import lighthouse as verb
from thinwire.errors import ConfigurationError, DisagreementError, LinkError
from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership, Timeouts
from thinwire.membership.channel import Channel, secret_in

LIMIT = 600.0  # only ends a hang


class Stage:
    """A lighthouse and replicas, each a process, and their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, {}
        self.port = "0"
        self.light()

    def light(self):
        command = [sys.executable, "-m", "thinwire", "lighthouse", "--json", "--port", self.port]
        command += ["--heartbeat-timeout", str(DEADLINES.heartbeat_timeout)]
        self.lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        told = json.loads(self.lighthouse.stdout.readline())
        self.address, self.port = told["address"], str(told["port"])

    def start(self, *names):
        for name in names:
            command = [
                sys.executable,
                str(Path(__file__).parents[1] / "support" / "membership_process.py"),
                self.address,
                name,
                str(self.folder),
            ]
            self.processes[name] = subprocess.Popen(command, stderr=(self.folder / f"{name}.err").open("w"))

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def lines(self, name, kind="round"):
        files = sorted(self.folder.glob(f"{name}-*.jsonl"), key=lambda file: file.stat().st_mtime)
        whole = [line for file in files for line in file.read_text().split("\n")[:-1]]
        return [line for line in map(json.loads, whole) if line["kind"] == kind]

    def until(self, condition, what):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.said()}"
            time.sleep(0.02)

    def until_members(self, members, of):
        """Waits until replica `of` completes a round, begun after now, with exactly these members."""
        seen = len(self.lines(of))
        landed = lambda: [x for x in self.lines(of)[seen:] if x["members"] == list(members) and x["answer"]]  # noqa: E731
        self.until(landed, f"no round of {members}")
        return landed()[0]

    def said(self):
        errors = {file.name: file.read_text()[-2000:] for file in self.folder.glob("*.err")}
        return errors, {name: self.lines(name)[-2:] + self.lines(name, "retry")[-3:] for name in self.processes}

    def end(self):
        """Stops all replicas, and checks that every view had one outcome."""
        (self.folder / "stop").touch()
        for name, process in self.processes.items():
            process.send_signal(signal.SIGCONT)
            assert process.wait(LIMIT) in (0, -signal.SIGKILL), (name, self.said())
        rounds = [line for name in self.processes for line in self.lines(name) if line["answer"] is not None]
        outcomes: dict[str, set[bool]] = {}
        for line in rounds:
            outcomes.setdefault(line["id"], set()).add(line["answer"])
        assert rounds and all(len(answers) == 1 for answers in outcomes.values())

    def clear(self):
        for process in (*self.processes.values(), self.lighthouse):
            process.kill()
            process.wait()
        self.lighthouse.stdout.close()


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.clear()


@pytest.mark.slow
def test_a_killed_replica_returns_and_a_third_joins(stage):
    """After kill -9 the others build a new group. A replica that returns and a new one soon become members."""
    stage.start("a", "b")
    stage.until_members("ab", of="a")
    stage.start("c")
    stage.until_members("abc", of="a")
    stage.signal("b", signal.SIGKILL)
    stage.until_members("ac", of="a")
    stage.until_members("ac", of="c")
    stage.start("b")
    line = stage.until_members("abc", of="b")
    assert line["number"] > 1  # it has learned the round of the others
    stage.end()
    landed = [line for name in "abc" for line in stage.lines(name) if line["answer"] and len(line["members"]) > 1]
    assert landed and all(line["sent"] == line["received"] > 0 for line in landed)


@pytest.mark.slow
def test_a_frozen_replica_rejoins_after_it_thaws(stage):
    stage.start("a", "b", "c")
    stage.until_members("abc", of="a")
    stage.signal("b", signal.SIGSTOP)
    stage.until_members("ac", of="a")
    stage.signal("b", signal.SIGCONT)
    stage.until_members("abc", of="b")
    stage.end()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 4.0])
def test_replicas_keep_their_group_over_a_lighthouse_restart(stage, seconds):
    """Replicas keep their group and reconnect by themselves, and none is left out."""
    stage.start("a", "b", "c")
    stage.until_members("abc", of="c")
    before = {name: len(stage.lines(name)) for name in "abc"}
    stage.lighthouse.kill()
    stage.lighthouse.wait()
    time.sleep(seconds)
    stage.lighthouse.stdout.close()
    stage.light()
    stage.until_members("abc", of="a")
    for name in "abc":
        assert any("lighthouse" in line["reason"] for line in stage.lines(name, "retry"))
        after = stage.lines(name)[before[name] :]
        assert all(line["members"] == ["a", "b", "c"] for line in after if line["answer"])
    stage.end()


@pytest.mark.slow
def test_a_frozen_lighthouse_blocks_no_replica(stage):
    stage.start("a", "b")
    stage.until_members("ab", of="a")
    stage.lighthouse.send_signal(signal.SIGSTOP)
    stage.until(lambda: stage.lines("a", "retry") and stage.lines("b", "retry"), "nobody noticed")
    stage.lighthouse.send_signal(signal.SIGCONT)
    stage.until_members("ab", of="a")
    stage.end()


@pytest.fixture
def lighthouse():
    """A lighthouse in this process."""
    made = Lighthouse("127.0.0.1", 0, heartbeat_timeout=DEADLINES.heartbeat_timeout)
    yield made
    made.close()


def meet(address, *replicas, seconds=600.0):
    """Lets replicas meet as threads; each is (name, settings). Several meet again and again until one of them is refused, so that it finds the
    others however late it comes. Returns the members of their views, or their errors.
    """
    results, memberships, refused = [None] * len(replicas), [], threading.Event()

    def run(index, name, settings):
        try:
            membership = Membership(LighthouseRendezvous(address), name, **{"timeouts": DEADLINES} | settings)
            memberships.append(membership)
            while True:
                results[index] = [m.name for m in membership.next_view({}, seconds).members]
                if len(replicas) == 1:
                    break
        except Exception as error:
            if not refused.is_set():
                results[index] = error
            if isinstance(error, DisagreementError):
                refused.set()
        while None in results:  # the others have had a view
            time.sleep(0.01)
        for one in memberships:  # their waits for a further one end
            one.close()

    threads = [threading.Thread(target=run, args=(i, *replica)) for i, replica in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return results


def test_a_replica_of_another_run_is_refused(lighthouse):
    same = {"facts": {"run": "this"}}
    results = meet(lighthouse.address, ("a", same), ("b", {"facts": {"run": "that"}}), ("c", same))
    assert isinstance(results[1], DisagreementError) and "run: that there, this at 'a'" in str(results[1])
    assert results[0] == results[2] == ["a", "c"]


def test_two_replicas_with_one_name_are_refused(lighthouse):
    results = meet(lighthouse.address, ("a", {}), ("b", {}), ("b", {}), ("c", {}))
    refused = [result for result in results if isinstance(result, DisagreementError)]
    assert len(refused) == 1 and "has the name 'b'" in str(refused[0])


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened():
    """Returns the files and threads of this process."""
    return [len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")]


def rebuild(address, times):
    """Builds the group of two memberships anew `times` times after a failure; then both leave."""
    patient = replace(DEADLINES, connect=LIMIT, transfer=LIMIT, vote=LIMIT)

    def run(name):
        with closing(Membership(LighthouseRendezvous(address), name, timeouts=patient)) as membership:
            for _ in range(times):
                view = membership.next_view({}, LIMIT)
                if view.group.rank == 0:
                    view.close()
                with pytest.raises(LinkError):
                    view.group.post(1, {}, {1 - view.group.rank: torch.zeros(9, dtype=torch.uint8)}).wait()
                view.close()

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists what a process has open")
def test_rebuilt_groups_close_their_files_and_threads(lighthouse, no_collector):
    """They are closed at once, not when the garbage collector runs."""
    rebuild(lighthouse.address, 1)
    before, end = opened(), time.monotonic() + LIMIT
    rebuild(lighthouse.address, 8)
    # Threads end, and the lighthouse closes connections, a little later.
    while any(now > then for now, then in zip(opened(), before)):
        assert time.monotonic() < end, (before, opened())
        time.sleep(0.05)


def test_too_few_replicas_are_an_error(lighthouse):
    (told,) = meet(lighthouse.address, ("a", {}), seconds=3.0)
    assert isinstance(told, LinkError) and "1 of at least 2 members came (a)" in str(told)


def test_an_absent_lighthouse_is_reported_with_advice():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = []
    (told,) = meet(
        f"127.0.0.1:{port}", ("a", {"observe": lambda kind, fields: said.append((kind, fields))}), seconds=3.0
    )
    assert isinstance(told, LinkError) and f"no lighthouse answers at 127.0.0.1:{port}" in str(told)
    assert "check the address, and that `thinwire lighthouse` runs there" in str(told)
    pauses = [fields["seconds"] for kind, fields in said if kind == "retry"]
    # the pause never grows, so all return at about the same time
    assert pauses and set(pauses) == {DEADLINES.heartbeat_interval}


def test_another_server_at_the_port_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (told,) = meet(f"127.0.0.1:{listener.getsockname()[1]}", ("a", {}), seconds=2.0)
    assert isinstance(told, LinkError) and "does not answer as a lighthouse" in str(told)


def test_a_lighthouse_with_another_heartbeat_timeout_is_reported(lighthouse):
    said = []
    timeouts = Timeouts(heartbeat_timeout=10.0)
    observe = lambda kind, fields: said.append(fields.get("reason", ""))  # noqa: E731
    meet(lighthouse.address, ("a", {"timeouts": timeouts, "observe": observe, "least": 1}))
    assert sum("--heartbeat-timeout 10" in text for text in said) == 1


def test_a_port_in_use_is_reported(lighthouse):
    with pytest.raises(LinkError, match="and a free port"):
        Lighthouse("127.0.0.1", lighthouse.port)
    with pytest.raises(LinkError, match="an address of this machine"):
        Lighthouse("203.0.113.1", 0)


@pytest.mark.parametrize(
    "address", ["", ":", "host:", "host:x", "host:0", "host:65536", "host:029510", "host:99999999999"]
)
def test_invalid_addresses_are_refused(address):
    with pytest.raises(ConfigurationError, match="HOST:PORT is needed"):
        LighthouseRendezvous(address)


def test_the_lighthouse_command_prints_its_address_and_members_and_stops_on_request(tmp_path):
    """It makes the run's secret, does not import torch, and prints who joins, leaves and is refused."""
    command = [sys.executable, "-m", "thinwire", "lighthouse", "--port", "0", "--secret", str(tmp_path / "secret")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline() for _ in range(5)]
    assert set(addresses(process.pid)) == {"127.0.0.1"}
    host, port = lines[0].split()[-1].split(":")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600 and f"--secret {tmp_path / 'secret'}" in lines[2]
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    with pytest.raises(LinkError):
        Channel(host, int(port), "a", "0" * 16, b"")
    member = Channel(host, int(port), "a", "0" * 16, secret_in(tmp_path / "secret"))
    member.ask("leave")
    member.close()
    told = [process.stdout.readline().split(" ", 2)[2].split(" ")[:2] for _ in range(3)]
    assert told == [["refused:", "somebody"], ["joined:", "a"], ["left:", "a"]]
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert "lighthouse at 127.0.0.1:" in lines[0]
    assert any("trusted networks or tunnels only" in line for line in lines)
    assert not process.stderr.read()
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize("arguments", [["--port", "65536"], ["--port", "-1"], ["--heartbeat-timeout", "0"]])
def test_the_lighthouse_command_refuses_invalid_options(arguments):
    with pytest.raises(ConfigurationError):
        verb.main(arguments)
