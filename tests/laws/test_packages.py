"""A package of somebody else adds a codec, a recipe and a verb: `examples/package`, installed and used by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(ROOT / "examples/package")], check=True)
    return target


def thinwire(installed: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_its_codec_keeps_the_laws(installed: Path, tmp_path: Path) -> None:
    program = (
        "from thinwire.catalogue.parsing import parse; from thinwire.testing import check; check(parse('Ternary(8)'))"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_its_recipe_trains_and_resumes(installed: Path, tmp_path: Path) -> None:
    sizes = ("--model", "tiny", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--checkpoint-every", "4")
    thinwire(
        installed,
        tmp_path,
        "train",
        "--strategy",
        "ternary-diloco",
        "--every",
        "3",
        "--steps",
        "4",
        *sizes,
        "--out",
        "run",
    )
    summary = json.loads(thinwire(installed, tmp_path, "resume", "run", "--steps", "8", "--json"))
    assert summary["steps"] == 8 and "ternary" in summary["strategy"]


def test_its_verb_is_one_of_the_command(installed: Path, tmp_path: Path) -> None:
    assert "show what numbers become in two bits" in thinwire(installed, tmp_path, "--help")
    assert json.loads(thinwire(installed, tmp_path, "ternary", "0.3", "-1", "2", "--json"))["values"] == [
        0.0,
        -2.0,
        2.0,
    ]


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[thinwire.methods]\nbroken = not_there\n")
    told = thinwire(tmp_path, tmp_path, "train", "--strategy", "broken_one", "--out", "run", code=2)
    assert "broken declares not_there" in told and "uninstall broken" in told
    (info / "entry_points.txt").write_text("[thinwire.verbs]\nbroken = not_there\n")
    for asked in ("--help", "nonesuch"):
        told = thinwire(tmp_path, tmp_path, asked, code=2)
        assert told.count("\n") == 1 and "uninstall broken" in told


@pytest.mark.parametrize("arguments", [("simulate",), ("plan", "fit"), ("train", "--strategy", "noloco")])
def test_a_checkout_without_entry_points_says_to_install_it_again(arguments: tuple[str, ...], tmp_path: Path) -> None:
    program = (
        "import importlib.metadata as metadata, sys; metadata.entry_points = lambda **_: (); "
        "from thinwire.app.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    asked = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install" in done.stderr, done.stderr
