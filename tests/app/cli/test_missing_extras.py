"""A verb that needs a package which is not installed says so before it makes a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trained_runs import trained_run

TEXT = "".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    return trained_run(tmp_path_factory.mktemp("trained"), cache, TEXT, "--steps", "1")


def without(package: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `thinwire` in a process of its own, whose imports of `package` fail."""
    code = f"import sys; sys.modules[{package!r}] = None; from thinwire.app.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_export_without_transformers_leaves_no_folder(trained: Path) -> None:
    ended = without("transformers", "export", trained, "--to", "hf", "--out", trained / "hf")
    assert ended.returncode == 2 and "pip install -U transformers" in ended.stderr
    assert not (trained / "hf").exists()


@pytest.mark.parametrize("package", ["grpc", "cryptography"])
@pytest.mark.parametrize("carrier", ["secure", "secure-elastic"])
def test_a_secure_run_without_its_packages_leaves_no_folder(trained: Path, package: str, carrier: str) -> None:
    given = ["--text", trained.parent / "text.txt", "--model", "nano", "--out", trained / "secure"]
    ended = without(package, "train", *given, "--carrier", carrier)
    assert ended.returncode == 2 and "pip install 'thinwire[secure]'" in ended.stderr, ended.stderr
    assert not (trained / "secure").exists()
