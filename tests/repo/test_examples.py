"""Every example runs and prints what it promises."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT

EXAMPLES = sorted(path.name for path in ROOT.glob("examples/*.py"))


def run(name: str, *arguments: str, folder: Path | None = None) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, stdin=subprocess.DEVNULL, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def here(monkeypatch, capfd):
    """Runs an example in this process, where torch is already loaded; the example may start other processes."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with torch.random.fork_rng(devices=[]):  # the example seeds torch's generator
            try:
                runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
            except SystemExit as ended:
                assert not ended.code
        return str(capfd.readouterr().out)

    return run


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_begin_with_the_command_to_paste(name):
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) < (130 if name == "own_pieces.py" else 80)  # own_pieces.py holds four pieces
    assert f"python examples/{name}" in text.split('"""')[1]


def test_example_01_own_loop_runs(here):
    losses = re.findall(r"0\.\d{8}", here("01_own_loop.py", "--steps", "25", "--every", "10").splitlines()[-1])
    assert len(losses) == 2 and losses[0] == losses[1]


@pytest.mark.slow
def test_example_02_processes_runs():
    """tests/app/trainer/test_training_processes.py and tests/comm/test_carriers.py also hold that two processes over gloo agree."""
    sent = re.findall(r"([\d,]+) bytes sent", run("02_processes.py", "--steps", "25"))
    assert len(sent) == 2 and sent[0] == sent[1] != "0"


def test_example_03_compares_strategies(here):
    rows = re.findall(r"(\w+)\s*│\s*([\d.]+)\s*│\s*([\d.]+)", here("03_compare_strategies.py", "--steps", "20"))
    bits = {name: float(b) for name, _, b in rows}
    assert list(bits) == ["data_parallel", "diloco", "streaming_diloco", "eager_diloco"]
    assert bits["data_parallel"] >= 32 > 10 * bits["streaming_diloco"]


@pytest.mark.slow
def test_example_04_runs_fsdp_inside_a_replica():
    sums = re.findall(r"sum of \|weights\| ([\d.]+)", run("04_fsdp_inside_a_replica.py", "--steps", "12"))
    assert len(sums) == 4 and len(set(sums)) == 1


@pytest.mark.slow
def test_example_14_runs_tensor_parallelism_inside_a_replica():
    out = run("14_tensor_parallel.py", "--steps", "12")
    sums = re.findall(r"([\d,]+) of ([\d,]+) parameters, loss [\d.]+, sum of \|weights\| ([\d.]+)", out)
    assert len(sums) == 4 and len(set(sums)) == 1
    here, whole = (int(count.replace(",", "")) for count in sums[0][:2])
    assert here < whole


def test_example_05_trains_over_a_thin_link(here):
    out = here("05_thin_link.py", "--steps", "21", "--link", "1mbit", "--delays", "0", "5")
    waited = {int(d): float(w) for d, w in re.findall(r"(\d+)\s*│\s*[\d.]+\s*│\s*([\d.]+)", out)}
    assert waited[0] > waited[5]


@pytest.mark.slow
def test_example_07_trains_with_just_one_byte():
    ends = re.findall(
        r"(\w+): loss .* before, ([\d.]+) after; ([\d,]+) bytes",
        run("07_just_one_byte.py", "--pretrain", "10", "--steps", "6"),
    )
    assert [name for name, *_ in ends] == ["amber", "birch", "cedar"] and len({after for _, after, _ in ends}) == 1
    assert [int(nbytes) for *_, nbytes in ends] == [3 * 52 + 3 * 104, 3 * 52 + 3 * 104, 3 * 104]


@pytest.mark.slow
def test_example_08_solves_a_min_max_problem():
    out = run("08_min_max.py", "--numbers", "8", "--iterations", "80", "--replicas", "3")
    left = {
        name.strip(): float(left) for name, left in re.findall(r"^(\w.+?)│ +[\d.]+ │ ([\d.e+-]+)$", out, re.MULTILINE)
    }
    assert len(left) == 4 and left["MASHA1, a random fifth"] < left["extragradient, the largest fifth"]


