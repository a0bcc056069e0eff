"""Processes that read through `share.sampler`, one of which is killed: the records name the samples that the job was given."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from run_folders import read_events

from thinwire.app.records.run_record import RunRecord
from thinwire.data_ledger import Order

pytestmark = pytest.mark.slow
SAMPLES = 900
JOB = f"""
import os, signal, time
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Linear(4, 1)

def batches(share):
    out = Path(f"read-{{share.index}}.txt").open("a", buffering=1)
    taken = 0
    for index in share.sampler({SAMPLES}):
        out.write(f"{{index}}\\n")
        taken += 1
        if share.index == 1 and taken == 60 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        yield torch.full((4,), float(index % 7))

def collate(samples):
    return torch.stack(samples)

def loss(model, batch):
    return model(batch).square().mean()
"""


def test_samples_are_trained_once_or_named_as_lost_when_a_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "kill").touch()
    asked = ["--elastic", "--replicas", "3", "--least", "2", "--steps", "200", "--batch", "2"]
    asked += ["--every", "10", "--delay", "2", "--checkpoint-every", "20"]
    command = [sys.executable, "-m", "thinwire", "train", "--job", "job.py", "--out", "run", *asked]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not (tmp_path / "kill").exists(), done.stdout[-2000:] + done.stderr[-3000:]
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "finished"
    names = [f"replica-{n}" for n in range(3)]
    said = [
        event for n in names for event in read_events(tmp_path / f"run/events/{n}.jsonl") if event["event"] == "data"
    ]
    told = {
        kind: sorted({(name, x) for event in said for name, a, b in event[kind] for x in range(a, b)})
        for kind in ("trained", "lost", "returned")
    }
    trained, lost = [x for _, x in told["trained"]], [x for _, x in told["lost"]]
    assert len(trained) == len(set(trained)) and len(lost) == len(set(lost)) and not set(trained) & set(lost)
    assert (record.summary.samples_trained, record.summary.samples_lost) == (len(trained), len(lost))
    assert {name for name, _ in told["lost"] + told["returned"]} <= {"replica-1"}
    order = Order(SAMPLES, 0, 3)
    for number, name in enumerate(names):  # every sample recorded as trained was given to the job
        given = Counter(map(int, (tmp_path / f"read-{number}.txt").read_text().split()))
        own = order.samples_at(np.array([x for who, x in told["trained"] if who == name], np.int64))
        assert not Counter(own.tolist()) - given, name
    assert len(trained) > SAMPLES / 2
