"""A carrier for replicas as threads of one process: for tests, demonstrations and research on one machine.

It obeys the same laws as the carriers over a network, and its results do not depend on the order of arrival, because every
receive names its peer and its tag.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from thinwire.comm.group import TIMEOUT, Messages, Sized, limit, travelling
from thinwire.errors import ConfigurationError, LinkError, PacketError

T = TypeVar("T")
Key = tuple[int, int, int]  # source, destination, tag


class _Receive:
    """A buffer that waits for its message, which may be `shorter`. `buffer` is None after the receive was given up."""

    def __init__(self, peer: int, buffer: Tensor, shorter: bool) -> None:
        self.peer, self.shorter = peer, shorter
        self.buffer: Tensor | None = buffer
        self.done = False
        self.at = 0.0
        self.error: PacketError | None = None

    def deliver(self, message: Tensor, now: float) -> None:
        self.done, self.at = True, now
        if self.buffer is None:
            return
        if self.buffer.numel() == message.numel() or (self.shorter and self.buffer.numel() > message.numel()):
            self.buffer[: message.numel()].copy_(message)
        else:
            self.error = PacketError(
                f"replica {self.peer} sent {message.numel()} bytes where {self.buffer.numel()} were expected. "
                "Run the same strategy and version of Thinwire on every replica."
            )


class _Hub:
    """The common state of the groups of one process. For any key, only one of `mail` and `due` has an entry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed, self.clock = threading.Condition(), clock
        self.mail: dict[Key, deque[Tensor]] = {}  # sent, not received yet
        self.due: dict[Key, deque[_Receive]] = {}  # receives without a message yet
        self.closed: set[int] = set()

    def send(self, key: Key, message: Tensor) -> None:
        if key in self.due:
            _pop(self.due, key).deliver(message, self.clock())
        else:
            self.mail.setdefault(key, deque()).append(message.clone())

    def receive(self, key: Key, receive: _Receive) -> None:
        if key in self.mail:
            receive.deliver(_pop(self.mail, key), self.clock())
        else:
            self.due.setdefault(key, deque()).append(receive)


