"""A run with privacy, end to end: the guarantee that it states, and that repeated rounds count again."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import thinwire as tw
from thinwire.app.cli.train import main
from thinwire.app.trainer.run import Run
from thinwire.errors import ConfigurationError

PRESENT = importlib.util.find_spec("dp_accounting") is not None
needs_accountant = pytest.mark.skipif(not PRESENT, reason="the extra thinwire[privacy] is not installed")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i % 13} packets\n" for i in range(2000)))
    settings = dict(
        text=str(file), model="nano", strategy="local_sgd", every=4, batch=2, sequence=32, checkpoint_every=5, eval_batches=2,
        carrier="threads", privacy="Privacy(clip=0.5, noise=2.0)", keep=9,
    )  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@needs_accountant
def test_the_privacy_guarantee_is_in_summary_and_report(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main([*arguments, "--steps", "12", "--out", str(folder)]) == 0
    privacy = json.loads((folder / "summary.json").read_text())["privacy"]
    due = tw.lab.privacy.Privacy(0.5, 2.0)
    rounds = 3  # after steps 4, 8 and 12; no steps remain after that
    assert privacy == due.spent(rounds, 2) and privacy["epsilon"] == pytest.approx(due.epsilon(rounds))
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"({privacy['epsilon']:.3g}, 1e-05)-differentially private for a whole replica" in said
        and "(predicted)" in said
    )
    assert f"({privacy['epsilon']:.3g}, 1e-05)-differentially private" in (folder / "report.html").read_text()
    # killed after the checkpoint of step 5: later rounds count again, also one that may have been sent before the kill was seen
    for path in folder.glob("checkpoints/*/step-*"):
        if path.name > "step-00000005":
            shutil.rmtree(path)
    (folder / "model.safetensors").unlink()
    assert main([*arguments, "--steps", "12", "--out", str(folder), "--resume"]) == 0
    again = json.loads((folder / "summary.json").read_text())["privacy"]
    assert again["rounds"] == 3 + 2 + 1 and again["epsilon"] > privacy["epsilon"]


@pytest.mark.skipif(PRESENT, reason="dp-accounting is installed")
def test_a_missing_accountant_is_reported_before_training(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[privacy\]'"):
        main([*arguments, "--steps", "12", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_an_unattainable_privacy_guarantee_is_refused_before_training() -> None:
    with pytest.raises(ConfigurationError, match="adds older deltas"):
        Run.of(strategy="sparse_loco", privacy="Privacy()")
    with pytest.raises(ConfigurationError, match="unclipped"):
        Run.of(strategy="data_parallel", privacy="Privacy()")
    with pytest.raises(ConfigurationError, match="clip=-1"):
        Run.of(privacy="Privacy(clip=-1)")
    with pytest.raises(ConfigurationError, match="Privacy"):
        Run.of(privacy="E3M0")
    assert Run.of(strategy="local_sgd", privacy="Privacy(0.5, 2.0)").make_strategy().privacy == tw.lab.privacy.Privacy(
        0.5, 2.0
    )
