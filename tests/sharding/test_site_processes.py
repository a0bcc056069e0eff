"""2 × 2 × 2 real processes: the same bits as threads, and on each level the bytes that the formulas say."""

from __future__ import annotations

import pytest
import torch
from site_processes import SHARDINGS, WORLD, run_world
from sites import plainly, train

from thinwire.comm import run_threads
from thinwire.sharding import Layout, by_level

pytestmark = pytest.mark.slow
LEVELS = (2, 4, 8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return run_world(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("name", SHARDINGS)
def test_processes_are_threads(world, name):
    threads = run_threads(WORLD, lambda group: train(group, SHARDINGS[name], steps=3, micro=2))
    for process, thread in zip([results[name] for results in world], threads, strict=True):
        assert torch.equal(process.final, thread.final) and process.losses == thread.losses
        assert process.counts == thread.counts


@pytest.mark.parametrize("name", ["ZeRO-3", "three levels"])
def test_without_rounding_it_is_plain_data_parallel(world, name):
    for results in world:
        torch.testing.assert_close(results[name].final, plainly(WORLD, 3, micro=2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHARDINGS)
def test_each_level_carries_what_was_predicted(world, name):
    for rank, results in enumerate(world):
        seen = results[name]
        due = Layout(SHARDINGS[name], WORLD).sent(rank, seen.numels, micro_batches=2)
        for counts in seen.counts:
            assert by_level(counts, rank, LEVELS) == by_level(due, rank, LEVELS)
