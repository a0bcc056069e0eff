"""Elastic trainers: one is killed, the others continue, and it returns from its own trainer's checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thinwire.errors import LinkError
from thinwire.integrations import members
from thinwire.membership import Lighthouse
from thinwire.membership.testing import SimulatedCluster
from thinwire.replica import Replica
from thinwire.testing.toy import same_bits

PROGRAM = Path(__file__).parents[1] / "support" / "member_process.py"


class Trainers:
    """Processes that run `trainer` in `folder` and meet at a lighthouse."""

    def __init__(self, trainer: str, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.lighthouse = Lighthouse("127.0.0.1", 0, heartbeat_timeout=1.5)
        self.running: list[subprocess.Popen[str]] = []

    def start(self, name: str, *stops: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAM), self.trainer, str(self.folder), self.lighthouse.address, name]
        with (self.folder / f"{name}.said").open("a") as said:
            one = subprocess.Popen([*command, *map(str, stops)], stdout=said, stderr=said, text=True,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        self.running.append(one)
        return one

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.said").read_text()

    def wait_for(self, file: str, *alive: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 600
        while not (self.folder / file).exists():
            assert all(one.poll() is None for one in alive) and time.monotonic() < until, (
                file,
                {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.said")},
            )
            time.sleep(0.05)

    def close(self) -> None:
        for one in self.running:
            one.kill()
            one.wait()
        self.lighthouse.close()


@pytest.fixture
def trainers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trainers]:
    if request.param == "torchtitan":
        pytest.importorskip("torchtitan")
    started = Trainers(request.param, tmp_path)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("trainers", ["hugging_face", "lightning", "torchtitan"], indirect=True)
def test_a_member_that_returns_after_the_end_gets_the_final_weights(trainers: Trainers) -> None:
    first, second = trainers.start("a", 9), trainers.start("b", 9)
    trainers.wait_for("a.at.9", first)
    trainers.wait_for("b.at.9", first, second)
    second.kill()
    second.wait()
    (trainers.folder / "a.9").touch()
    until = time.monotonic() + 600
    while "keeps the final weights for missing members" not in trainers.said("a"):
        assert first.poll() is None and time.monotonic() < until, trainers.said("a")[-3000:]
        time.sleep(0.05)
    second = trainers.start("b")  # from its checkpoint of step 8 to the end
    for name, one in (("a", first), ("b", second)):
        assert one.wait(600) == 0, trainers.said(name)[-3000:]
    ends = [torch.load(trainers.folder / f"{name}.pt") for name in "ab"]
    assert ends[0]["step"] == ends[1]["step"] == 24 and same_bits(ends[0]["weights"], ends[1]["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("trainers", ["hugging_face", "lightning", "torchtitan"], indirect=True)
def test_a_killed_member_returns_from_its_checkpoint(trainers: Trainers) -> None:
    first, second = trainers.start("a", 9, 17), trainers.start("b", 9)
    trainers.wait_for("a.at.9", first)
    trainers.wait_for("b.at.9", first, second)
    second.kill()
    second.wait()
    (trainers.folder / "a.9").touch()
    trainers.wait_for("a.at.17", first)  # a continues alone
    second = trainers.start("b", 17)  # from its checkpoint of step 8 to the step of the other
    trainers.wait_for("b.at.17", first, second)
    for name in "ab":
        (trainers.folder / f"{name}.17").touch()
    for name, one in (("a", first), ("b", second)):
        assert one.wait(600) == 0, trainers.said(name)[-3000:]
    ends = [torch.load(trainers.folder / f"{name}.pt") for name in "ab"]
    assert ends[0]["step"] == ends[1]["step"] == 24 and same_bits(ends[0]["weights"], ends[1]["weights"])


def test_a_member_that_waits_for_others_says_why(capsys) -> None:
    reasons, attached = ["the lighthouse refuses this replica"], object()
    member = SimulatedCluster().membership("a")

    def attach() -> object:
        if reasons:
            raise LinkError(reasons.pop())
        return attached

    assert members.meet(member, attach, 1e9) is attached
    assert "still waiting for other members: the lighthouse refuses this replica" in capsys.readouterr().err


def test_a_member_waits_for_others_no_longer_than_it_may(monkeypatch) -> None:
    """Also if that is less than, or no multiple of, the time in which members find each other."""
    member, now, tried = SimulatedCluster().membership("a"), [0.0], list[float]()
    times = member.timeouts
    monkeypatch.setattr(members, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def attach() -> Replica:
        tried.append(member.timeouts.view)
        now[0] += member.timeouts.view
        raise LinkError("nobody came")

    for seconds, due in ((10.0, 10.0), (90.0, 60.0)):
        now[0] = 0.0
        with pytest.raises(LinkError, match="nobody came"):
            members.meet(member, attach, seconds)
        assert tried[0] == due and seconds <= now[0] <= seconds + 2 and member.timeouts == times
        tried.clear()
