"""Verbs around a run, on one that was trained by `thinwire train`: checkpoints, sample, export, resume with another number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main

SMALL = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("thinwire.lm.data.default_cache", lambda: cache)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of six steps of two replicas with checkpoints of steps 2, 4 and 6, rounds in the air at each; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"line {i}: {i * i % 97} thin wires carry {i}\n" for i in range(3000)))
    options = ["--steps", "6", "--every", "2", "--delay", "1", "--fragments", "1", "--checkpoint-every", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.lm.data.default_cache", lambda: cache)
        assert main(["train", *SMALL, *options, "--text", str(folder / "text.txt"), "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """What a verb says: its JSON, and the text for people."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_checkpoints_are_listed_verified_and_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = told(capsys, "checkpoints", run)
    assert [(one["step"], one["whole"], one["replicas"]) for one in found["checkpoints"]] == [
        (step, True, ["replica-0", "replica-1"]) for step in (2, 4, 6)
    ]
    assert "a resume goes on from step 6" in text and "2 of 2" in text
    damaged = run / "checkpoints/replica-1/step-00000006/outer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    assert "goes on from step 6" in told(capsys, "checkpoints", run)[1]  # sizes are right
    found, text = told(capsys, "checkpoints", run, "--verify")
    assert not found["checkpoints"][2]["whole"] and "a resume goes on from step 4" in text
    assert found["checkpoints"][2]["problems"] == [
        "replica-1: is damaged: outer.safetensors is not what was written (size or checksum)."
    ]
    shutil.rmtree(run / "checkpoints/replica-0/step-00000002")
    assert told(capsys, "checkpoints", run)[0]["checkpoints"][0]["problems"] == ["replica-0 has none"]
    found, _ = told(
        capsys, "checkpoints", run, "--prune", "1"
    )  # what is newer than the newest whole one may be in the making
    assert [one["step"] for one in found["checkpoints"]] == [4, 6] and len(found["deleted"]) == 1
    assert sorted(path.name for path in (run / "checkpoints/replica-1").iterdir()) == ["step-00000004", "step-00000006"]
    shutil.rmtree(run / "checkpoints/replica-0")
    assert main(["checkpoints", str(run), "--prune", "1"]) == 2
    assert "has no whole set of checkpoints, so nothing was deleted" in capsys.readouterr().err
    assert main(["checkpoints", "nothing"]) == 2


def test_a_manifest_that_was_changed_is_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own hash covers facts and notes, which no file's hash does."""
    manifest = run / "checkpoints/replica-0/step-00000006/manifest.json"
    said = json.loads(manifest.read_text())
    said["facts"]["rounds"][0] += 1
    manifest.write_text(json.dumps(said))
    found, _ = told(capsys, "checkpoints", run)
    assert found["checkpoints"][2]["problems"] == [
        "replica-0: is damaged: manifest.json is not what was written (checksum)."
    ]
