"""Errors in the file of a job: each is shown in one line, with its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from own_jobs import JOB, SMALL, train

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.records.run_record import RunRecord
from thinwire.app.trainer.run import Run


def wrong(here: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what `thinwire train` prints for a job with this text: one line, without a traceback."""
    (here / "wrong.py").write_text(text)
    capsys.readouterr()
    assert train("run", "--steps", "6", job="wrong.py") == 1
    out, said = capsys.readouterr()
    said = said.strip()
    assert "Error" not in out and "Traceback" not in said and "thinwire train" not in said and said.count("\n") == 0, (
        said
    )
    return said


def test_errors_are_shown_with_their_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, line = here / "wrong.py", JOB[: JOB.index("    return nn.functional")].count("\n") + 1
    said = wrong(here, JOB.replace('model(batch["x"])', 'model(batch["x"].T)'), capsys)
    assert (
        said.startswith(f"{path}:{line}, in loss: RuntimeError: ")
        and "mat1 and mat2 shapes cannot be multiplied" in said
    )
    assert wrong(here, JOB + "1 / 0\n", capsys).startswith(
        f"{path}:{JOB.count(chr(10)) + 1}, in <module>: ZeroDivisionError"
    )
    assert wrong(here, JOB + "def (\n", capsys).startswith(
        f"{path}:{JOB.count(chr(10)) + 1}: SyntaxError: invalid syntax"
    )
    assert wrong(here, JOB + "raise SystemExit(3)\n", capsys).endswith("in <module>: SystemExit: 3")
    assert "A job file may import what is installed" in wrong(here, "import nobody_s_module\n" + JOB, capsys)
    told = wrong(here, JOB.replace("def batches(share):", "def batches(share):\n    [][1]"), capsys)
    assert "in batches: IndexError: list index out of range" in told


def test_missing_functions_and_wrong_results_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        JOB.replace(
            "def loss(", "def los("
        ): "has no loss(model, batch); a job has model(), batches(share), loss(model, batch)",
        JOB.replace("def batches(share)", "def batches()"): "batches() cannot be called as batches(share)",
        JOB.replace(
            "return nn.functional.cross_entropy(model(b", "return 3 or (model(b"
        ): "loss(model, batch) returned a value of type int; a scalar tensor",
        JOB.replace("return Points(share)", "return []"): "the iterable from batches(share) is empty",
        JOB.replace(
            "return Points(share)", "return 3"
        ): "batches(share) returned a value of type int; an iterable is needed",
        JOB.replace("return Points(share)", "yield torch.zeros(0, 4)"): "yielded an empty batch as number 1",
        JOB.replace("    return nn.Sequential(", "    return str("): "in model: TypeError",
        JOB.replace(
            'return nn.functional.cross_entropy(model(batch["x"])', 'return torch.zeros(3) + (model(batch["x"])[0, 0]'
        ).replace(', batch["y"])\n', ")\n"): "returned a tensor of shape (3,); a scalar tensor",
        JOB.replace(
            '(model(batch["x"])', '(model(batch["x"]).detach()'
        ): "returned a tensor that depends on no parameter",
        JOB
        + "def optimizer(model):\n    return torch.optim.LBFGS(model.parameters())\n": "optimizer(model) returned a value of type "
        "LBFGS; an optimizer whose step() needs no closure",
    }
    for text, expected in cases.items():
        assert text != JOB
        assert expected in wrong(here, text, capsys)


def test_errors_that_occur_only_in_training_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A generator that ends, and an `evaluate` that returns no number."""
    said = wrong(
        here, JOB.replace("return Points(share)", "yield from list(next(Points(share)) for _ in range(3))"), capsys
    )
    assert "batches(share) ended after it had yielded 3, for share.index=" in said and "while True" in said
    shutil.rmtree("run")
    assert "evaluate(model) returned a value of type str; a number" in wrong(
        here, JOB + "def evaluate(model):\n    return 'good'\n", capsys
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--elastic"]], ids=["fixed", "elastic"])
def test_processes_and_their_report_show_the_line_without_a_class(
    here: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    source = JOB.replace("return Points(share)", "yield from list(next(Points(share)) for _ in range(3))")
    (here / "wrong.py").write_text(source)
    assert main(["train", "--job", "wrong.py", "--out", "run", *SMALL, "--steps", "6", *more]) == 1
    out, told = capsys.readouterr()
    line = f"{here / 'wrong.py'}: batches(share) ended"
    assert (f"is not started again: {line}" in out) == bool(more) and line in told
    assert "JobError" not in out + told + "".join(note.text for note in RunRecord.load("run").notes)


def test_settings_that_contradict_a_job_are_refused(here: Path) -> None:
    for settings in ({"lora": 4}, {"model": "mini"}, {"text": ("a.txt",)}, {"tokenizer": "bytes"}):
        with pytest.raises(tw.ConfigurationError, match=next(iter(settings))):
            Run.of(job="job.py", **settings)
    assert main(["train", "--job", "plain.py", "--optimizer", "AdamW", "--out", "run"]) == 2
    assert main(["train", "--job", "plain.py", "--strategy", "muloco", "--out", "run"]) == 2
    assert not Path("run").exists()
