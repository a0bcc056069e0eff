"""The message when the library of a bridge is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A context for imports that the `extra` installs. Raises `ModuleNotFoundError` that says so.

    >>> with needs("lightning"):
    ...     import no_such_module
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'no_such_module', which this bridge needs: pip install 'thinwire[lightning]'.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"No module named {error.name!r}, which this bridge needs: pip install 'thinwire[{extra}]'.",
            name=error.name,
        ) from error
