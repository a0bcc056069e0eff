"""One rule for the files that hold secrets: run secrets, join tokens, keys, and the state of a hub.

Only this user, or root, owns the file, and nobody else may read or change it. A link is followed: what counts is the file that was opened.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path

from thinwire.errors import ConfigurationError

MOST_NBYTES = 1 << 16  # of a secret
_PIPE_SECONDS = 30.0  # most seconds until the writer of a pipe has written


def check_private(status: os.stat_result, path: Path, what: str) -> None:
    """Raise `ConfigurationError` unless `status`, of the opened file `path` with `what`, is that of a file of this user alone."""
    user = os.geteuid()
    if user != 0 and status.st_uid not in (0, user):
        raise ConfigurationError(
            f"another user owns {path} with {what}, and could replace it; copy it, and chmod 600 the copy."
        )
    if status.st_mode & 0o077:
        raise ConfigurationError(f"others may read or change {path} with {what}; chmod 600 {path}")


def read_private(path: Path, what: str, most_nbytes: int = MOST_NBYTES) -> bytes:
    """The first `most_nbytes` of the file `path`, which holds `what`; it may be a pipe of this user. Raises `OSError` if it cannot be read, and
    `ConfigurationError` if others could.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"secret"), file.flush()
    ...     read_private(Path(file.name), "a run secret")
    b'secret'
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer does not hold it up
    status = os.fstat(handle)
    if stat.S_ISDIR(status.st_mode):  # `fdopen` would refuse it, and leave it open
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with os.fdopen(handle, "rb", buffering=0) as file:
        check_private(status, path, what)
        if stat.S_ISREG(status.st_mode):
            return file.read(most_nbytes)
        if not stat.S_ISFIFO(status.st_mode):
            raise ConfigurationError(
                f"{path} with {what} is neither a file nor a pipe; write it to a file of mode 600."
            )
        text, waits = b"", True
        while waits and len(text) < most_nbytes:
            more = file.read(most_nbytes - len(text))  # None: there is a writer, which has not written yet
            text += more or b""
            waits = bool(more) if more is not None else bool(select.select([file], [], [], _PIPE_SECONDS)[0])
        return text
