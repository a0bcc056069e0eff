"""The bridge to accelerate: one replica changes nothing, and two processes agree without an all-reduce of gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
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


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("scale", [None, 2.0**10, 2.0**127], ids=["no scaler", "scaler", "skipping"])
def test_accumulating_by_hand_takes_the_steps_of_the_loop(scale, to_none):
    """`step` may be called for each batch. A step that the scaler skips counts, and trains nothing."""
    steps: list[int] = []

    def heard(event: str, step: int, **fields: object) -> None:
        if event == "depart":
            steps.append(step)

    def trained(attached: bool) -> tuple[torch.Tensor, int]:
        accelerator, random = Accelerator(cpu=True), torch.Generator().manual_seed(0)
        if scale:
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        plain = torch.nn.Linear(4, 1)
        with torch.no_grad():
            plain.weight.copy_(torch.randn(1, 4, generator=random))
            plain.bias.zero_()
        model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.5))
        skipped = []
        with LocalSGD(accelerator, model, 3, enabled=attached, observer=heard) as local_sgd:
            for index in range(24):
                x = torch.randn(8, 4, generator=random)
                accelerator.backward((model(x) - 3 * x.sum(1, keepdim=True)).square().mean() / 4)
                if index % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
                    skipped.append(optimizer.step_was_skipped)
                local_sgd.step()
        return plain.weight.detach().clone(), sum(skipped)

    due, skipped = trained(False)
    got, _ = trained(True)
    assert same_bits(got, due) and steps == [3, 6] and (0 < skipped < 6) == (scale == 2.0**127)


def test_unlike_numbers_of_batches_are_said_on_entry():
    def replica(group: tw.Group) -> None:
        with lock:
            accelerator, plain = Accelerator(cpu=True), torch.nn.Linear(2, 1)
            prepared = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
            accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(4 + group.rank)))
        with LocalSGD(accelerator, prepared[0], 2, group=group):
            prepared[1].step()

    lock = threading.Lock()
    with pytest.warns(RuntimeWarning, match=r"number of batches is 5 on replica 1 and 4 on replica 0"):
        tw.run_threads(2, replica, timeout=60)


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
