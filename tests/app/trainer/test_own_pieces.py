"""Pieces in a user's own file, in `thinwire train`: used, saved, resumed, in an elastic run, and refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fresh import forget_own_files

import thinwire as tw
from thinwire.app.cli import main
from thinwire.app.trainer.run import Run
from thinwire.catalogue.parsing import parse
from thinwire.comm import run_threads
from thinwire.pieces.own_files import pin, shorten
from thinwire.pieces.piece import digests

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_pieces.py"
SMALL = "--text text.txt --model nano --batch 1 --sequence 16 --eval-batches 1".split()  # noqa: SIM905
EVERY = "--every 4 --delay 1 --checkpoint-every 4".split()  # noqa: SIM905
PIECES = [
    *("--codec", "own.py:Truncated(2)", "--exchange", "own.py:DirectBelow(1000)"),
    *("--aggregate", "own.py:RoundedOnce()"),
]
STRATEGY = (
    "Strategy(schedule=Every(4), codec=TopK(0.1, own.py:Truncated(2)), feedback=Feedback(), outer=own.py:Smoothed(0.9), "
    "aggregate=own.py:RoundedOnce())"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("thinwire.app.trainer.data.default_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "".join(f"line {i}: {i * i % 97} thin wires carry {i % 13}\n" for i in range(2000))
    )
    shutil.copy(EXAMPLE, tmp_path / "own.py")
    return tmp_path


def train(out: str, *more: str) -> int:
    return main(["train", *SMALL, "--carrier", "threads", "--out", out, *more])


def thinwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def test_the_train_command_uses_pieces_of_a_user_file(here: Path) -> None:
    """The run file names the user's file by its full path and digest. test_training_processes.py trains in two processes with it."""
    assert train("run", *EVERY, *PIECES, "--steps", "8") == 0
    settings = tomllib.loads(Path("run/run.toml").read_text())
    assert (
        settings["method"]["codec"] == pin("own.py:Truncated(2)")
        and str(here / "own.py@") in settings["method"]["codec"]
    )
    made_of = json.loads(Path("run/summary.json").read_text())["made_of"]
    assert made_of["codec"] == "Truncated(kept=2)" and "aggregate=RoundedOnce()" in made_of["composition"]
    record = Run.load(Path("run/run.toml"))
    assert (
        record.method.label
        == "streaming_sign(every=4, delay=1, codec=own.py:Truncated(2), exchange=own.py:DirectBelow(1000), aggregate=own.py:RoundedOnce())"
    )


def test_a_resumed_run_with_user_pieces_equals_an_unstopped_one(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer step has state, and the resume is in another folder. A changed file is refused by name."""
    given = ["--strategy", STRATEGY, "--checkpoint-every", "4", "--steps", "12"]
    assert train("whole", *given) == 0
    shutil.copytree("whole", "cut")
    for path in Path("cut").glob("checkpoints/*/step-*"):
        if path.name > "step-00000004":
            shutil.rmtree(path)
    (here / "cut/model.safetensors").unlink()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["train", "--resume", "--out", "../cut"]) == 0
    assert weights("../cut") == weights("../whole")


def test_changed_user_files_are_refused_by_name(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The resume knows no file, as in a new process."""
    assert train("run", *EVERY, *PIECES, "--steps", "4") == 0
    (here / "own.py").write_text((here / "own.py").read_text() + "\n# other\n")
    forget_own_files(monkeypatch)
    assert main(["train", "--resume", "--out", "run", "--steps", "8"]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "own.py has changed since this run began: its digest" in said, said


@pytest.mark.slow
def test_user_pieces_work_in_an_elastic_run(here: Path) -> None:
    """Codec, exchange, outer step and aggregate are used in processes that may join and leave."""
    strategy = STRATEGY.replace("outer=", "exchange=own.py:DirectBelow(1000), outer=")
    done = thinwire("train", *SMALL, "--elastic", "--strategy", strategy, "--steps", "12", "--out", "run")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "finished" and all(
        one in summary["made_of"]["composition"] for one in ("Smoothed(decay=0.9)", "aggregate=RoundedOnce()")
    )


# ---- what is refused


CASES = {
    "none.py:Mine": "none.py cannot be read as a Python file",
    "own.py:Mine(3)": "own.py has no piece 'Mine'; it has Truncated, Smoothed, DirectBelow, RoundedOnce",
    "own.py:Smoothed(0.5)": "a Codec is needed, which has decode_add, encode, nbytes; make it a subclass of thinwire.codecs.Codec,",
    "own.py:Truncated(9)": "1 to 3 bytes of a value are needed",
    "half.py:Half": "half.py: Half lacks decode_add, nbytes, which a Codec needs; add what is missing.",
    "bad.py:Mine": "bad.py cannot be imported (ZeroDivisionError: division by zero)",
    "own.py:Truncated(print('x'))": "'print' in \"own.py:Truncated(print('x'))\" is not known",
}


@pytest.mark.parametrize("text", CASES)
def test_invalid_user_pieces_are_refused_with_the_reason(here: Path, text: str) -> None:
    (here / "bad.py").write_text("1 / 0\n")
    half = "import thinwire\nclass Half(thinwire.codecs.Codec):\n    def encode(self, x, payload, key): ...\n"
    (here / "half.py").write_text(half)
    with pytest.raises(tw.ConfigurationError) as caught:
        Run.of(codec=text)
    assert CASES[text] in str(caught.value)


def test_parsing_untrusted_text_imports_nothing(here: Path) -> None:
    """`parse` alone, which reads packets, records and pages, loads no file. Neither does text inside a literal."""
    (here / "told.py").write_text("from pathlib import Path\nPath('imported').touch()\nMine = int\n")
    with pytest.raises(tw.ConfigurationError):
        parse("told.py:Mine(3)")
    with pytest.raises(tw.ConfigurationError):
        parse("Cast('told.py:Mine')", own_files=True)
    assert not Path("imported").exists()
    assert parse("told.py:Mine(3)", own_files=True) == 3 and Path("imported").exists()


def test_user_files_may_have_spaces_in_their_paths(here: Path) -> None:
    (here / "a folder").mkdir()
    shutil.copy("own.py", "a folder/own.py")
    text = "TopK(0.1, 'a folder/own.py':Truncated(2))"
    whole = pin(text)
    assert whole == pin(whole) and str(here / "a folder/own.py@") in whole
    assert shorten(whole) == "TopK(0.1, own.py:Truncated(2))"
    assert repr(parse(whole, own_files=True)) == repr(parse(text, own_files=True))


def test_replicas_with_different_user_files_are_refused(here: Path) -> None:
    """The text of the piece is the same, but the file differs."""
    (here / "two").mkdir()
    (here / "two/own.py").write_text((here / "own.py").read_text().replace("torch.sub(", "torch.add("))

    def replica(group: tw.Group) -> None:
        import torch

        outer: Any = parse(("own.py" if group.rank else "two/own.py") + ":Smoothed(0.5)", own_files=True)
        assert digests(outer).keys() == {"own file of Smoothed"}
        model = torch.nn.Linear(2, 2)
        tw.Replica(tw.Strategy(outer=outer), model, torch.optim.SGD(model.parameters(), 0.1), group)

    with pytest.raises(tw.DisagreementError, match="own file of Smoothed"):
        run_threads(2, replica)
