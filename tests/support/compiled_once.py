"""Lets one worker at a time compile a kernel, so that the other workers read its code from numba's cache.

In a new checkout the workers need the same kernels in the same seconds, and each would compile them.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest


def one_at_a_time(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compiles`, which one thread of one process of this checkout runs at a time; a call may make another call."""
    thread, calls = threading.RLock(), list[int]()

    @wraps(compiles)
    def alone(*given: Any) -> Any:
        with thread, Path(__file__).open() as file:
            if not calls:
                fcntl.flock(file, fcntl.LOCK_EX)
            calls.append(1)
            try:
                return compiles(*given)
            finally:
                calls.pop()
                # A forked process may have the file too; a nested call never locked its own.
                fcntl.flock(file, fcntl.LOCK_UN)

    return alone


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from numba.core.dispatcher import Dispatcher

        Dispatcher.compile = one_at_a_time(Dispatcher.compile)
