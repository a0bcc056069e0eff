"""How a run file names a user's own Python file. Runs with such files: tests/lm/test_own_pieces.py."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from thinwire.errors import ConfigurationError
from thinwire.pieces.own_files import pinned_file, taken_apart


def test_a_file_is_pinned_by_its_absolute_path_and_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An already pinned file keeps its digest when its content changes."""
    monkeypatch.chdir(tmp_path)
    file, content = tmp_path / "mine.py", b"HERE = 1\n"
    file.write_bytes(content)
    pinned = pinned_file("mine.py")
    assert pinned == f"{file}@{hashlib.blake2b(content, digest_size=16).hexdigest()}"
    file.write_text("HERE = 2\n")
    assert pinned_file(pinned) == pinned != pinned_file("mine.py")
    assert taken_apart(pinned) == (file, pinned[-32:]) and taken_apart("mine.py") == (Path("mine.py"), None)
    for text in ("mine.txt", f"{file}@123"):
        with pytest.raises(ConfigurationError, match=r"a path that ends in \.py is needed"):
            taken_apart(text)
