"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.records.files import write_whole


def test_a_file_is_replaced(tmp_path: Path):
    path = tmp_path / "a.txt"
    for text in ("old and long", "new"):
        write_whole(path, text)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "taken", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
