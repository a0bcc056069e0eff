"""Every workload of examples/workloads trains with the real command, and resumes bit for bit after a kill."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord

FOLDER = ROOT / "examples" / "workloads"
WORKLOADS = sorted(path.stem for path in FOLDER.glob("*.py"))
HARDEST = ("digits", "speech")  # one has buffers; the other has two models with an optimizer each
SMALL = ["--every", "3", "--delay", "2", "--checkpoint-every", "4", "--keep", "9", "--eval-every", "4", "--steps", "7"]


def train(job: str, out: Path, *arguments: str) -> int:
    return main(
        ["train", "--job", str(FOLDER / f"{job}.py"), "--out", str(out), *SMALL, "--carrier", "threads", *arguments]
    )


def resumed(out: Path) -> bytes:
    """Resumes the run in `out` from step 4, with a round in the air, and returns its weights."""
    cut = out.with_name("cut")
    shutil.copytree(out, cut)
    for path in [*cut.glob("checkpoints/*/step-*"), cut / "model.safetensors"]:
        if not path.name.endswith("00000004"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["train", "--resume", "--out", str(cut)]) == 0
    return (cut / "model.safetensors").read_bytes()


@pytest.mark.parametrize("job", WORKLOADS)
def test_each_workload_trains(job: str, tmp_path: Path) -> None:
    """It trains with the default method and with a gradient method. The losses of its `evaluate` are recorded and finite."""
    assert len((FOLDER / f"{job}.py").read_text().splitlines()) < 150
    out = tmp_path / "run"
    assert train(job, out) == 0
    record = RunRecord.load(out)
    assert record.status == "finished" and record.summary.steps == 7
    named = dict(record.summary.losses)
    assert len(named) > 1 and next(iter(named.values())) == record.summary.eval_loss
    assert {f"evaluation: {name}" for name in named} <= {what for what, _ in record.summary.figures()}
    assert resumed(out) == (out / "model.safetensors").read_bytes()
    gradients = ["train", "--job", str(FOLDER / f"{job}.py"), "--strategy", "qsgd", "--steps", "3"]
    assert main([*gradients, "--carrier", "threads", "--out", str(tmp_path / "gradients")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("job", HARDEST)
def test_killed_processes_resume_to_the_weights_of_an_uninterrupted_run(job: str, tmp_path: Path) -> None:
    """kill -9 of both processes at the sixth batch. The resumed run equals threads that were not killed."""
    own = tmp_path / f"{job}.py"
    text = (FOLDER / f"{job}.py").read_text()
    seen = "\n\n_seen, _loss = [], loss\n\ndef loss(model, batch):\n    _seen.append(0)\n"
    seen += f"    if len(_seen) == 6 and Path({str(tmp_path / 'kill')!r}).exists():\n        os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    own.write_text("import os\nfrom pathlib import Path\n" + text + seen + "    return _loss(model, batch)\n")
    command = [sys.executable, "-m", "thinwire", "train"]
    begin = ["--job", str(own), *SMALL, "--out", str(tmp_path / "killed")]
    (tmp_path / "kill").touch()
    quiet = {"capture_output": True, "text": True, "check": False, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    killed = subprocess.run([*command, *begin], **quiet)
    assert killed.returncode == 1 and f"killed by signal {int(signal.SIGKILL)}" in killed.stderr, killed.stderr
    (tmp_path / "kill").unlink()
    done = subprocess.run([*command, "--resume", "--out", str(tmp_path / "killed")], **quiet)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = subprocess.run([*command, *begin[:-1], str(tmp_path / "whole")], **quiet)
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "killed/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_small_tensors_that_share_a_scale_cause_a_warning() -> None:
    """Only codecs of one bit warn, and only where most values are outside large matrices. The setting that the warning names ends it."""
    layers = torch.nn.Sequential(torch.nn.Conv1d(2, 32, 7), torch.nn.Conv1d(32, 32, 5), torch.nn.Conv1d(32, 1, 7))
    one_scale = tw.streaming_sign(codec=tw.codecs.Sign(block=512))
    said = one_scale.describe(layers, 2)
    found = re.search(
        r"warning: 5 of 6 tensors are smaller than a block of .*loss\. (Each\(.*\)) keeps them apart", said
    )
    assert found, said
    codec = tw.catalogue.parsing.parse(found[1])
    for strategy, model in (
        (tw.streaming_sign(codec=codec), layers),
        (tw.streaming_diloco(), layers),
        (one_scale, torch.nn.Linear(512, 512)),
    ):
        assert "smaller than a block" not in strategy.describe(model, 2)


def test_compare_shows_each_loss_of_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "--job", str(FOLDER / "graph.py"), "--steps", "4", "--carrier", "threads"]
    assert main([*command, "--strategies", "data_parallel", "diloco", "--out", str(tmp_path / "runs")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "strategy error cross entropy" in shown or ("error" in shown and "cross" in shown), shown
