"""Files are written whole or not at all; what others may have put in their place is not opened, or not read without an end."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from thinwire import files
from thinwire.files import HeldFolder, contents, existing, open_regular, open_to_append, save_file, write_whole
from thinwire.testing.toy import same_bits


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


def test_tensors_of_any_layout_are_saved_apart_with_the_modes_of_any_file(tmp_path: Path):
    whole, path = torch.arange(12.0).view(3, 4), tmp_path / "x.safetensors"
    tensors = {"whole": whole, "again": whole, "turned": whole.T, "row": whole[1], "none": torch.zeros(0, 3)}
    save_file(tensors, path, {"of": "test"})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(
        same_bits(read[name], one.contiguous()) and read[name].shape == one.shape for name, one in tensors.items()
    )
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    with pytest.raises(Exception, match=r"(?i)metadata|str"):
        save_file(tensors, tmp_path / "wrong", {"of": 3})  # type: ignore[dict-item]
    assert not (tmp_path / "wrong").exists()


# ---- what is no file of its own


def made(folder: Path, kind: str) -> Path:
    path = folder / kind.replace(" ", "-")
    (folder / "file").write_text("text")
    match kind:
        case "file":
            pass
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(folder / "file")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case "second name":
            path.hardlink_to(folder / "file")
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
    return path


READ = {"file": "", "link": "", "second name": "", "missing": "No such file"}
APPENDED = {
    "file": "",
    "missing": "",
    "link": "is a link",
    "link to a device": "is a link",
    "second name": "a second name",
}


@pytest.mark.parametrize(
    "kind", ["file", "folder", "fifo", "link", "link to a device", "second name", "socket", "missing"]
)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path):
    """Without a wait, and without an open descriptor. To append, a file must have no other name, which would be written too."""
    path, before = made(tmp_path, kind), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for opened, known in ((open_regular, READ), (open_to_append, APPENDED)):
        if known.get(kind) == "":
            file = opened(path)
            (os.close(file) if isinstance(file, int) else file.close())
        else:
            with pytest.raises(OSError, match=known.get(kind, r"is no regular file|Is a directory|No such device")):
                opened(path)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    if kind == "file":
        os.close(file := open_to_append(path))
        with open_regular(path) as read:
            assert read.read() == b"text" and not os.get_inheritable(read.fileno())


def test_what_is_appended_stands_behind_what_was_there(tmp_path: Path):
    for text in (b"one", b" two"):
        file = open_to_append(tmp_path / "log")
        os.write(file, text)
        os.close(file)
    assert (tmp_path / "log").read_text() == "one two"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_small_texts_are_read_in_the_encodings_that_editors_write(encoding: str, tmp_path: Path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes("η = 1\n".encode(encoding))
    if encoding == "utf-16-le":  # without a mark it is no text
        path.write_bytes(b"\xff" + path.read_bytes())
        with pytest.raises(ValueError, match="utf-8"):
            contents(path)
        return
    assert contents(path) == "η = 1\n"
    monkeypatch.setattr(files, "LARGEST_FILE", path.stat().st_size)
    assert contents(path) == "η = 1\n"
    monkeypatch.setattr(files, "LARGEST_FILE", path.stat().st_size - 1)
    with pytest.raises(ValueError, match="is longer than"):
        contents(path)


def test_what_is_nested_too_deeply_is_a_value_error():
    assert files.parsed(json.loads, "[1]") == [1]
    for text in ("[" * 100_000, "[1"):
        with pytest.raises(ValueError, match=r"nested too deeply|delimiter"):
            files.parsed(json.loads, text)


@pytest.mark.parametrize(
    ("kind", "fits"),
    [("file", True), ("second name", True), ("socket", True), ("link", True), ("folder", True), ("fifo", False),
     ("link to a device", False)],
)  # fmt: skip
def test_nothing_in_a_folder_may_lead_out_of_it_or_have_no_end(kind: str, fits: bool, tmp_path: Path):
    """At any depth. In the folder of checkpoints only folders may not be elsewhere: its reader passes over what is no regular file."""
    for deep, allowed in (("run/a/b", fits), ("run/checkpoints/replica-0", True)):
        inside = tmp_path / deep
        inside.mkdir(parents=True)
        made(inside, kind)
        if allowed:
            files.check_inside(tmp_path / "run")
        else:
            with pytest.raises(OSError, match=r"leads out of the folder|is no regular file"):
                files.check_inside(tmp_path / "run")
            (inside / kind.replace(" ", "-")).unlink()
    (tmp_path / "run/checkpoints/elsewhere").symlink_to("/tmp")
    with pytest.raises(OSError, match="leads out of the folder"):
        files.check_inside(tmp_path / "run")


# ---- places


def test_a_place_is_checked_before_any_work(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    assert existing(tmp_path / "a/b/c") == tmp_path and existing(tmp_path / "file") == tmp_path / "file"
    for good in ("new", "a/b/new", "file"):
        files.check_place(tmp_path / good)
    for wrong, kind in (("", IsADirectoryError), ("file/below", NotADirectoryError)):
        with pytest.raises(kind):
            files.check_place(tmp_path / wrong)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anywhere
    for place in ("new", "file"):
        with pytest.raises(PermissionError):
            files.check_place(tmp_path / place)


def test_a_held_folder_is_found_after_it_was_renamed_and_missed_after_it_was_deleted(tmp_path: Path):
    (tmp_path / "run").mkdir()
    held = HeldFolder(tmp_path / "run")
    assert held.where() == tmp_path / "run"
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()  # another one
    assert held.where() == held.path == tmp_path / "moved"
    held.try_to_write()
    assert not list((tmp_path / "moved").iterdir()) and not list((tmp_path / "run").iterdir())
    (tmp_path / "moved").rmdir()
    assert held.where() is None
    with pytest.raises(OSError):
        held.try_to_write()
    held.close()


def test_a_lock_is_held_by_one_and_its_process_is_named(tmp_path: Path):
    path = tmp_path / "lock"
    path.touch()
    with path.open("w") as first, path.open("w") as second:
        assert files.held_by(path) == "" and files.lock(first)
        assert not files.lock(second, wait=False)
        assert files.held_by(path) == files.held_by(second.fileno()) == f" (process {os.getpid()})"
        first.close()
        assert files.lock(second, wait=False)
    assert files.held_by(path) == "" == files.held_by(tmp_path / "missing")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO])
def test_a_file_system_that_lacks_a_call_is_worked_on_without_it(number: int, tmp_path: Path, monkeypatch):
    """An error of the disk is raised."""

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    monkeypatch.setattr(files.fcntl, "flock", fails)
    path = tmp_path / "file"
    path.touch()
    with path.open() as file:
        if number == errno.EIO:
            for call in (lambda: files.flush(path), lambda: files.lock(file)):
                with pytest.raises(OSError, match=os.strerror(number)):
                    call()
            return
        files.flush(path)
        files.flush(tmp_path)
        assert files.lock(file)
    with pytest.raises(FileNotFoundError):
        files.flush(tmp_path / "missing")
