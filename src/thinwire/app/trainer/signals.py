"""What a verb does at SIGINT, SIGTERM and SIGHUP, and that it ends in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

LAST_SECONDS = 5.0  # seconds that a process has after a signal to end by itself


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


_heeded: list[float] = []  # the number of signals that the verb of this process takes itself, once it has begun to


def heed(signals: float) -> None:
    """From now on the verb takes so many signals itself, however long it needs: it trains, and a stop waits for the others' checkpoint."""
    _heeded[:] = [signals]


def leave(code: int) -> NoReturn:
    """End this process at once, with its loaders' processes: a thread that waits for a peer outside Python would keep it, or abort it."""
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)


@cache
def _watch_forks() -> None:
    # the process of a loader is a fork, and is ended by SIGTERM: it must not write to the pipe of this one
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def ending_in_time(last_words: str) -> Iterator[None]:
    """A context in which SIGINT, SIGTERM and SIGHUP end this process within `LAST_SECONDS`, but for signals that the verb heeds.

    Handlers run in the main thread alone. It may wait outside Python, for a peer, a lock or a file, and hear no signal; or hear it, and
    then wait for a thread as it ends. So another thread hears of each signal, too, from the system itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heeded.clear()
    over, (reader, writer) = threading.Event(), os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        heard = 0
        while number := os.read(reader, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) or (
                _heeded and number[0] == signal.SIGHUP
            ):
                continue
            heard += 1
            if heard > sum(_heeded):
                break
        if number and not over.wait(LAST_SECONDS):
            os.write(2, f"{last_words}\n".encode())
            leave(128 + number[0])
        os.close(reader)

    _watch_forks()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="thinwire-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writer)
        thread.join()
