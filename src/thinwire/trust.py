"""Which code a command may run: what its own arguments name, and what this user has trained with on this machine before.

A run folder may come from somebody else, so a file that only a run file names is refused, until `--trust` accepts it. What was trained
with stands in `store()`, in the user's home folder, because a folder's own record proves nothing. This module imports neither pieces
nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.files import contents, write_whole

MOST = 4096  # lines of the store, the newest


@dataclass(frozen=True)
class Command:
    """A command with its `arguments`, begun in `folder`. One that only `reads` imports no file before it must."""

    arguments: tuple[str, ...]
    reads: bool
    folder: Path


_command: Command | None = None


def command() -> Command | None:
    """The command of this process; None: a program of the user's own, or a replica, whose command has checked. It may import any file."""
    return _command


@contextmanager
def commanded(arguments: Sequence[str], reads: bool) -> Iterator[None]:
    """A context in which this process is a command."""
    global _command
    try:
        folder = Path.cwd()
    except OSError:  # it was deleted, so that no relative path leads anywhere
        folder = Path("/")
    earlier, _command = _command, Command(tuple(arguments), reads, folder)
    try:
        yield
    finally:
        _command = earlier


def store() -> Path:
    """The file with a line for each file of code with which this user has trained on this machine."""
    return Path.home() / ".local" / "state" / "thinwire" / "own-files"


def remembered() -> list[str]:
    """The lines of the store."""
    with suppress(OSError, ValueError, RuntimeError):
        return contents(store()).splitlines()
    return []


def remember(lines: Sequence[str]) -> None:
    """Add lines to the store. Where there is no home folder, a resume needs --trust, or the name of the file."""
    known = remembered()
    if set(lines) <= set(known):
        return
    with suppress(OSError, RuntimeError):
        store().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(store(), "".join(f"{line}\n" for line in list(dict.fromkeys([*known, *lines]))[-MOST:]))
