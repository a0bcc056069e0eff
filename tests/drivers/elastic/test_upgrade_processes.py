"""Real processes of two releases: each replica of a run, and the lighthouse, is replaced in turn by one of the next release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thinwire.version import HUB_FRAMES, LIGHTHOUSE_MESSAGES, PROTOCOLS, Protocols

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[2] / "support"
FAR = Protocols(PROTOCOLS.newest + 5, PROTOCOLS.newest + 7, "9.0")
NAMES, LIMIT = "abc", 1200.0  # seconds after which a test has hung


def after(spoken: Protocols) -> Protocols:
    """Of the next release, which still speaks what this one does."""
    return Protocols(spoken.oldest, spoken.newest + 1, "0.2.0")


class Stage:
    """Processes, and what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running, self.lives = folder, dict[str, subprocess.Popen[bytes]](), dict[str, list[Path]]()
        self.next, self.far = folder / "next", folder / "far"  # releases: what Python runs before a program of them
        for path, protocols in ((self.next, after(PROTOCOLS)), (self.far, FAR)):
            path.mkdir()
            said = [(v.oldest, v.newest, v.release) for v in (protocols, after(HUB_FRAMES), after(LIGHTHOUSE_MESSAGES))]
            (path / "sitecustomize.py").write_text(
                "from thinwire import version\n"
                f"version.PROTOCOLS, version.HUB_FRAMES, version.LIGHTHOUSE_MESSAGES = (version.Protocols(*v) for v in {said})\n"
            )

    def environment(self, release: Path | None) -> dict[str, str]:
        """Of a program of this release; None: the present one."""
        path = os.pathsep.join([*([str(release)] if release else []), str(SUPPORT)])
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, name: str, address: str, release: Path | None = None) -> subprocess.Popen[bytes]:
        lives = self.lives.setdefault(name, [])
        lives.append(self.folder / f"{name}-{len(lives)}.txt")
        command = [sys.executable, str(SUPPORT / "upgraded_process.py"), address, name, str(self.folder)]
        with lives[-1].open("wb") as out:
            self.running[name] = subprocess.Popen(command, stdout=out, stderr=out, env=self.environment(release))
        return self.running[name]

    def events(self, name: str, event: str, life: int = -1) -> list[dict[str, Any]]:
        lines = self.lives[name][life].read_text().splitlines()
        return [one for line in lines if line.startswith("{") and (one := json.loads(line))["event"] == event]

    def until(self, true: Callable[[], object]) -> None:
        began = time.monotonic()
        while not true():
            told = {name: lives[-1].read_text()[-1500:] for name, lives in self.lives.items()}
            assert all(process.poll() in (None, 0) for process in self.running.values()), told
            assert time.monotonic() - began < LIMIT, told
            time.sleep(0.05)

    def rounds(self, name: str, members: str) -> int:
        """Rounds of these members that counted, in the present life of `name`."""
        return sum(one["committed"] and one["members"] == [*members] for one in self.events(name, "round"))

    def train_on(self, members: str) -> None:
        """Wait until each of them has taken part in two more rounds of just these members."""
        due = {name: self.rounds(name, members) + 2 for name in members}
        self.until(lambda: all(self.rounds(name, members) >= count for name, count in due.items()))

    def write(self, name: str, text: str = "") -> None:
        """A file that replicas look for, whole."""
        draft = self.folder / f"{name}.draft"
        draft.write_text(text)
        draft.replace(self.folder / name)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


class LighthouseProcess:
    """`thinwire lighthouse`, which can be replaced by another release at the same address."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.port = stage, "0"
        self.light(None)

    def light(self, release: Path | None) -> None:
        command = [
            sys.executable,
            "-m",
            "thinwire",
            "lighthouse",
            "--json",
            "--port",
            self.port,
            "--heartbeat-timeout",
            "600",
        ]
        environment = self.stage.environment(release)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        assert self.process.stdout
        told = json.loads(self.process.stdout.readline())
        self.address, self.port = told["address"], str(told["port"])

    def addresses(self) -> dict[str, str]:
        return dict.fromkeys([*NAMES, "d"], self.address)

    def replace(self, release: Path) -> None:
        self.close()
        self.light(release)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def test_a_run_goes_on_while_each_of_its_processes_is_replaced_by_the_next_release(stage: Stage) -> None:
    """Each replica leaves with all that it trained counted. The others train on without it, and then with its successor; the place where they meet
    is replaced last. No sample is trained twice or lost, and all end with the same bits."""
    meeting = LighthouseProcess(stage)
    try:
        addresses = meeting.addresses()
        for name in NAMES:
            stage.start(name, addresses[name])
        for name in NAMES:
            stage.train_on(NAMES)
            stage.write(f"{name}.leave")
            assert stage.running[name].wait(LIMIT) == 0
            (stage.folder / f"{name}.leave").unlink()
            stage.train_on(NAMES.replace(name, ""))
            if name == "a":
                assert stage.start("d", addresses["d"], stage.far).wait(LIMIT) == 1
                assert f"protocols: {FAR} there, {PROTOCOLS} at" in stage.lives["d"][-1].read_text()
                del stage.running["d"]
            stage.start(name, addresses[name], stage.next)
        stage.train_on(NAMES)
        meeting.replace(stage.next)
        stage.train_on(NAMES)
        stage.write("end", str(max(one["step"] for one in stage.events("a", "round")) + 2000))
        for name in NAMES:
            assert stage.running[name].wait(LIMIT) == 0, stage.lives[name][-1].read_text()[-1500:]
    finally:
        meeting.close()
    for name in NAMES:
        said = [stage.events(name, "speaks", life)[0]["protocols"] for life in (0, 1)]
        assert said == [str(PROTOCOLS), str(after(PROTOCOLS))]
        named = [one for life in (0, 1) for one in stage.events(name, "data", life)]
        assert named and not any(one["lost"] for one in named)
    ends = [(one["step"], one["digest"]) for name in NAMES for one in stage.events(name, "end")]
    assert len(ends) == len(NAMES) and len(set(ends)) == 1, ends
    samples = [line for name in NAMES for line in (stage.folder / f"{name}.samples").read_text().split()]
    assert len(samples) == len(set(samples)) > 0