def _pop(queues: dict[Key, deque[T]], key: Key) -> T:
    """Take the first entry of a queue. An empty queue is deleted, so that tags of past rounds need no memory."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first


class _ThreadTransfer:
    queued_seconds = 0.0
    transfer_seconds = 0.0

    def __init__(self, group: ThreadGroup, tag: int, receives: list[_Receive], refused: list[int]) -> None:
        self._group, self._tag, self._receives, self._refused = group, tag, receives, refused

    @property
    def arrivals(self) -> dict[int, float]:
        return {receive.peer: receive.at for receive in self._receives if receive.done}

    def wait(self) -> None:
        group, hub = self._group, self._group._hub
        with hub.changed:
            in_time = hub.changed.wait_for(self._settled, limit(group.timeout))
            errors = [receive.error for receive in self._receives if receive.error]
            missing = sorted({receive.peer for receive in self._receives if not receive.done})
            for receive in self._receives:
                receive.buffer = None  # it belongs to the caller again, and a late message must not write into it
        if errors:
            raise errors[0]
        gone = sorted({*self._refused, *(peer for peer in missing if peer in hub.closed)})
        if gone:
            error = LinkError(
                f"replica {_names(gone)} closed its group before this exchange (tag {self._tag}) was over. "
                "Look for the error that made it leave."
            )
            error.peer = gone[0]
            raise error
        if missing and group.rank in hub.closed:
            raise _closed(group)
        if not in_time:
            error = LinkError(
                f"no message from replica {_names(missing)} (tag {self._tag}) within {group.timeout:g} s. "
                "Check that replica, or allow a longer timeout."
            )
            error.peer = missing[0]
            raise error

    def _settled(self) -> bool:
        """Whether all messages have arrived, or no more can arrive."""
        closed = self._group._hub.closed
        missing = [receive.peer for receive in self._receives if not receive.done]
        return not missing or self._group.rank in closed or any(peer in closed for peer in missing)


class ThreadGroup:
    """One replica's view of a group whose replicas are threads of this process.

    A message is copied when it is posted. After `timeout` seconds `wait` raises a `LinkError` that names the peer. A message
    of an unexpected size raises `PacketError`. Messages sent before a close are still delivered.

    Args:
        hub: holds the messages of the group; `create` makes it, and the groups of all replicas.
        rank, size: this replica's number, from 0; number of replicas.
        timeout: seconds that a `wait` lasts at most.

    >>> import torch
    >>> zero, one = ThreadGroup.create(2)
    >>> seven, landing = torch.tensor([7], dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    >>> zero.post(0, {1: seven}, {}).wait()
    >>> one.post(0, {}, {0: landing}).wait()
    >>> landing
    tensor([7], dtype=torch.uint8)
    """

    def __init__(self, hub: _Hub, rank: int, size: int, timeout: float) -> None:
        self._hub, self.rank, self.size, self.timeout = hub, rank, size, timeout

    @classmethod
    def create(cls, size: int, timeout: float = TIMEOUT) -> list[ThreadGroup]:
        """The groups of `size` replicas, in rank order, one for each thread."""
        if size < 1 or not timeout > 0:
            raise ConfigurationError(
                f"size={size}, timeout={timeout} was given; at least one replica and a positive time are needed."
            )
        hub = _Hub()
        return [cls(hub, rank, size, timeout) for rank in range(size)]

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> _ThreadTransfer:
        """See `Group.post`."""
        send, recv = travelling(self, tag, send), travelling(self, tag, recv)
        receives = [_Receive(peer, buffer, sized is not None) for peer, buffer in recv.items()]
        hub = self._hub
        with hub.changed:
            if self.rank in hub.closed:
                raise _closed(self)
            for receive in receives:
                hub.receive((receive.peer, self.rank, tag), receive)
            for peer, message in send.items():
                hub.send((self.rank, peer, tag), message)
            refused = [peer for peer in send if peer in hub.closed]
            hub.changed.notify_all()
        return _ThreadTransfer(self, tag, receives, refused)

    def close(self) -> None:
        """See `Group.close`."""
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._hub.changed.notify_all()


def run_threads(size: int, fn: Callable[[ThreadGroup], T], timeout: float = TIMEOUT) -> list[T]:
    """Run `fn(group)` on `size` replicas, one thread each; their results in rank order.

    A replica's group closes when its `fn` ends, so no replica waits for one that has left. If several raise, this raises the
    first error, because the others follow from it. All threads share torch's global generator. For repeatable results,
    draw from one `torch.Generator` per replica.

    Args:
        size: M, number of replicas.
        fn: is called once per replica with its group, on its own thread.
        timeout: seconds that a replica waits for a message.

    Raises:
        BaseException: the error of the first replica that failed.

    >>> run_threads(3, lambda group: group.rank * 10)
    [0, 10, 20]
    """
    groups = ThreadGroup.create(size, timeout)
    results: dict[int, T] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order of happening; append is atomic

    def run(group: ThreadGroup) -> None:
        try:
            results[group.rank] = fn(group)
        except BaseException as failure:
            failures.append((group.rank, failure))  # before the close that provokes the others
        finally:
            group.close()

    threads = [
        threading.Thread(target=run, args=(group,), name=f"replica-{group.rank}", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # an interrupt of this thread must not leave the others waiting for each other
        for group in groups:
            group.close()
    if failures:
        rank, first = failures[0]
        first.add_note(f"raised in replica {rank} of {size}")
        raise first
    return [results[rank] for rank in range(size)]


def _closed(group: ThreadGroup) -> LinkError:
    return LinkError(f"the group of replica {group.rank} is closed. Post and wait before closing it.")


def _names(peers: list[int]) -> str:
    return ", ".join(map(str, peers))
