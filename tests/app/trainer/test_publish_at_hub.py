"""Replicas elsewhere publish through a hub, and a follower gets every bit: the real commands, and kills in between."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hub_process import HubProcess
from hub_runs import ending, joiner, reached, started, until
from safetensors.torch import load_file

from thinwire.app.trainer.run import Run

SMALL = dict(steps=60, every=4, delay=2, batch=2, sequence=32, eval_batches=2, checkpoint_every=5, model="nano")


def follower(token: str, folder: Path) -> list[str]:
    names = ["--name", "follower-kyoto", "--keys", str(folder / "keys"), "--out", str(folder / "live")]
    return [sys.executable, "-m", "thinwire", "follow", token, *names, "--json"]


def check_bits(live: Path, model: Path) -> None:
    """The follower's folder has the replica's final model, rounded to bf16."""
    here, there = load_file(live / "model.safetensors"), load_file(model / "model.safetensors")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name].view(torch.int16), there[name].bfloat16().view(torch.int16)) for name in here)


@pytest.mark.slow
def test_a_follower_of_a_hub_gets_every_bit_in_spite_of_kills(tmp_path: Path) -> None:
    """One of two replicas publishes. The hub is killed, then both replicas are, and resume."""
    Run.of(**SMALL).save(tmp_path / "run.toml")
    hub = HubProcess(tmp_path / "hub", "--run-file", str(tmp_path / "run.toml"), "--publishers", "oslo")
    served = tmp_path / "hub/published/oslo/list.json"

    def fresh() -> bool:
        return served.exists() and json.loads(served.read_text())["step"] >= 4

    with ending(hub) as processes:
        token = str(hub.invite(3))
        publishes = {"oslo": ["--publish"], "bergen": []}
        processes += [joiner(token, name, tmp_path, *more) for name, more in publishes.items()]
        processes.append(started(follower(token, tmp_path)))
        until(fresh, "a version at the hub", processes)
        hub.kill()
        hub.restart()
        reached(tmp_path / "oslo", 20, processes)
        for process in processes[:2]:
            process.kill()
            process.communicate()
        processes[:2] = [joiner(token, name, tmp_path, *more, "--resume") for name, more in publishes.items()]
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], said
    newest = json.loads(said[2].splitlines()[-1])["newest"]
    assert newest["over"] and newest["step"] == 60
    check_bits(tmp_path / "live", tmp_path / "oslo")
    assert not (tmp_path / "bergen/published").exists()


@pytest.mark.slow
def test_a_follower_of_an_elastic_run_reads_the_newest_of_all_publishers(tmp_path: Path) -> None:
    """Both replicas publish into the hub's folder, which still has the versions after the run."""
    Run.of(**SMALL, replicas=2).save(tmp_path / "run.toml")
    hub = HubProcess(tmp_path / "hub", "--elastic", "--publishers", "oslo", "bergen")
    with ending(hub) as processes:
        token, names = str(hub.invite(3)), ("oslo", "bergen")
        more = str(tmp_path / "run.toml"), "--publish"
        processes += [joiner(token, name, tmp_path, *more) for name in names]
        processes.append(started(follower(token, tmp_path)))
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], said
    assert json.loads(said[2].splitlines()[-1])["newest"]["over"]
    check_bits(tmp_path / "live", tmp_path / "oslo")
    lists = [json.loads((tmp_path / "hub/published" / name / "list.json").read_text()) for name in names]
    assert [one["step"] for one in lists] == [60, 60] and all(one["over"] for one in lists)
    assert lists[0]["fragments"][0]["state"] == lists[1]["fragments"][0]["state"]
