"""Real processes at a real lighthouse: one replica is killed, the others continue, and it returns."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thinwire.membership.lighthouse import Lighthouse

pytestmark = [
    pytest.mark.slow,
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts a replica; its output goes to a file of its name."""
    lighthouse, running = Lighthouse("127.0.0.1", 0, heartbeat_timeout=1.5), []

    def replica(name: str, file: str) -> subprocess.Popen[str]:
        program = [
            sys.executable,
            str(Path(__file__).parents[2] / "support" / "elastic_process.py"),
            lighthouse.address,
            name,
            str(tmp_path / "last"),
        ]
        with (tmp_path / file).open("w") as out:
            running.append(subprocess.Popen(program, stdout=out, stderr=out, text=True))
        return running[-1]

    yield replica
    for process in running:
        process.kill()
        process.wait()
    lighthouse.close()


def lines(path: Path, word: str) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines() if line.startswith(word)]


def test_a_process_killed_with_sigkill_rejoins_the_rounds(
    tmp_path: Path, start: Callable[[str, str], subprocess.Popen[str]]
) -> None:
    replicas = {name: start(name, name) for name in "abc"}

    def wait_for(name: str, word: str, count: int) -> None:
        until = time.monotonic() + 600
        while len(lines(tmp_path / name, word)) < count:
            assert time.monotonic() < until, {path.name: path.read_text()[-500:] for path in tmp_path.iterdir()}
            time.sleep(0.1)

    wait_for("b", "round", 6)
    replicas["b"].kill()
    wait_for("a", "round", len(lines(tmp_path / "a", "round")) + 4)  # the others go on
    back = start("b", "b again")
    wait_for("b again", "caught_up", 1)  # from the others' anchors
    wait_for("b again", "round", 4)
    (tmp_path / "new").write_text(str(int(lines(tmp_path / "a", "round")[-1][1]) + 40))
    (tmp_path / "new").rename(tmp_path / "last")
    for process in (replicas["a"], replicas["c"], back):
        assert process.wait(600) == 0, {path.name: path.read_text()[-500:] for path in tmp_path.iterdir()}
    ends = [lines(tmp_path / name, "done") for name in ("a", "c", "b again")]
    assert ends[0] == ends[1] == ends[2] and len(ends[0]) == 1
