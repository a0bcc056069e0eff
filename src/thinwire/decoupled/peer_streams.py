"""Messages that come and go beside training: a thread for each direction of each peer. What arrives is handed on as it is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.errors import PeerError
from thinwire.packet import said_nbytes

MOST_WAITING = 64  # messages to a peer that takes none; one that is so far behind counts as lost


class PeerReceiver:
    """Receives from `peer` into `room()` until `deliver(peer, packet)` says that it was the last. An error is delivered, and is the last."""

    def __init__(
        self,
        group: Group,
        peer: int,
        tag: int,
        room: Callable[[], Tensor],
        deliver: Callable[[int, Tensor | PeerError], bool],
    ) -> None:
        self._group, self._peer, self._tag, self._room, self._deliver = group, peer, tag, room, deliver
        threading.Thread(target=self._run, name=f"thinwire-inlet-{peer}", daemon=True).start()

    def _run(self) -> None:
        while True:
            packet = self._room()
            try:
                self._group.post(self._tag, {}, {self._peer: packet}, sized=said_nbytes).wait()
            except Exception as error:
                self._deliver(self._peer, error if isinstance(error, PeerError) else PeerError(str(error)))
                return
            if self._deliver(self._peer, packet):
                return


class PeerSender:
    """Sends to `peer`, in order, without keeping anybody waiting; `lost(peer, why)` hears when it cannot."""

    def __init__(self, group: Group, peer: int, tag: int, lost: Callable[[int, PeerError], object]) -> None:
        self._group, self._peer, self._tag, self._lost = group, peer, tag, lost
        self._waiting: queue.Queue[Tensor | None] = queue.Queue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"thinwire-outlet-{peer}", daemon=True)
        self._thread.start()

    def send(self, packet: Tensor) -> None:
        if self._over:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            self._over = True
            self._lost(self._peer, PeerError(f"replica {self._peer} takes no messages: {MOST_WAITING} wait for it"))
            return
        self._waiting.put(packet)

    def end(self) -> None:
        """Send what waits, and nothing more."""
        self._over = True
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        """Until all is sent."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (packet := self._waiting.get()) is not None:
            try:
                self._group.post(self._tag, {self._peer: packet}, {}).wait()
            except Exception as error:
                self._over = True
                self._lost(self._peer, error if isinstance(error, PeerError) else PeerError(str(error)))
                return
