"""The bridge to accelerate: one replica changes nothing, and two processes agree without an all-reduce of gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import thinwire as tw
from thinwire.membership.testing.cluster import SimulatedCluster
from thinwire.testing.toy import same_bits

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate_loop import BATCHES, STREAMING, train

    from thinwire.integrations.accelerate import LocalSGD

pytestmark = pytest.mark.usefixtures("late_imports")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_replica_with_average_changes_nothing(tmp_path, accumulate):
    """Law 11, also after a resume: the weights equal those of the loop without Thinwire, bit for bit."""
    due, *_ = train(None, accumulate)
    local = {"local_sgd_steps": 4}
    got, accelerator, _ = train(local, accumulate, save=tmp_path / "state")
    assert same_bits(got, due) and accelerator._custom_objects == []
    assert same_bits(train(local, accumulate, load=tmp_path / "state")[0], due)


def test_unsupported_settings_are_refused(tmp_path):
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    with pytest.raises(tw.ConfigurationError, match="one of the two is needed"):
        LocalSGD(accelerator, model)
    with pytest.raises(tw.ConfigurationError, match="every=0"):
        LocalSGD(accelerator, model, 0)
    with pytest.raises(tw.ConfigurationError, match=r"a Membership: .*replica\.step < steps"):
        LocalSGD(accelerator, model, 2, group=SimulatedCluster().membership("a"))
    with pytest.raises(tw.ConfigurationError, match="prepared no optimizer"), LocalSGD(accelerator, model, 2):
        pass
    train({"local_sgd_steps": 4}, save=tmp_path)
    (tmp_path / "thinwire/replica-0").rename(tmp_path / "thinwire/replica-7")
    with pytest.raises(tw.CheckpointError, match="the state of this replica is needed"):
        train({"local_sgd_steps": 4}, load=tmp_path)


@pytest.mark.slow
def test_two_processes_end_with_equal_weights(tmp_path):
    program = Path(__file__).parents[1] / "support/accelerate_loop.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(program), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name in ("weights", "resumed", "average", "bare", "disabled"):
        assert same_bits(zero[name], one[name])
    assert same_bits(zero["resumed"], zero["weights"]) and same_bits(zero["disabled"], zero["bare"])
    assert zero["wrapped"] and not same_bits(zero["average"], zero["bare"])
    periods = BATCHES // STREAMING.schedule.every
    assert zero["packets"] == one["packets"] == periods * STREAMING.nbytes_per_period(zero["shapes"], 2)
    assert done.stderr.count("where DistributedDataParallel sends") == 3
