"""Handlers of signals while a verb runs, for the main thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handled(handle: Callable[[int, object], object], *numbers: int) -> Iterator[None]:
    """A context in which `handle` is called for the signals `numbers`, except a SIGHUP that nohup lets the process ignore.

    Outside the main thread, which alone can listen, nothing changes.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def asked_to_end() -> Iterator[list[int]]:
    """A context whose list gets the number of each SIGTERM and SIGINT."""
    # Not an Event: a handler that sets it in this thread, while the thread holds its lock, would deadlock.
    ended: list[int] = []
    with handled(lambda number, _: ended.append(number), signal.SIGTERM, signal.SIGINT):
        yield ended
