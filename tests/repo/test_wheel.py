"""The wheel installs into an empty environment, trains in another folder, and holds its types and pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from pages import ROOT, blocks

import thinwire


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The path of a wheel that is built from this checkout without a network."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; `make test` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(ROOT),
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    )
    (built,) = folder.glob("thinwire-*.whl")
    return built


def run(*command: str, folder: Path = ROOT) -> str:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP_"))
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def test_the_wheel_holds_the_package_types_and_pages(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/thinwire").rglob("*.py")}
    pages = {f"thinwire/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "docs").rglob("*.md")}
    info = f"thinwire-{thinwire.__version__}.dist-info"
    assert {name for name in names if not name.startswith(info)} == modules | pages | {"thinwire/py.typed"}
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_environment(wheel, tmp_path):
    """Dependencies come from the environment of these tests, Thinwire from the wheel. The run writes the files that docs/start.md names."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "others.pth").write_text("\n".join(others))
    found = run(str(python), "-c", "import thinwire.public; print(thinwire.__file__)", folder=tmp_path).strip()
    assert Path(found).is_relative_to(packages)
    command = str(tmp_path / "env/bin/thinwire")
    assert run(command, "docs", "start", folder=tmp_path).startswith("# Start")
    run(command, "train", "--steps", "20", "--checkpoint-every", "10", "--out", "first", folder=tmp_path)
    (listed,) = [block.text for block in blocks(ROOT / "docs/start.md", "text") if "run.toml" in block.text]
    names = re.findall(r"^  (\S+)", listed, re.MULTILINE)
    assert len(names) > 5
    assert not [name for name in names if name != "tokenizer.json" and not (tmp_path / "first" / name).exists()]
