"""Counts every byte that was sent and received, by peer and by purpose.

Put the counter next to the carrier, inside any `LinkedGroup`, because it counts bytes when they are handed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from thinwire.comm.group import Group, Messages, Sized, Transfer, WrappedGroup, WrappedTransfer, travelling


@dataclass
class Count:
    """Messages to, or from, one peer for one purpose. Seconds are sums over messages; messages may overlap."""

    nbytes: int = 0
    messages: int = 0
    queued_seconds: float = 0.0
    transfer_seconds: float = 0.0


_Counts = dict[tuple[str, int], Count]  # by purpose and peer


class Ledger:
    """Counts of bytes, messages and seconds, by purpose and peer; threads may write at once.

    A sent message is counted when the carrier has taken it, in full even if the peer then dies; a received message, when
    its transfer is complete.

    For a *sent* message, `queued_seconds` is the time from the post until its first bit left the uplink, and
    `transfer_seconds` the time from there to the arrival of its last bit. Only an emulated link (`LinkedGroup`) knows these; on a real
    network both stay 0, because a sender cannot see when its bytes leave or arrive. For a *received* message,
    `queued_seconds` is 0, and `transfer_seconds` runs from the post of the receive to the moment at which `wait`
    found the message. That can be measured on every carrier. It contains the whole way, and the peer's lateness too, so bytes over
    seconds is at most the rate of the path from that peer. `waited` is the total time of threads in `wait`.

    `uploaded` is what a carrier itself counted on the way out, if it does: a hub passes on to all what it gets once, so it can be less than `sent`.

    >>> ledger = Ledger()
    >>> ledger.add_sent("packet", peer=1, nbytes=100)
    >>> ledger.add_sent("vote", peer=1, nbytes=8)
    >>> ledger.sent(), ledger.sent("vote"), ledger.received()
    (108, 8, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: _Counts = {}
        self._received: _Counts = {}
        self._waited: dict[str, float] = {}
        self._uploaded = 0

    def add_sent(self, purpose: str, peer: int, nbytes: int) -> None:
        """Count one message of `nbytes` that was handed to the carrier."""
        self._add(self._sent, purpose, peer, Count(nbytes, 1))

    def add_on_link(self, purpose: str, peer: int, queued_seconds: float, transfer_seconds: float) -> None:
        """Add the times of one message on an emulated link; `add_sent` counts the message."""
        self._add(self._sent, purpose, peer, Count(0, 0, queued_seconds, transfer_seconds))

    def add_received(self, purpose: str, peer: int, nbytes: int, transfer_seconds: float = 0.0) -> None:
        """Count one message of `nbytes` that arrived `transfer_seconds` after its receive was posted."""
        self._add(self._received, purpose, peer, Count(nbytes, 1, 0.0, transfer_seconds))

    def add_waited(self, purpose: str, seconds: float) -> None:
        """Add `seconds` that a thread waited for a transfer."""
        with self._lock:
            self._waited[purpose] = self._waited.get(purpose, 0.0) + seconds

    def add_uploaded(self, nbytes: int) -> None:
        """Add bytes that the carrier counted when they left this replica, with its own headers."""
        with self._lock:
            self._uploaded += nbytes

    def add(self, counted: Mapping[str, Any]) -> None:
        """Add the counts of an earlier session: its `as_dict`, or {} if there was none."""
        for counts, way in ((self._sent, "sent"), (self._received, "received")):
            for purpose, peers in counted.get(way, {}).items():
                for peer, count in peers.items():
                    self._add(counts, purpose, int(peer), Count(**count))
        for purpose, seconds in counted.get("waited_seconds", {}).items():
            self.add_waited(purpose, seconds)
        self.add_uploaded(counted.get("uploaded", 0))

    def sent(self, purpose: str | None = None, peer: int | None = None) -> int:
        """Bytes sent for `purpose` (None: all purposes) to `peer` (None: all peers)."""
        return self._sum(self._sent, purpose, peer)

    def received(self, purpose: str | None = None, peer: int | None = None) -> int:
        """Bytes received for `purpose` (None: all purposes) from `peer` (None: all peers)."""
        return self._sum(self._received, purpose, peer)

    def waited(self, purpose: str | None = None) -> float:
        """Seconds spent waiting for `purpose` (None: all purposes)."""
        with self._lock:
            return sum(seconds for name, seconds in self._waited.items() if purpose in (None, name))

    def uploaded(self) -> int:
        """Bytes that left this replica, by the carrier's count; 0 if it does not count."""
        with self._lock:
            return self._uploaded

    def as_dict(self) -> dict[str, Any]:
        """The counts for JSON: `sent` and `received`, each {purpose: {peer: the fields of `Count`}}; `waited_seconds` {purpose: s};
        `uploaded`.
        """
        with self._lock:
            return {
                "sent": _nested(self._sent),
                "received": _nested(self._received),
                "waited_seconds": dict(sorted(self._waited.items())),
                "uploaded": self._uploaded,
            }

    def _add(self, counts: _Counts, purpose: str, peer: int, more: Count) -> None:
        with self._lock:
            count = counts.setdefault((purpose, peer), Count())
            count.nbytes += more.nbytes
            count.messages += more.messages
            count.queued_seconds += more.queued_seconds
            count.transfer_seconds += more.transfer_seconds

    def _sum(self, counts: _Counts, purpose: str | None, peer: int | None) -> int:
        with self._lock:
            return sum(
                count.nbytes
                for (name, other), count in counts.items()
                if purpose in (None, name) and peer in (None, other)
            )


class CountedGroup(WrappedGroup):
    """A group that counts in `ledger` the messages that pass through it.

    Args:
        group: carries the messages.
        ledger: counts bytes and messages by purpose and peer, and the time that `wait` took.

    >>> from thinwire import run_threads
    >>> from thinwire.comm import gather
    >>> def replica(group):
    ...     ledger = Ledger()
    ...     gather(CountedGroup(group, ledger), b"12345", limit=100, purpose="names")
    ...     return ledger.sent()
    >>> run_threads(2, replica)  # 8 bytes of length, 5 of payload
    [13, 13]
    """

    def __init__(self, group: Group, ledger: Ledger) -> None:
        super().__init__(group)
        self.ledger = ledger
        self._lock, self._uploaded = threading.Lock(), _uploaded(group)

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """See `Group.post`."""
        posted = time.monotonic()
        transfer = self.group.post(tag, send, recv, purpose, sized)
        for peer, message in travelling(self, tag, send).items():
            self.ledger.add_sent(purpose, peer, message.numel())
        due = travelling(self, tag, recv)
        return _CountedTransfer(transfer, self, purpose, due, sized or Tensor.numel, posted)

    def close(self) -> None:
        super().close()
        self.count_uploaded()

    def count_uploaded(self) -> None:
        """Count what the carrier has sent since the last call, if it counts."""
        with self._lock:
            before, self._uploaded = self._uploaded, _uploaded(self.group)
            self.ledger.add_uploaded(self._uploaded - before)


class _CountedTransfer(WrappedTransfer):
    def __init__(
        self, transfer: Transfer, group: CountedGroup, purpose: str, due: dict[int, Tensor], sized: Sized, posted: float
    ) -> None:
        super().__init__(transfer)
        self._group, self._ledger, self._purpose = group, group.ledger, purpose
        self._due, self._sized, self._posted = due, sized, posted

    def wait(self) -> None:
        begin = time.monotonic()
        try:
            self.transfer.wait()
        finally:
            self._ledger.add_waited(self._purpose, time.monotonic() - begin)
            self._group.count_uploaded()
        due, self._due = self._due, {}  # a second wait counts nothing
        arrivals = self.arrivals
        for peer, buffer in due.items():
            self._ledger.add_received(self._purpose, peer, self._sized(buffer), arrivals[peer] - self._posted)


def _uploaded(group: Group) -> int:
    """Bytes that the carrier has sent to its hub; 0 if it does not count."""
    while isinstance(group, WrappedGroup):
        group = group.group
    return getattr(group, "uploaded", 0)


def _nested(counts: _Counts) -> dict[str, dict[str, dict[str, float]]]:
    tree: dict[str, dict[str, dict[str, float]]] = {}
    for (purpose, peer), count in sorted(counts.items()):
        tree.setdefault(purpose, {})[str(peer)] = asdict(count)
    return tree
