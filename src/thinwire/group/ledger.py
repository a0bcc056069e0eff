"""What was sent and received: every byte, by peer and by purpose.

Put the counter next to the carrier, inside any `LinkedGroup`: it counts where bytes are handed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from thinwire.group.base import Group, Transfer, travelling

_Counts = dict[tuple[str, int], tuple[int, int]]  # (purpose, peer): (bytes, messages)


class Ledger:
    """Counts of bytes and messages, by purpose and peer; threads may write at once.

    A message sent is counted when the carrier took it, in full even if the peer then dies; a message received, when
    its transfer is complete. `waited` is the time spent in `wait`, all threads together.

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

    def add_sent(self, purpose: str, peer: int, nbytes: int) -> None:
        """One message of `nbytes` was handed to the carrier."""
        self._add(self._sent, purpose, peer, nbytes)

    def add_received(self, purpose: str, peer: int, nbytes: int) -> None:
        """One message of `nbytes` has arrived."""
        self._add(self._received, purpose, peer, nbytes)

    def add_waited(self, purpose: str, seconds: float) -> None:
        """A thread waited `seconds` for a transfer."""
        with self._lock:
            self._waited[purpose] = self._waited.get(purpose, 0.0) + seconds

    def sent(self, purpose: str | None = None, peer: int | None = None) -> int:
        """Bytes sent, of all purposes and to all peers unless said."""
        return self._sum(self._sent, purpose, peer)

    def received(self, purpose: str | None = None, peer: int | None = None) -> int:
        """Bytes received, of all purposes and from all peers unless said."""
        return self._sum(self._received, purpose, peer)

    def waited(self, purpose: str | None = None) -> float:
        """Seconds spent waiting, for all purposes unless said."""
        with self._lock:
            return sum(seconds for name, seconds in self._waited.items() if purpose in (None, name))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `sent` and `received`, each {purpose: {peer: {"nbytes", "messages"}}}; `waited_seconds` {purpose: s}."""
        with self._lock:
            return {
                "sent": _nested(self._sent),
                "received": _nested(self._received),
                "waited_seconds": dict(sorted(self._waited.items())),
            }

    def _add(self, counts: _Counts, purpose: str, peer: int, nbytes: int) -> None:
        with self._lock:
            total, messages = counts.get((purpose, peer), (0, 0))
            counts[purpose, peer] = (total + nbytes, messages + 1)

    def _sum(self, counts: _Counts, purpose: str | None, peer: int | None) -> int:
        with self._lock:
            return sum(
                nbytes
                for (name, other), (nbytes, _) in counts.items()
                if purpose in (None, name) and peer in (None, other)
            )


class CountedGroup:
    """A group that writes into `ledger` what passes through it."""

    def __init__(self, group: Group, ledger: Ledger) -> None:
        self.group, self.ledger = group, ledger

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def post(
        self, tag: int, send: Mapping[int, Tensor], recv: Mapping[int, Tensor], purpose: str = "packet"
    ) -> Transfer:
        """See `Group.post`."""
        transfer = self.group.post(tag, send, recv, purpose)
        for peer, message in travelling(self, tag, send).items():
            self.ledger.add_sent(purpose, peer, message.numel())
        due = {peer: buffer.numel() for peer, buffer in travelling(self, tag, recv).items()}
        return _CountedTransfer(transfer, self.ledger, purpose, due)

    def close(self) -> None:
        """See `Group.close`."""
        self.group.close()


class _CountedTransfer:
    def __init__(self, transfer: Transfer, ledger: Ledger, purpose: str, due: dict[int, int]) -> None:
        self._transfer, self._ledger, self._purpose, self._due = transfer, ledger, purpose, due

    @property
    def queued_seconds(self) -> float:
        return self._transfer.queued_seconds

    @property
    def transfer_seconds(self) -> float:
        return self._transfer.transfer_seconds

    def wait(self) -> None:
        begin = time.monotonic()
        try:
            self._transfer.wait()
        finally:
            self._ledger.add_waited(self._purpose, time.monotonic() - begin)
        due, self._due = self._due, {}  # a second wait counts nothing
        for peer, nbytes in due.items():
            self._ledger.add_received(self._purpose, peer, nbytes)


def _nested(counts: _Counts) -> dict[str, dict[str, dict[str, int]]]:
    tree: dict[str, dict[str, dict[str, int]]] = {}
    for (purpose, peer), (nbytes, messages) in sorted(counts.items()):
        tree.setdefault(purpose, {})[str(peer)] = {"nbytes": nbytes, "messages": messages}
    return tree
