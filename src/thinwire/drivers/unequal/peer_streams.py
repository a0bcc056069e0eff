"""Messages beside training: a thread for each direction of each peer. Packets are passed on as they arrive, unread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.errors import LinkError, PeerError
from thinwire.packet import said_nbytes

# Messages that may wait, beside two of each fragment as at the end of a run. A peer that leaves more unreceived counts as lost.
MOST_WAITING = 64
LEFT = (
    "this replica took no messages for so long that it counted as lost, and the others continued without it. When they have ended, "
    "resume all from checkpoints."
)


def of_this_replica(error: PeerError) -> bool:
    """Whether the carrier has ended this replica's own part of the group, as a hub ends a member that counted as gone."""
    return isinstance(error, LinkError) and error.peer is None


class PeerReceiver:
    """Receives packets of `peer`, each into a new `buffer()`, until `deliver(peer, packet)` returns True: that was the last one.

    An error is delivered like a packet, and nothing after it.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        tag: int,
        buffer: Callable[[], Tensor],
        deliver: Callable[[int, Tensor | PeerError], bool],
    ) -> None:
        self._group, self._peer, self._tag, self._buffer, self._deliver = group, peer, tag, buffer, deliver
        threading.Thread(target=self._run, name=f"thinwire-receive-{peer}", daemon=True).start()

    def _run(self) -> None:
        while True:
            packet = self._buffer()
            try:
                self._group.post(self._tag, {}, {self._peer: packet}, sized=said_nbytes).wait()
            except Exception as error:
                self._deliver(self._peer, error if isinstance(error, PeerError) else PeerError(str(error)))
                return
            if self._deliver(self._peer, packet):
                return


class PeerSender:
    """Sends packets of a model in `fragments` to `peer` in order; `send` does not block. Calls `lost(peer, why)` when sending fails. A peer
    that takes no messages gets `instead` in place of those that wait.
    """

    def __init__(
        self, group: Group, peer: int, tag: int, lost: Callable[[int, PeerError], object], fragments: int = 1,
        instead: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._group, self._peer, self._tag, self._lost = group, peer, tag, lost
        self._most, self._instead = MOST_WAITING + 2 * fragments, instead
        self._waiting: queue.Queue[Tensor | None] = queue.Queue()
        self._over = self._behind = False
        self._thread = threading.Thread(target=self._run, name=f"thinwire-sender-{peer}", daemon=True)
        self._thread.start()

    def send(self, packet: Tensor) -> None:
        if self._over:
            return
        if self._waiting.qsize() >= self._most:
            self._over, self._behind = True, self._instead is not None
            self._lost(self._peer, PeerError(f"it takes no messages: {self._most} wait for it"))
            if self._behind:
                self._waiting.put(self._instead)
            return
        self._waiting.put(packet)

    def end(self) -> None:
        """Send what is queued, then end the thread. Nothing more may be sent."""
        self._over = True
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until all is sent, for `seconds` at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        last = None
        while last is None and (packet := self._waiting.get()) is not None:
            last = self._instead if self._behind else None  # a message after a gap would not fit the peer's state
            try:
                self._group.post(self._tag, {self._peer: packet if last is None else last}, {}).wait()
            except Exception as error:
                self._over = True
                self._lost(self._peer, error if isinstance(error, PeerError) else PeerError(str(error)))
                return
