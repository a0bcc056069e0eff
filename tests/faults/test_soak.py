"""Many faults at random, with real processes and in a time of their own; what survived is in the output (-s)."""

from __future__ import annotations

import random
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from stage import Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: pip install thinwire[elastic]"),
]
KINDS = {
    "kill -9": 6, "freeze": 5, "damaged bytes": 3, "disk full": 2, "lighthouse killed": 2, "lighthouse frozen": 1, "all killed": 1,
    "wrong model": 1, "a name that is taken": 1,
}  # fmt: skip


def test_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = random.SystemRandom().randrange(10_000)
    chance, stage = random.Random(seed), Stage(tmp_path)
    said = [f"soak of processes, seed {seed}"]
    print(said)
    try:
        stage.begin()
        until = time.monotonic() + 100
        while sum(stage.done.values()) < 80 and time.monotonic() < until:
            (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
            stage.fault(kind, chance)
            pause = time.monotonic() + chance.uniform(0.0, 1.5)
            while time.monotonic() < pause:
                stage.tend()
                time.sleep(0.05)
        stage.end()
        said.append(stage.figures(stage.reckon()))
        with capsys.disabled():
            print("\n" + "\n".join(said))
    finally:
        stage.clear()
