"""Commands whose reader leaves, as `head` does, whose terminal is closed, or whose locale lacks characters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_folders import read_events

from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.lab.cli import simulate

JOB = """
import torch

def model():
    return torch.nn.Linear(4, 1)

def batches(share):
    data = torch.Generator().manual_seed(share.index)
    while True:
        yield torch.randn(8, 4, generator=data)

def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()
"""


def _without_reader() -> int:
    """The end of a pipe to write to, whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["docs"], 0), (["new", "--help"], 0)])
def test_a_command_without_a_reader_ends_without_an_error(arguments: list[str], code: int) -> None:
    writer = _without_reader()
    ended = subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_an_error_that_nobody_reads_keeps_its_exit_code() -> None:
    writer = _without_reader()
    ended = subprocess.run([sys.executable, "-m", "thinwire", "trian"], stdout=writer, stderr=writer, check=False)
    os.close(writer)
    assert ended.returncode == 2


def test_a_command_that_begins_with_closed_output_works(tmp_path: Path) -> None:
    """As after `>&-`: Python has no sys.stdout then."""
    script = 'exec "$0" -m thinwire new job.py >&-'
    ended = subprocess.run(
        ["sh", "-c", script, sys.executable], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "def model()" in (tmp_path / "job.py").read_text()


def test_a_locale_without_unicode_spells_it_out() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "thinwire", "docs", "metrics"],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, text=True, encoding="latin-1", check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\u2192" in ended.stdout  # an arrow


def test_a_figure_is_utf_8_in_any_locale(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "thinwire", "plan", "topology", "--replicas", "4", "--plot", "graph.html"], cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, capture_output=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert "</html>" in (tmp_path / "graph.html").read_text(encoding="utf-8")


def test_a_run_whose_terminal_is_closed_stops_with_a_checkpoint(tmp_path: Path, terminal: None) -> None:
    """Nobody reads its output any more, and a shell sends two SIGHUPs. The same holds for `| tee`, which the Ctrl-C ends too."""
    (tmp_path / "job.py").write_text(JOB)
    folder = tmp_path / "run"
    options = ["--job", "job.py", "--carrier", "threads", "--steps", "1000000", "--out", str(folder)]
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "thinwire", "train", *options]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        with os.fdopen(reader) as output:
            told = [output.readline()]
            while told[-1] and not told[-1].startswith("run folder"):
                told.append(output.readline())
        events = [folder / f"events/replica-{index}.jsonl" for index in range(2)]
        while process.poll() is None and not all(path.exists() and _stepped(path) for path in events):
            time.sleep(0.1)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert process.wait() == 128 + signal.SIGHUP, told
    finally:
        process.kill()
        process.wait()
    assert RunRecord.load(folder).status.startswith("stopped")
    assert len([*folder.glob("checkpoints/*/step-*/manifest.json")]) == 2 and (folder / "report.html").exists()


def _stepped(path: Path) -> bool:
    return any(event["event"] == "step" for event in read_events(path))


def test_a_command_under_nohup_ignores_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(simulate, "main", lambda arguments: signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
        assert main(["simulate"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_name_may_begin_with_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no option, although options may be written with underscores."""
    monkeypatch.chdir(tmp_path)
    assert main(["hub", "invite", "--out", "_hub", "--publish_bytes", "1"]) == 2
    assert main(["new", "_job.py"]) == 0 and Path("_job.py").exists()
