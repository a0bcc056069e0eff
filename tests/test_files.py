"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch

from thinwire.files import save_file, write_whole


def test_a_file_is_replaced(tmp_path: Path):
    path = tmp_path / "a.txt"
    for text in ("old and long", "new"):
        write_whole(path, text)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path):
    (tmp_path / "taken").mkdir()
    for name, kind in (("taken", IsADirectoryError), (300 * "x", OSError)):
        with pytest.raises(kind) as said:
            write_whole(tmp_path / name, b"data")
        assert str(said.value).endswith(f": '{tmp_path / name}'")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name_is_no_file(path: str):
    with pytest.raises(IsADirectoryError, match="the name of a file is needed"):
        write_whole(Path(path), "data")


def test_tensors_that_do_not_fit_on_the_disk_raise_an_os_error_and_leave_no_file(tmp_path: Path):
    """A limit on the size of files stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(OSError) as said:
            save_file({"x": torch.zeros(1 << 15)}, tmp_path / "x.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.value.errno == errno.EFBIG and said.value.filename == str(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
