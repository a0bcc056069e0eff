"""Every workload of examples/workloads runs among replicas that come and go, one of which is killed."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_runs import NAMES, simulated
from pages import ROOT

from thinwire.app.records.run_record import RunRecord
from thinwire.app.report.report import write_report
from thinwire.app.trainer import launch, run_folder
from thinwire.app.trainer.member import MemberSpec
from thinwire.app.trainer.place import ElasticPlace
from thinwire.app.trainer.run import Run
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous

FOLDER = ROOT / "examples" / "workloads"
WORKLOADS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SimulatedCluster:
    return simulated(monkeypatch)


def survive(record: RunRecord) -> None:
    """The losses that the job names are finite, and all that the survivors trained is in the agreed weights."""
    assert record.status == "finished" and len(record.summary.losses) > 1
    assert all(math.isfinite(loss) for loss in record.summary.losses.values())
    assert [replica.called for replica in record.replicas] == list(NAMES)
    for steps in (record.steps[0], record.steps[2]):
        assert 0 < steps.counted == steps.trained and steps.trained + steps.jumped == record.summary.steps


@pytest.mark.parametrize("job", WORKLOADS)
def test_one_is_killed_for_good(job: str, cluster: SimulatedCluster, tmp_path: Path) -> None:
    """The others end with the same weights; the page says how many steps of the killed one they hold."""
    asked = {"replicas": 3, "steps": 12, "every": 3, "delay": 1, "checkpoint_every": 0, "eval_every": 6}
    run, folder = Run.of(carrier="elastic", job=str(FOLDER / f"{job}.py"), **asked), tmp_path / "run"
    log = folder / "events/replica-1.jsonl"

    def kill() -> None:
        """In the first round after its sixth step."""
        if log.read_text().count('"event":"step"') >= 6:
            cluster.kill("replica-1")

    def mortal(name: str) -> Any:
        return launch.train_here(run, ElasticPlace(MemberSpec(ThreadRendezvous(cluster, name), name), folder, False))

    for nth in range(1, 200):
        cluster.at("replica-1", "post", kill, nth)
    run_folder.new_folder(run, folder, False)
    ended = cluster.play(dict.fromkeys(NAMES, mortal))
    assert isinstance(ended["replica-1"], Killed) and ended["replica-0"]["weights"] == ended["replica-2"]["weights"]
    record = RunRecord.load(folder)
    survive(record)
    dead = record.steps[1]
    assert 0 < dead.counted <= dead.trained < 12
    named = f"replica-1 {dead.trained} trained, {dead.jumped} jumped, {dead.counted} counted"
    assert named in write_report([RunRecord.load(folder)], tmp_path / "page.html").read_text()


DIES = '''

import os, signal, time
from pathlib import Path

_here, _batches = Path({here!r}), batches


def batches(share):
    """Replica 1 is killed when it has taken part in a round; until then all have at most 6 batches."""
    log, kill = _here / "run/events/replica-1.jsonl", _here / "kill"
    for number, batch in enumerate(_batches(share)):
        while kill.exists() and number >= 6:
            if share.index == 1 and '"committed":true' in log.read_text():
                kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        yield batch
'''


@pytest.mark.slow
@pytest.mark.parametrize("job", WORKLOADS)
def test_a_process_is_killed_and_returns(job: str, tmp_path: Path) -> None:
    """kill -9 of one of three, all of which are needed for a round."""
    (tmp_path / "kill").touch()
    (tmp_path / f"{job}.py").write_text((FOLDER / f"{job}.py").read_text() + DIES.format(here=str(tmp_path)))
    command = [sys.executable, "-m", "thinwire", "train", "--job", str(tmp_path / f"{job}.py"), "--elastic"]
    command += ["--replicas", "3", "--least", "3", "--timeout", "9999", "--checkpoint-every", "4"]
    done = subprocess.run(
        [*command, "--steps", "24", "--every", "3", "--delay", "1", "--out", str(tmp_path / "run")],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0 and not (tmp_path / "kill").exists(), said[-5000:]
    assert "replica-1 died at step" in said and signal.SIGKILL.name in said, said[-5000:]
    record = RunRecord.load(tmp_path / "run")
    survive(record)
    assert [replica.sessions for replica in record.replicas] == [1, 2, 1]
    (weights,) = {replica.end["weights"] for replica in record.replicas if replica.end}
    assert weights and all(replica.end for replica in record.replicas)
