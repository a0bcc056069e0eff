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
STEPS = 1200  # 25 seconds, in which the killed replica can return


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts a replica; its output goes to a file of its name."""
    lighthouse, running = Lighthouse("127.0.0.1", 0, heartbeat_timeout=1.5), []

    def replica(name: str, file: str) -> subprocess.Popen[str]:
        program = [
            sys.executable,
            str(Path(__file__).parents[1] / "support" / "elastic_process.py"),
            lighthouse.address,
            name,
            str(STEPS),
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
    until = time.monotonic() + 600
    while len(lines(tmp_path / "b", "round")) < 6 and time.monotonic() < until:
        time.sleep(0.1)
    replicas["b"].kill()
    seen = len(lines(tmp_path / "a", "round"))
    while len(lines(tmp_path / "a", "round")) < seen + 4 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(lines(tmp_path / "a", "round")) >= seen + 4, "the others stand still"
    back = start("b", "b again")
    for process in (replicas["a"], replicas["c"], back):
        assert process.wait(600) == 0, {path.name: path.read_text()[-500:] for path in tmp_path.iterdir()}
    ends = [lines(tmp_path / name, "done") for name in ("a", "c", "b again")]
    assert ends[0] == ends[1] == ends[2] and ends[0][0][1] == str(STEPS)
    assert lines(tmp_path / "b again", "caught_up"), "it began from the others' anchors"
