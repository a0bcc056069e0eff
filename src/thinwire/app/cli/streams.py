"""Standard output and error that outlive their reader (`thinwire … | head`, or a terminal that was closed), and take any character."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

_NO_READER = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal


class _Outliving(io.FileIO):
    """The descriptor of a stream. What is written after its reader has left is lost, and no error is raised."""

    unread = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _NO_READER:
                raise
        self.unread = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return super().write(data) or 0


@contextmanager
def outliving_their_reader() -> Iterator[None]:
    """A context in which sys.stdout and sys.stderr lose what nobody reads, and spell out what the locale's encoding lacks. Without it an
    error would end a run, without a checkpoint, when the `tee` after it ends by the same Ctrl-C, or at the first dash in latin-1."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # closed by someone
                stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None) -> TextIO:
    # The descriptor was closed before the start (`>&-`); an open one keeps other files from its number.
    if stream is None:
        return Path(os.devnull).open("w")
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a caller in Python collects the text
        return stream
    if number not in (1, 2) or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(number, "w", closefd=False)),
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,  # the second with python -u
    )


def unread() -> bool:
    """Whether nobody reads sys.stdout any more."""
    sys.stdout.flush()
    return bool(getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "unread", False))
