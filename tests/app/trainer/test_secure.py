"""Runs over a hub: what a hub may prescribe, and that bytes equal those of any other carrier."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hub_process import HubProcess
from hub_runs import ending, joiner, joining, reached, until
from namespaces import Namespaces, missing
from nat import CLOUD, DEVICE, ROUTERS, Masquerade
from run_folders import read_events

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.records.units import text_of_nbytes
from thinwire.app.trainer.run import Run
from thinwire.app.trainer.secure import run_of_hub
from thinwire.errors import ConfigurationError
from thinwire.net import invite

SMALL = dict(steps=12, every=4, delay=2, batch=2, sequence=32, eval_batches=2, checkpoint_every=5, model="nano")


@pytest.mark.parametrize(
    "line",
    [
        'text = ["/etc/passwd"]',
        'job = "/tmp/job.py"',
        'model = "/home/me/model.safetensors"',
        'model = "hf:some/model"',
        'models = ["nano", "hf:some/model"]',
        'tokenizer = "bpe:/tmp/words.json"',
        'tokenizer = "hf:some/model"',
        'strategy = "/tmp/evil.py:Strategy()"',
        'codec = "evil.py:Codec"',
        "optimizer = '\"/tmp/a b.py\":Inner(1)'",
    ],
)
def test_a_run_from_a_hub_may_not_name_local_files(line, tmp_path):
    """Otherwise somebody else would decide to read, send or run local files."""
    (tmp_path / "run.toml").write_text(line + "\n")
    with pytest.raises(ConfigurationError, match="the hub's run file names files or models in"):
        run_of_hub(tmp_path / "run.toml", elastic=False)


def test_a_run_from_a_hub_is_accepted(tmp_path):
    Run.of(**SMALL, codec="E3M0(block=32)", tokenizer="bpe:500").save(tmp_path / "run.toml")
    assert run_of_hub(tmp_path / "run.toml", elastic=False).data.tokenizer == "bpe:500"
    (tmp_path / "run.toml").write_text("[[[")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        run_of_hub(tmp_path / "run.toml", elastic=False)


def test_a_run_file_of_a_hub_that_is_refused_is_the_hubs_to_correct(tmp_path):
    """A replica's copy of it is written again at each start."""
    (tmp_path / "run.toml").write_text("[optimizer]\nbatch = 2\n")
    with pytest.raises(
        ConfigurationError,
        match=r"the hub's run file is refused \(batch is in \[optimizer\]; it belongs in \[data\]\); have",
    ):
        run_of_hub(tmp_path / "run.toml", elastic=False)


def arguments(**more: object) -> list[str]:
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in (SMALL | more).items()]
    return ["train", *(word for pair in given for word in pair)]


@pytest.mark.slow
def test_a_secure_run_on_one_machine_stops_and_resumes(tmp_path, capsys):
    """The resumed run equals an uninterrupted one."""
    assert main(arguments(carrier="threads", out=tmp_path / "threads")) == 0
    assert main(arguments(carrier="secure", out=tmp_path / "secure")) == 0
    model = (tmp_path / "threads/model.safetensors").read_bytes()
    assert (tmp_path / "secure/model.safetensors").read_bytes() == model
    threads, secure = (RunRecord.load(tmp_path / name).summary for name in ("threads", "secure"))
    assert threads.uploaded is None and secure.uploaded is not None and secure.uploaded >= secure.wire_bytes_sent
    assert capsys.readouterr().out.count("uploaded per replica") == 1
    for folder in ("hub", "hub/keys/replica-0"):
        assert all(
            not file.stat().st_mode & 0o077 for file in (tmp_path / "secure" / folder).iterdir() if file.is_file()
        )


