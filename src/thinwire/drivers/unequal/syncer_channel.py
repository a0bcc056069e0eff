"""The channel between a replica and its syncer: queues where both are in one process, and packets over the group elsewhere."""

from __future__ import annotations

import queue
from collections.abc import Callable

from thinwire.comm.group import Group
from thinwire.drivers.unequal.host import Heard, Host
from thinwire.drivers.unequal.messages import DOWN, END, UP, Down, SyncerMessages, Up
from thinwire.drivers.unequal.peer_streams import LEFT, PeerReceiver, PeerSender, of_this_replica
from thinwire.errors import LinkError, PeerError


class SyncerChannel:
    """Sends a replica's messages to the syncer of `group`, and gives the syncer's messages in order. `host` is the syncer, if it is in this
    process. `lost()` says which syncer is lost, for the error. Only the main thread uses it.
    """

    def __init__(self, group: Group, messages: SyncerMessages, host: Host | None, lost: Callable[[], str]) -> None:
        self._messages, self._host, self._lost = messages, host, lost
        self._inbox: queue.Queue[Heard] = queue.Queue()
        self._sender: PeerSender | None = None
        if host:
            self._inbox = host.inbox
            host.start()
        else:
            # A receiver reports a loss, after all messages.
            self._sender = PeerSender(group, messages.host, UP, lambda *_: None, len(messages.numels))
            PeerReceiver(group, messages.host, DOWN, lambda: messages.buffer(DOWN), self._hear)

    @property
    def empty(self) -> bool:
        """Whether `receive` would wait."""
        return self._inbox.empty()

    def send(self, up: Up) -> None:
        packet = self._messages.write_up(up)
        if self._host:
            self._host.give(packet)
        elif self._sender:
            self._sender.send(packet)

    def nbytes(self, fragment: int) -> int:
        """Bytes that a delta of a fragment takes on the wire."""
        return 0 if self._host else self._messages.nbytes(UP, fragment)

    def receive(self) -> Down:
        """Wait for the next message. Raises `LinkError` if the syncer is lost or has left this replica out, also at every later call."""
        heard = self._inbox.get()
        if not isinstance(heard, PeerError):
            down = self._messages.read_down(heard)
            if not down.left:
                return down
            heard = LinkError(LEFT)
        self._inbox.put(heard)
        if of_this_replica(heard):
            raise LinkError(str(heard)) from heard
        ended = ", or has ended the run without this replica" if isinstance(heard, LinkError) else ""
        raise LinkError(f"{self._lost()}{ended}: {heard}") from heard

    def close(self, ended: bool) -> None:
        """Send what is queued, and end the threads. If the run has `ended`, wait up to a minute until all is sent."""
        if self._host:
            self._host.close()
        elif self._sender:
            self._sender.end()
            if ended:
                self._sender.wait(60.0)

    def _hear(self, _: int, heard: Heard) -> bool:
        """Queue a message; return whether it is the last one."""
        self._inbox.put(heard)
        try:
            down = None if isinstance(heard, PeerError) else self._messages.read_down(heard)
        except PeerError:
            down = None
        return down is None or (down.kind == END and not down.stop)
