"""Names the line in the user's own file through which an exception passed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from thinwire.errors import JobError, ThinwireError


@contextmanager
def blaming(path: Path, doing: str = "") -> Iterator[None]:
    """A context that raises an exception which passed through the file at `path` as a `JobError`; with `doing`, any other exception too."""
    try:
        yield
    except (ThinwireError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if told := where(path, error) or doing:
            raise JobError(f"{told}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        raise


def where(path: Path, error: BaseException) -> str:
    """`path:line, in function` of the innermost line of the file that `error` passed through; empty if it did not."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1].lineno}, in {lines[-1].name}" if lines else ""
