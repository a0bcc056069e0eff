"""The way of a packet out of a replica: it is encoded, sealed and handed to the carrier on one thread, which takes packets of the round
that lands first before others.

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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, encode_from
from thinwire.comm.group import Group, Transfer
from thinwire.errors import NonFiniteError, PacketError
from thinwire.exchange.chunks import Message, Signal
from thinwire.exchange.record import Trace
from thinwire.packet import HEADER_NBYTES, REFUSED, Header, payload, seal
from thinwire.rng import Key

PACKET = "packet"  # the ledger's purpose of a round's messages to other sites
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


@dataclass(eq=False)
class Outgoing:
    """A packet of this replica, or one that it passes on: written, then handed to the carrier, then out of its buffer. Any thread may wait.

    Args:
        message: the elements that it carries.
        packet: its buffer; once it is written, its bytes.
        stage, index: of the message in its round.
        tag, purpose: as for `Group.post`.
        to: the ranks that get it.
        trace: notes when it leaves.
        on_stream: a context in which work on the signal's device follows what was queued before the departure.
        flags: bits of `thinwire.packet`.
        written: done when the packet may be read.
        posted: seconds at which the carrier took it.
    """

    message: Message
    packet: Tensor
    stage: int = 0
    index: int = 0
    tag: int = 0
    purpose: str = PACKET
    to: Sequence[int] = ()
    trace: Trace = field(default_factory=Trace)
    on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
    flags: int = 0
    written: Future[None] = field(default_factory=Future)
    posted: float = 0.0
    transfer: Transfer | None = None
    _queued: Future[None] | None = None  # done when the carrier has taken it
    _over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Bytes to all peers together."""
        return self.packet.numel() * len(self.to)

    def write(self, codec: Codec, signal: Signal, key: Key, due: Header, marks: Sequence[int] = ()) -> None:
        """Encode the elements of `signal`, append `marks`, and seal the packet with the header `due`, whose size is the largest one."""
        message, body, flags = self.message, payload(self.packet), due.flags
        failure: BaseException | None = None
        end = message.nbytes
        try:
            with self.on_stream():
                for coded in message.ranges:
                    room = body[coded.first : coded.last]
                    end = coded.first + encode_from(signal(coded.begin, coded.end), codec, room, key)
        except BaseException as error:  # whatever it is, peers are not to wait for this packet
            failure = None if isinstance(error, NonFiniteError) else error
            end = message.nbytes
            body[:end].zero_()
            flags |= REFUSED
        nbytes = end + len(marks)
        body[end:nbytes] = torch.tensor(list(marks), dtype=torch.uint8)
        self.packet = self.packet[: HEADER_NBYTES + nbytes]
        try:
            seal(self.packet, replace(due, flags=flags, nbytes=nbytes))
        except PacketError as error:  # nothing can be sent
            self.written.set_exception(error)
            raise
        self.flags = flags
        if failure is None:
            self.written.set_result(None)
        else:
            self.written.set_exception(failure)

    def leaves_with(self, queued: Future[None]) -> None:
        """Take `queued`, which is done when the packet is handed to the carrier. If it is cancelled, the packet is not written either."""
        self._queued = queued
        queued.add_done_callback(lambda done: done.cancelled() and self.written.cancel())

    def post(self, group: Group, now: float) -> None:
        """Hand the packet to the carrier."""
        self.posted = now
        self.transfer = group.post(self.tag, dict.fromkeys(self.to, self.packet), {}, self.purpose)
        self.trace.left(self.stage, self.index, self.packet.numel(), self.to, now)

    def wait(self) -> Tensor:
        """Wait until the packet is written, and return it."""
        self.written.result()
        return self.packet

    def wait_sent(self) -> None:
        """Return when the packet's buffer is free again. Raises the error of its encoding or sending."""
        self.written.result()
        if self._queued is not None:
            self._queued.result()
        self.wait_taken()

    def wait_taken(self) -> None:
        """Return when the carrier needs the buffer no longer. Raises `LinkError`."""
        with self._lock:
            if self.transfer is not None and not self._over:
                self.transfer.wait()
                self._over = True


class SendQueue:
    """One thread that runs jobs and sends packets: the lowest `order` first, and those of equal order in the order of arrival."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group, self._clock = group, clock
        self._thread = JobThread("thinwire-outbound")
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._waiting: list[tuple[Order, int, Callable[[], Any], Future[Any]]] = []
        self._on_the_way: deque[Outgoing] = deque()
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

    def send(self, order: Order, packet: Outgoing, write: Callable[[], None] | None = None) -> None:
        """Queue `packet`, which `write` writes first (None: it is written)."""
        packet.leaves_with(self.put(order, partial(self._send, packet, write)))

    def _send(self, packet: Outgoing, write: Callable[[], None] | None) -> None:
        """Write the packet, and hand it over as soon as the window has room."""
        if write is not None:
            write()
        if not packet.to:
            return
        # The new messages may exceed the window, and follow each other at once: otherwise large messages to many peers would leave one by
        # one, a delay apart.
        while len(self._on_the_way) > 1 and self._nbytes_on_the_way >= WINDOW_NBYTES:
            oldest = self._on_the_way.popleft()
            self._nbytes_on_the_way -= oldest.nbytes
            oldest.wait_taken()
        packet.post(self._group, self._clock())
        self._on_the_way.append(packet)
        self._nbytes_on_the_way += packet.nbytes

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