@pytest.mark.slow
def test_example_09_robust_regression_saves_and_resumes(tmp_path):
    """One replica resumes from its checkpoint; another, whose checkpoint was deleted, joins it."""
    out = str(tmp_path / "robust")
    whole = run("09_robust_regression.py", "--iterations", "400", "--out", out)
    (tmp_path / "robust-2.safetensors").unlink()
    again = run("09_robust_regression.py", "--iterations", "600", "--out", out)
    slopes = [float(slope) for slope in re.findall(r"slope ([\d.e+-]+)", whole + again)]
    assert len(slopes) == 3 and slopes[2] < slopes[1] < slopes[0]
    (_, plain), (clean, robust) = [
        map(float, ends) for ends in re.findall(r"square ([\d.]+), with the worst shift ([\d.]+)", again)
    ]
    assert robust < 0.9 * plain and clean < robust


@pytest.mark.slow
def test_example_13_routes_each_text_to_the_expert_of_its_domain(tmp_path):
    """The loss of the mixture is close to the loss of the best single expert for that domain."""
    out = run("13_experts.py", "--out", "all", "--steps", "40", folder=tmp_path)  # a long path would fold in the table
    rows = re.findall(
        r"/(easy|medium|hard)\.txt +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) .*?(\w+) [\d.]+ %$", out, re.MULTILINE
    )
    assert [name for name, *_ in rows] == [expert for *_, expert in rows] == ["easy", "medium", "hard"]
    assert all(float(mixed) < min(map(float, alone)) + 0.0173 for _, mixed, *alone, _ in rows)


def test_example_12_own_loop_trains_over_its_hub(here, monkeypatch):
    """The only replica is the command that the example starts, run here. The next test runs two processes."""

    class Process:
        def __init__(self, command):
            self.said = here(Path(command[1]).name, *command[2:])

        def wait(self):
            print(self.said)
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    out = here("12_own_loop_over_a_hub.py", "--replicas", "1", "--steps", "25")
    assert re.search(r"replica-0: sum of \|weights\| \d+\.\d{9}, \d+ bytes sent", out)


@pytest.mark.slow
def test_example_12_replicas_agree_over_a_hub():
    """tests/net/secure/test_reconnect.py also holds that replicas agree over a hub."""
    sums = re.findall(r"replica-\d: sum of \|weights\| ([\d.]+)", run("12_own_loop_over_a_hub.py", "--steps", "25"))
    assert len(sums) == 2 and sums[0] == sums[1]


@pytest.mark.slow
def test_example_10_hugging_face_trainer_runs(tmp_path):
    command = ["10_hugging_face_trainer.py", "--out", str(tmp_path), "--steps", "8"]
    sums = re.findall(r"replica \d: step 8, sum of \|weights\| ([\d.]+)", run(*command))
    assert len(sums) == 2 and sums[0] == sums[1]


def test_example_06_pieces_runs(here):
    out = here("06_pieces.py", "--model", "100m", "--replicas", "3")
    assert "100m" not in out and out.count("(predicted)") == 5
    assert "what to do" in out and "eager updates" in out


@pytest.mark.slow
def test_example_own_pieces_runs():
    kept = re.findall(r"^(\w+)\(.*\) keeps (\d+) laws", run("own_pieces.py"), re.MULTILINE)
    assert [name for name, _ in kept] == ["Truncated", "Smoothed", "DirectBelow", "RoundedOnce"] and all(
        int(n) >= 8 for _, n in kept
    )


@pytest.mark.slow
def test_example_11_lightning_trainer_runs_and_resumes(tmp_path):
    """Two replicas end with equal weights and resume from their checkpoints."""
    for more in ((), ("--resume", "last")):
        epochs = "2" if more else "1"
        out = run("11_lightning_trainer.py", "--out", str(tmp_path), "--epochs", epochs, *more)
        ends = re.findall(r"replica \d: (step \d+, loss [\d.]+)", out)
        assert len(ends) == 2 and ends[0] == ends[1] and ends[0].startswith(f"step {32 * int(epochs)},")
    kept = {path.name for path in tmp_path.glob("*/checkpoints/*")}
    # The first epoch was not trained again.
    assert kept == {"epoch=0-step=32.ckpt", "epoch=1-step=64.ckpt", "last.ckpt"}
