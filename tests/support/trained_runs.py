"""Runs that `thinwire train` makes for tests of other verbs; their fixtures are in tests/app/cli/conftest.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.app.cli import main

SMALL = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]


def trained_run(folder: Path, cache: Path, text: str, *options: str) -> Path:
    """Trains on `text` in `folder`. Returns the run folder."""
    (folder / "text.txt").write_text(text)
    given = [*SMALL, *options, "--text", str(folder / "text.txt"), "--out", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.app.trainer.data.default_cache", lambda: cache)
        assert main(["train", *given]) == 0
    return folder / "run"


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """The JSON output of a verb, and its text output."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err
