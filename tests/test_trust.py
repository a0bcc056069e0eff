"""Which code a command may run: what this user has trained with, and the command of this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire import trust


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_what_was_trained_with_is_remembered_once_and_the_newest_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trust.remembered() == [] and home in trust.store().parents
    trust.remember(["a", "b"])
    trust.remember(["b", "c"])
    assert trust.remembered() == ["a", "b", "c"] and trust.store().parent.stat().st_mode & 0o77 == 0
    monkeypatch.setattr(trust, "MOST", 3)
    trust.remember(["d"])
    assert trust.remembered() == ["b", "c", "d"]
    written = trust.store().stat().st_mtime_ns
    trust.remember(["c", "b"])
    assert trust.store().stat().st_mtime_ns == written, "nothing is new"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff", "folder"])
def test_a_store_that_cannot_be_read_holds_nothing(home: Path, content: bytes | str | None) -> None:
    trust.store().parent.mkdir(parents=True)
    if content == "folder":
        trust.store().mkdir()
    elif isinstance(content, bytes):
        trust.store().write_bytes(content)
    assert trust.remembered() == []
    trust.remember(["a"])
    assert trust.remembered() == ([] if content == "folder" else ["a"])


def test_a_process_is_a_command_within_its_context_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trust.command() is None
    monkeypatch.chdir(tmp_path)
    with trust.commanded(["train"], reads=False):
        outer = trust.command()
        assert outer == trust.Command(("train",), False, tmp_path)
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with pytest.raises(KeyError), trust.commanded(["show"], reads=True):
            assert trust.command() == trust.Command(("show",), True, Path("/")), "its folder was deleted"
            raise KeyError
        assert trust.command() is outer
    assert trust.command() is None
    monkeypatch.chdir(tmp_path)