@pytest.mark.slow
def test_hub_and_join_commands_survive_kills_of_hub_and_replica(tmp_path, capsys):
    """`thinwire hub` and two `thinwire join`: the hub is killed during the run, then a replica is, and all resume."""
    steps = {"steps": 60}
    assert main(arguments(carrier="threads", out=tmp_path / "threads", **steps)) == 0
    Run.of(**SMALL | steps).save(tmp_path / "run.toml")
    hub = HubProcess(tmp_path / "hub", "--run-file", str(tmp_path / "run.toml"))
    with ending(hub) as processes:
        token = str(hub.invite(2))
        processes += [joiner(token, name, tmp_path) for name in ("oslo", "bergen")]
        reached(tmp_path / "oslo", 8, processes)
        hub.kill()
        for process in processes:  # each says so while it dials again
            assert process.stdout and any("is not connected to the hub at" in line for line in process.stdout)
        hub.restart()
        reached(tmp_path / "oslo", 20, processes)
        for process in processes:
            process.kill()
            process.communicate()
        processes[:] = [joiner(token, name, tmp_path, "--resume") for name in ("oslo", "bergen")]
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        assert "replica 1 of 2: bergen, oslo" in said[0] and re.search("status +finished", said[0])
    model = (tmp_path / "threads/model.safetensors").read_bytes()
    assert {(tmp_path / name / "model.safetensors").read_bytes() for name in ("oslo", "bergen")} == {model}


@pytest.mark.slow
def test_hub_and_join_commands_work_with_an_averaging_hub(tmp_path, capsys):
    """The hub is killed during the run and restarts. The reducer waits for it, and no step is lost."""
    steps = {"steps": 60}
    assert main(arguments(carrier="threads", out=tmp_path / "threads", exchange="Star(0, Feedback())", **steps)) == 0
    run = Run.of(**SMALL | steps, carrier="secure", exchange="Star('hub', Feedback())")
    run.save(tmp_path / "run.toml")
    hub = HubProcess(tmp_path / "hub", "--run-file", str(tmp_path / "run.toml"), "--reduce", "2")
    with ending(hub) as processes:
        token = str(hub.invite(2))
        processes += [joiner(token, name, tmp_path) for name in ("oslo", "bergen")]
        reached(tmp_path / "oslo", 8, processes)
        hub.kill()
        hub.restart()
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert "averages for bergen, oslo" in (tmp_path / "hub/reducer.txt").read_text()
    model = (tmp_path / "threads/model.safetensors").read_bytes()
    assert {(tmp_path / name / "model.safetensors").read_bytes() for name in ("oslo", "bergen")} == {model}


NO_NAT = missing() or (None if Path(DEVICE).exists() else f"no {DEVICE} here")


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.skipif(NO_NAT is not None, reason=f"no network namespaces: {NO_NAT}")
def test_a_run_of_two_homes_behind_nat_and_a_cloud_survives_address_changes(silent, tmp_path, capsys):
    """The cloud has no route into a home. The address of each home changes during training, and no step is lost. With `silent`, no end
    is told of forgotten connections, and the run is elastic: each home is back in its group, or in the next one.
    """
    short = {"steps": 60}
    assert main(arguments(carrier="threads", out=tmp_path / "threads", **short)) == 0
    quarter = RunRecord.load(tmp_path / "threads").summary.wire_bytes_sent // 4
    Run.of(**SMALL | ({"steps": 240} if silent else short)).save(tmp_path / "run.toml")
    names, nat, folder = ("bergen", "oslo"), Masquerade(silent), tmp_path / "hub"
    with Namespaces(3, nat) as space:
        hung = threading.Timer(600.0, space.end_processes)
        hung.start()
        try:
            told = ["--listen", f"{CLOUD}:29530", "--run-file", str(tmp_path / "run.toml")]
            told += ["--elastic"] if silent else []
            hub = space.start(0, [sys.executable, "-m", "thinwire", "hub", "--out", str(folder), *told])
            assert hub.stdout and any("a replica joins by" in line for line in hub.stdout)
            hub.stdout.close()  # a hub whose output has no reader continues
            unasked = (
                f"import socket; one = socket.socket(); one.setblocking(False); one.connect_ex(('{ROUTERS}.1', 22))"
            )
            space.start(0, [sys.executable, "-c", unasked]).wait()
            for home in (1, 2):
                nat.move_after(home, quarter * home)
            token = str(invite(folder, 2))
            homes = [space.start(1 + place, joining(token, name, tmp_path)) for place, name in enumerate(names)]
            said = [home.communicate()[0] for home in homes]
            assert [home.returncode for home in homes] == [0, 0], said
        finally:
            hung.cancel()
            hung.join()
    assert nat.dropped and nat.moves == {1: 1, 2: 1} and bool(nat.unknown) is silent
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in names}
    if silent:
        summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in names]
        assert len(models) == 1 and all(one["steps_counted"] == one["steps_trained"] for one in summaries)
    else:
        audit = (folder / "audit.txt").read_text()
        assert all(f" connected {name}" in audit for name in names) and "has died" not in audit
        assert models == {(tmp_path / "threads/model.safetensors").read_bytes()}


