"""A Replica inside a checkpoint of torch.distributed.checkpoint, with the real library."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_processes import SAVED, STEPS, STRATEGIES, Loop, through_and_resumed
from pages import ROOT
from resumed_optimizers import SAM
from torch.distributed.checkpoint.stateful import Stateful

import thinwire as tw
from thinwire.testing.toy import batch, same_bits, toy, weights

ALONE = {"no_dist": True}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("name", STRATEGIES)
def test_distributed_checkpoints_in_separate_folders_resume_bit_for_bit(name, tmp_path):
    """Rounds are in the air. A process group is not needed."""

    def replica(group):
        return through_and_resumed(STRATEGIES[name], group, tmp_path / str(group.rank), **ALONE)

    found = tw.run_threads(2, replica, timeout=600.0)
    for one in found:
        assert same_bits(one["through"], one["resumed"])
        assert one["in flight"] or name in ("sparse", "gradients"), "a round was in the air"
    assert same_bits(found[0]["through"], found[1]["through"])


def test_an_optimizer_inside_another_is_in_a_distributed_checkpoint(tmp_path):
    def sharp(group):
        model = toy(0)
        optimizer = SAM(model.parameters(), torch.optim.AdamW, lr=0.01)
        replica = tw.Replica(tw.streaming_diloco(every=6, fragments=2, delay=2), model, optimizer, group)
        return model, optimizer, replica

    def train(model, optimizer, steps):
        for step in steps:
            x, y = batch(0, 0, step)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    (group,) = tw.ThreadGroup.create(1)
    model, optimizer, replica = sharp(group)
    train(model, optimizer, range(1, SAVED + 1))
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(own | {"replica": replica}, checkpoint_id=tmp_path, **ALONE)
    train(model, optimizer, range(SAVED + 1, STEPS + 1))
    replica.finish()
    replica.close()
    through = weights(model)

    model, optimizer, replica = sharp(group)
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(own, checkpoint_id=tmp_path, **ALONE)
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    dcp.load({"replica": replica}, checkpoint_id=tmp_path, **ALONE)
    assert optimizer.base_optimizer.param_groups is optimizer.param_groups and replica.in_flight
    train(model, optimizer, range(SAVED + 1, STEPS + 1))
    replica.finish()
    replica.close()
    assert same_bits(through, weights(model))


@pytest.mark.slow
def test_two_processes_share_one_distributed_checkpoint(tmp_path):
    """The processes run under torchrun; the keys tell the replicas apart."""
    program = ROOT / "tests" / "support" / "dcp_processes.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program), str(tmp_path)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name in STRATEGIES:
        for one in found:
            assert same_bits(one[name]["through"], one[name]["resumed"])
        assert same_bits(found[0][name]["through"], found[1][name]["through"])
    keys = dcp.FileSystemReader(tmp_path / "streaming").read_metadata().state_dict_metadata
    assert {key.split(".")[1] for key in keys if key.startswith("replica.")} == {"replica-0", "replica-1"}


def test_unfit_distributed_checkpoints_are_refused(tmp_path):
    (group,) = tw.ThreadGroup.create(1)
    loop = Loop(STRATEGIES["streaming"], group)
    assert isinstance(loop.replica, Stateful)
    loop.train(1, SAVED)
    saved = loop.replica.state_dict()
    for name, change, error in (
        (
            "of another replica",
            lambda own: {"replica-1": own},
            "a state of replica-1, none of replica-0; resume with as many",
        ),
        (
            "of another strategy",
            lambda own: {"replica-0": own | {"strategy": "x"}},
            "was made by x, this run uses Strategy",
        ),
        (
            "damaged facts",
            lambda own: {"replica-0": own | {"facts": "[" * 9999}},
            "replica-0 in the checkpoint is damaged",
        ),
        ("damaged bytes", lambda own: {"replica-0": own | {"passing": b"12345678"}}, "is damaged"),
        ("no bytes", lambda own: {"replica-0": own | {"passing": 3}}, "is damaged"),
    ):
        with pytest.raises(tw.CheckpointError, match=error):
            loop.replica.load_state_dict(change(saved["replica-0"]))
        assert loop.replica.step == SAVED, name
    loop.end()
