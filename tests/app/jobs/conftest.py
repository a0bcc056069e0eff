"""A folder with the files of two jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_jobs import JOB, PLAIN


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "plain.py").write_text(PLAIN)
    return tmp_path
