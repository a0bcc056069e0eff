"""The queue of a replica's outgoing messages: those of the round that lands first leave first.

Messages that were handed to the carrier cannot be overtaken, so nothing more is handed over while `WINDOW_NBYTES` are in transit. This
is enough that the link is seldom idle while messages wait.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch import Tensor

from thinwire.comm.group import Group, Transfer

WINDOW_NBYTES = 1 << 21
Order = tuple[int, ...]  # the step of landing, then the order of departure


T = TypeVar("T")
_Jobs = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class JobThread:
    """A thread that runs jobs in order, until it is closed or nobody holds it. The end of the process does not wait for it, unlike for those of
    `concurrent.futures`: it may wait for a peer that never comes, and Ctrl-C must end the process then.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._jobs: _Jobs = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None)
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Run `job(*args)` after the jobs before it. Raises `RuntimeError` after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {self._name} has ended.")
            self._jobs.put((lambda: job(*args), future))
            if self._thread is None:
                self._thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
                self._thread.start()
        return future

    def close(self, wait: bool = False, cancel: bool = False) -> None:
        """End the thread after the jobs that were given, or after the present one: `cancel` the others. `wait` for its end."""
        with self._lock:
            self._closed = True
            with suppress(Empty):  # the thread takes jobs, too
                while cancel:
                    if job := self._jobs.get_nowait():
                        job[1].cancel()
            self._jobs.put(None)
        if wait and self._thread:
            self._thread.join()


def _run(jobs: _Jobs) -> None:
    while job := jobs.get():
        task, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except BaseException as error:  # raised in the thread that waits for the result
                future.set_exception(error)
        del job, task, future  # a thread that waits for its next job keeps no buffers


class SendQueue:
    """One thread that runs jobs: the lowest `order` first, and jobs of equal order in the order of arrival."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._clock = group, clock
        self._thread = JobThread("thinwire-outbound")
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: list[tuple[Order, int, Callable[[], Any], Future[Any]]] = []
        self._on_the_way: deque[Sent] = deque()
        self._nbytes_on_the_way = 0
        self._closed = False

    def put(self, order: Order, job: Callable[[], Any]) -> Future[Any]:
        """Queue `job`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.cancel()
                return future
            heapq.heappush(self._waiting, (order, next(self._count), job, future))
            self._thread.submit(self._next)
        return future

    def send(self, tag: int, messages: Mapping[int, Tensor], purpose: str) -> Sent:
        """Hand over `messages` as soon as the window has room. Call it in jobs only, because it may wait."""
        nbytes = sum(message.numel() for message in messages.values())
        # The new messages may exceed the window, and follow each other at once: otherwise large messages to many peers would leave one by
        # one, a delay apart.
        while len(self._on_the_way) > 1 and self._nbytes_on_the_way >= WINDOW_NBYTES:
            oldest = self._on_the_way.popleft()
            self._nbytes_on_the_way -= oldest.nbytes
            oldest.wait()
        posted = self._clock()
        sent = Sent(self._group.post(tag, messages, {}, purpose), nbytes, posted)
        self._on_the_way.append(sent)
        self._nbytes_on_the_way += nbytes
        return sent

    def close(self, wait: bool = False) -> None:
        """Drop all waiting jobs; their futures raise `CancelledError`. With `wait`, return when the thread has ended, after its present
        send; close the group first.
        """
        with self._lock:
            self._closed = True
            forgotten, self._waiting = self._waiting, []
        for *_, future in forgotten:
            future.cancel()
        self._thread.close(wait)

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            *_, job, future = heapq.heappop(self._waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # raised in the thread that waits for the result
                future.set_exception(error)


class Sent:
    """Messages that have been handed to the carrier. Any thread may wait for them."""

    def __init__(self, transfer: Transfer, nbytes: int, posted: float) -> None:
        self.transfer, self.nbytes, self.posted = transfer, nbytes, posted
        self._lock = threading.Lock()
        self._over = False

    def wait(self) -> None:
        """Return when their buffers are free again. Raises `LinkError`."""
        with self._lock:
            if not self._over:
                self.transfer.wait()
                self._over = True