UNHURRIED = """
import threading
from pathlib import Path

import torch
from torch import nn

x = torch.randn(64, 8)
end = Path(END)


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(share):
    return share.sampler(64)


def collate(samples):
    return x[torch.tensor(samples)]


def loss(model, batch):
    for _ in range(20):
        if not end.exists():
            threading.Event().wait(0.05)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def evaluate(model):
    return 0.0
"""  # each step takes a second until a file END exists


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (procps) is not installed")
def test_an_elastic_run_over_a_hub_survives_kills(tmp_path, capsys):
    """`thinwire hub --elastic` and three `thinwire join`: a replica is killed and restarted, then the hub is. Steps are slow until the test
    has seen both, so the run cannot end before.
    """
    (tmp_path / "job.py").write_text(UNHURRIED.replace("END", repr(str(tmp_path / "end"))))
    job = str(tmp_path / "job.py")
    Run.of(steps=3000, every=4, delay=2, batch=2, checkpoint_every=5, replicas=3, job=job).save(tmp_path / "run.toml")
    hub = HubProcess(tmp_path / "hub", "--elastic")
    names = ["bergen", "lima", "oslo"]

    with ending(hub) as processes:

        def together(name: str, names: list[str], after: int = 0) -> None:
            """Waits until a replica has held a round with exactly these members, after that number of rounds."""
            held = lambda: any(event["members"] == names for event in rounds_of(tmp_path / name)[after:])  # noqa: E731
            until(held, f"a round of {', '.join(names)} at {name}", processes)

        token, run_file = str(hub.invite(3)), str(tmp_path / "run.toml")
        processes += [joiner(token, name, tmp_path, run_file, "--group", "red") for name in names]
        together("lima", names)
        assert main(["hub", "list", "--out", str(tmp_path / "hub")]) == 0
        assert "elastic run red: bergen, lima, oslo" in capsys.readouterr().out
        until(lambda: any(tmp_path.glob("lima/checkpoints/lima/step-*")), "a checkpoint of lima", processes)
        asked = ["pgrep", "-f", f"thinwire.app.trainer.supervisor {tmp_path / 'lima'} "]
        (victim,) = map(int, subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())
        seen = len(rounds_of(tmp_path / "lima"))
        os.kill(victim, signal.SIGKILL)
        together("oslo", ["bergen", "oslo"])
        together("lima", names, seen)
        seen = len(rounds_of(tmp_path / "oslo"))
        hub.kill()
        hub.restart()
        together("oslo", names, seen)
        (tmp_path / "end").touch()
        said = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0], said
        assert "lima died at step" in said[1] and "lima is started again" in said[1]
    assert len({(tmp_path / name / "model.safetensors").read_bytes() for name in names}) == 1
    for name, other in (("bergen", "oslo"), ("oslo", "bergen")):  # these two were never killed
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["status"] == "finished"
        # Otherwise some of its samples may belong to others.
        if all(name in event["members"] for event in rounds_of(tmp_path / other)):
            assert summary["steps_counted"] == summary["steps_trained"]
    assert not subprocess.run(
        ["pgrep", "-f", f"thinwire.app.trainer.supervisor {tmp_path}"], capture_output=True
    ).stdout


@pytest.mark.slow
def test_an_elastic_run_starts_its_own_hub(tmp_path, capsys):
    assert main([*arguments(carrier="secure", replicas=3, least=3, steps=60, out=tmp_path / "run"), "--elastic"]) == 0
    ends = [read_events(path)[-1]["summary"]["weights"] for path in (tmp_path / "run").glob("events/*.jsonl")]
    assert len(ends) == 3 and len(set(ends)) == 1
    summary = RunRecord.load(tmp_path / "run").summary
    assert summary.uploaded is not None and summary.wire_bytes_sent / 2 <= summary.uploaded
    assert ("uploaded per replica", text_of_nbytes(summary.uploaded)) in summary.figures()
    assert (tmp_path / "run/hub/audit.txt").stat().st_size > 0


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the events of rounds that the replica in `folder` has written."""
    events = [event for path in folder.glob("events/*.jsonl") for event in read_events(path)]
    return [event for event in events if event["event"] == "round" and event["committed"]]
