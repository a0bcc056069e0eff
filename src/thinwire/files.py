"""Reads files that others may have written: only regular files are opened, and at most an allowed number of bytes is read. Writes files.

Opening a FIFO would wait for ever, a device has no end, and a few bytes of brackets exhaust the stack. Functions here raise `OSError` or
`ValueError` with the reason; each caller adds what is needed and what to do.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import re
import stat
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# what file systems answer that do not have a call: Lustre, NFS, SMB and FUSE mounts lack some
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
LARGEST_FILE = 64 << 20  # most bytes of a file that is read whole: settings and manifests


def open_regular(path: Path) -> BufferedReader:
    """`path` for reading. Raises `OSError` for what is no regular file, a link to a device too."""
    _check(path, path.stat().st_mode)  # first by name: opening alone may do something to a device
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _check(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def open_to_append(path: Path) -> int:
    """A descriptor at the end of `path`, which is made if it is not there. Raises `OSError` for what is no file of its own: a link, a file
    with a second name elsewhere, which would be written too, or a FIFO, which would wait.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(f"{path} is a link, and what it leads to would be written") from None
        raise
    try:
        found = os.fstat(file)
        _check(path, found.st_mode)
        if found.st_nlink > 1:
            raise OSError(f"{path} has a second name (a hard link), and the file there would be written too; copy it")
    except OSError:
        os.close(file)
        raise
    return file


def check_inside(folder: Path) -> None:
    """Raise `OSError` if something in `folder` is a link that leads out of it, a FIFO or a device: what is written or deleted there would be
    elsewhere, and reading might not end. Files of checkpoints may be anything: a reader passes over what is no regular file, and says so.
    """
    whole, checkpoints = folder.resolve(), folder / "checkpoints"
    ahead = [str(folder)]
    while ahead:
        with os.scandir(ahead.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                passed_over = checkpoints in path.parents  # by the reader of checkpoints, which nobody writes to
                if entry.is_symlink():
                    if not path.resolve().is_relative_to(whole) and not (passed_over and not path.is_dir()):
                        raise OSError(f"{entry.path} is a link that leads out of the folder")
                elif entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)
                elif not passed_over and not stat.S_ISSOCK(mode := entry.stat(follow_symlinks=False).st_mode):
                    _check(path, mode)


def _check(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is no regular file")


class HeldFolder:
    """A folder that is held open, so that it is known where it is when it was renamed, and that it is gone when it was deleted."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)  # or at its end

    def where(self) -> Path | None:
        """Its present path; None if it was deleted, or if the system does not tell."""
        if self._is_at(self.path):
            return self.path
        with suppress(OSError):
            path = self._named_by_the_system()
            if self._is_at(path):
                self.path = path
                return path
        return None

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # a file system that does not answer now
            return True

    def _named_by_the_system(self) -> Path:
        if sys.platform == "darwin":
            return Path(os.fsdecode(fcntl.fcntl(self.descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
        return Path(f"/proc/self/fd/{self.descriptor}").readlink()

    def try_to_write(self) -> None:
        """Write a page of a file there, and delete it. Raises `OSError`, as on a full disk."""
        name = f".room-{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            written = os.write(file, bytes(4096))
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=self.descriptor)
            os.close(file)
        if written < 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def contents(path: Path) -> str:
    """The text of a small file, in UTF-8, or as editors on Windows save it, with a byte order mark. Raises `OSError`, `ValueError` if it is longer
    than `LARGEST_FILE` bytes or in another encoding.
    """
    with open_regular(path) as file:
        data = file.read(min(LARGEST_FILE, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"{path} is longer than {LARGEST_FILE:,} bytes")
    return data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


def parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    """`parse(text)`, with a `ValueError` where it is nested too deeply."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def existing(path: Path) -> Path:
    """`path`, absolute; or the nearest folder above it that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def check_place(path: Path) -> None:
    """Raise the `OSError` that writing the file `path` would meet, before any work: it is a folder, or its folder cannot be made or written."""
    place = existing(path)
    if place == path.absolute() and place.is_dir():
        raise IsADirectoryError(errno.EISDIR, "the name of a file is needed", str(path))
    if place != path.absolute() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def write_whole(path: Path, data: str | bytes) -> None:
    """Write `path` whole or not at all: a reader sees the old or the new content. Several processes may write it at once. Raises `OSError`."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, "the name of a file is needed", str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):  # a name that is too long
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None  # the caller knows no draft


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """As safetensors' `save_file`, for tensors of any device and layout, which may share memory: a file holds each separately. The file, which
    safetensors lets its owner alone read, has the modes that any other gets. Raises `OSError`, also on a full disk, and leaves no part of a file.
    """
    from safetensors import torch as safetensors  # it loads torch, which `thinwire hub` does not need

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        safetensors.save_file(_apart(tensors), path, dict(metadata) if metadata else None)
    except Exception as error:
        path.unlink(missing_ok=True)
        told = re.search(r"\(os error (\d+)\)", str(error))  # safetensors has no `OSError` of its own
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error
    with suppress(OSError):  # a file system without modes
        path.chmod(mode)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, each with its own storage."""
    apart: dict[str, Tensor] = {}
    storages = set()
    for name, value in tensors.items():
        alone = value.detach().cpu().contiguous()
        if alone.untyped_storage().data_ptr() in storages:
            alone = alone.clone()
        storages.add(alone.untyped_storage().data_ptr())
        apart[name] = alone
    return apart


def flush(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk, not only in the machine's memory, where the file system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        if path.is_dir():  # some do not open folders
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def lock(file: int | IO[Any], wait: bool = True) -> bool:
    """Lock an open file against others that lock it, until it is closed or the process ends. Without `wait`: False if another has the lock. On a file
    system without locks nobody has one, and it is True.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (
            *UNSUPPORTED,
            errno.EBADF,
            errno.EACCES,
            errno.EPERM,
        ):  # NFS wants the file open for writing
            raise
    return True


def held_by(*files: int | Path) -> str:
    """The processes of this machine that hold the locks of files, as words for a message; "" if the system does not tell."""
    try:
        stats, lines = [os.stat(file) for file in files], Path("/proc/locks").read_text().splitlines()  # noqa: PTH116  # numbers, too
    except OSError:
        return ""
    places = {f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}" for stat in stats}
    locks = [words for line in lines if (words := line.split())[1] == "FLOCK" and words[5] in places]
    pids = sorted({int(words[4]) for words in locks if words[4] != "-1"})
    return f" (process {', '.join(map(str, pids))})" if pids else ""
