"""Runs that `thinwire train` makes for tests of other verbs; their fixtures are in tests/cli/conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli import main

SMALL = ["--model", "nano", "--batch", "1", "--sequence", "16", "--eval-batches", "1", "--carrier", "threads"]


def trained_run(folder: Path, cache: Path, text: str, *options: str) -> Path:
    """Trains on `text` in `folder`. Returns the run folder."""
    (folder / "text.txt").write_text(text)
    given = [*SMALL, *options, "--text", str(folder / "text.txt"), "--out", str(folder / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.lm.data.default_cache", lambda: cache)
        assert main(["train", *given]) == 0
    return folder / "run"
