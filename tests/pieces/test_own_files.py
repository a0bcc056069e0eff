"""How a run file names a user's own Python file. Runs with such files: tests/app/trainer/test_own_pieces.py."""

from __future__ import annotations

import hashlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import ConfigurationError
from thinwire.pieces import own_files
from thinwire.pieces.own_files import file_of, load, pinned_file, taken_apart
from thinwire.pieces.piece import digests


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


def test_a_file_finds_the_data_beside_it(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2")
    file = tmp_path / "job.py"
    file.write_text("from pathlib import Path\nHERE = Path(__file__).with_name('data.csv').read_text()\n")
    assert file_of(str(file)).HERE == "1,2"


def test_a_file_that_cannot_be_imported_is_refused_each_time(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class A: ...\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"cannot be imported \(ZeroDivisionError: division by zero\)"):
            file_of(str(tmp_path / "mine.py"))


def test_a_name_that_is_no_piece_is_refused_with_the_names_of_those_there(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, there in (("class A: ...\n", "A"), ("class A: ...\ndef of(): ...\n", "A, of"), ("", "none")):
        file.write_text(f"from pathlib import Path\n{text}class _Hidden: ...\nONE = 1\n")
        for name in ("Mine", "_Hidden", "ONE"):
            with pytest.raises(ConfigurationError) as caught:
                load(file, None, name)
            due = f"{file} has no piece {name!r}; it has {there}. Write mine.py:NAME(...) with one of these."
            assert str(caught.value) == due


@dataclass
class Whole:
    part: object = None
    rest: tuple[object, ...] = ()


def test_pieces_inside_of_others_are_recorded_by_their_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine:\n    inner: object = None\n"
    )
    made, due = load(file, None, "Mine"), {"own file of Mine": pinned_file(str(file))[-32:]}
    for value in (made(), (made(),), [1, (made(),)], Whole(made()), Whole(1, (made(),))):
        assert digests(value) == due
    assert digests(Whole()) == {}


class Noticed:
    """A lock that says when somebody waits for it."""

    def __init__(self, waited_for: threading.Event) -> None:
        self._lock, self._waited_for = threading.RLock(), waited_for

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited_for.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("pin", [str, pinned_file], ids=["plain", "pinned"])
def test_a_second_thread_gets_no_half_module(pin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in threads import one job file at the same time: the first is in the midst of it when the second asks."""
    begun, second = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate", SimpleNamespace(begun=begun, second=second))
    monkeypatch.setattr(own_files, "_ONE_AT_A_TIME", Noticed(second))
    file = tmp_path / "job.py"
    file.write_text("import gate\ngate.begun.set()\ngate.second.wait()\nHERE = 1\n")
    path = pin(str(file))

    def ask() -> list[str]:
        begun.wait()
        try:
            return list(vars(file_of(path)))
        finally:
            second.set()

    with ThreadPoolExecutor(2) as pool:
        first, later = pool.submit(file_of, path), pool.submit(ask)
        first.add_done_callback(lambda _: begun.set())  # if the file was not run at all
        assert first.result().HERE == 1 and "HERE" in later.result()
