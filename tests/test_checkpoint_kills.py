"""A process is killed at each write of a save: the next load finds a complete checkpoint, no finished one is lost, and the next save clears up."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from killed_writes import Change, Saver, replica_of, train_and_save

import thinwire as tw
from thinwire import checkpoint


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saver]:
    saver = Saver(tmp_path_factory.mktemp("base"))
    yield saver
    saver.close()


@pytest.fixture(scope="module")
def undisturbed(saver: Saver, tmp_path_factory: pytest.TempPathFactory) -> tuple[Change, ...]:
    outcome = saver.save_until(tmp_path_factory.mktemp("undisturbed") / "run")
    assert outcome.killed is None and outcome.saved == (3, 3) and len(outcome.changes) > 40
    return outcome.changes


def test_a_checkpoint_is_flushed_before_it_gets_its_name(undisturbed: tuple[Change, ...]) -> None:
    """A power cut loses what was not flushed; none of that is visible under a final name."""
    named = [n for n, one in enumerate(undisturbed) if one.what == "rename" and one.paths[0].endswith(".partial")]
    assert len(named) == 2
    for place in named:
        partial, final = undisturbed[place].paths
        begun = max(n for n, one in enumerate(undisturbed[:place]) if one == Change("mkdir", (partial,)))
        before = undisturbed[begun:place]
        flushed = {one.paths[0]: n for n, one in enumerate(before) if one.what == "flush"}
        made = {one.paths[-1]: n for n, one in enumerate(before) if one.what in ("rename", "write", "open", "chmod")}
        whole = [path for path in made if "/.tmp" not in path and not path.endswith(".replaced")]
        assert len(whole) == 4 and all(flushed[path] > made[path] for path in whole)
        assert flushed[partial] > max(made.values()) - len(whole)
        assert Change("flush", (str(Path(final).parent),)) in undisturbed[place:]


def _survives(saver: Saver, folder: Path, number: int) -> None:
    outcome = saver.save_until(folder, number)
    assert outcome.killed, "the process ended by itself"
    where = f"killed before change {number}, {outcome.killed}"
    found, skipped = checkpoint.newest(folder)
    assert found and found.step >= max(outcome.saved, default=2), where
    assert found.step in (2, 3) and not skipped, where
    steps = [checkpoint.read(path).step for path in checkpoint.found_in(folder)]  # every visible checkpoint is complete
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), where

    def resumed(group: tw.Group) -> int:
        with replica_of(group) as replica:
            checkpoint.load(found, replica)
            assert replica.step == found.step
            return train_and_save(replica, folder)

    (step,) = tw.run_threads(1, resumed, timeout=600.0)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{n:08d}" for n in (found.step, step)], where  # no file of the killed save remains


def test_a_kill_at_some_writes_leaves_a_whole_checkpoint(
    saver: Saver, tmp_path: Path, undisturbed: tuple[Change, ...]
) -> None:
    """Four drawn writes, the last one, and each at which a checkpoint changes its name."""
    renames = [n for n, one in enumerate(undisturbed) if one.what == "rename" and "/.tmp" not in one.paths[0]]
    drawn = random.Random(12).sample(range(len(undisturbed)), 4)
    for number in sorted({*renames, *drawn, len(undisturbed) - 1}):
        _survives(saver, tmp_path / str(number), number)


@pytest.mark.slow
def test_a_kill_at_every_write_leaves_a_whole_checkpoint(
    saver: Saver, tmp_path: Path, undisturbed: tuple[Change, ...]
) -> None:
    for number in range(len(undisturbed)):
        _survives(saver, tmp_path / str(number), number)


@pytest.mark.slow
def test_sharded_replicas_that_are_killed_resume_bit_for_bit(tmp_path: Path) -> None:
    """Two replicas of two ranks under torchrun, with FSDP2: what modules and optimizers hold is trees, some of them with shards in them."""

    def run(folder: str, *killed_at: str) -> int:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        program = Path(__file__).parent / "support/killed_sites.py"
        command = [*torchrun, str(program), str(tmp_path / folder), str(tmp_path / folder), *killed_at]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode

    for folder in ("through", "killed"):
        (tmp_path / folder).mkdir()
    assert run("through") == 0
    assert run("killed", "8") != 0 and not [*tmp_path.glob("killed/*.pt")]
    assert run("killed") == 0
    for rank in range(4):
        through, resumed = (torch.load(tmp_path / folder / f"{rank}.pt") for folder in ("through", "killed"))
        torch.testing.assert_close(resumed, through, rtol=0.0, atol=0.0)
