"""The messages of one member in flight: posted sends, pulls from receivers, open receives. No I/O.

A receiver numbers its receives 0, 1, 2, ... and requests each sender's messages by these numbers (`Pull`). A sender pairs the
pulls of a receiver under one tag with its own messages for it under that tag, both in the order of posting. It sends chunks from
the requested offset, to all receivers of a message that are at the same offset at once: a packet is sent to the hub
once, for any number of receivers.

When a connection breaks, frames in flight are lost. Then each side sends again which messages it waits for: a `sync` lists all open
receives. The sender resumes at the offsets in it; messages that are not in it have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from thinwire.errors import LinkError, PacketError, ThinwireError
from thinwire.net.frames import CHUNK_NBYTES, SAME_RELEASE, SMALL_NBYTES
from thinwire.net.posted import Chunk, Cursor, Posted, Pull, Receive

BUDGET_NBYTES = 16 << 20  # most unacknowledged bytes of one member's chunks, all receivers together
PULLS = 4096  # most pulls of one receiver that wait until a message is posted


def window_nbytes(size: int) -> int:
    """The part of `BUDGET_NBYTES` for each receiver in a group of `size`."""
    return max(2 * CHUNK_NBYTES, BUDGET_NBYTES // max(1, size - 1))


class InFlight:
    """All posted or requested messages of one member. Used from one thread.

    Args:
        size: number of members of the group.
        tell: sends control messages to peers.
    """

    def __init__(self, size: int, tell: Teller) -> None:
        self._tell, self._size, self._window = tell, size, window_nbytes(size)
        self._next_receive = 0
        self.receives: dict[int, Receive] = {}
        self._posted: list[Posted] = []  # messages that have not arrived everywhere, in the order of posting
        self._leaving: list[Posted] = []  # those of them whose last chunk is being sent
        self._unasked: dict[tuple[int, int], deque[Posted]] = {}  # by peer and tag
        self._pulls: dict[tuple[int, int], deque[Pull]] = {}  # requested, not posted yet
        self._asked: dict[int, dict[int, Posted]] = {}  # by peer and receive
        self._in_flight: dict[int, int] = {}  # bytes by peer
        self._syncing: dict[int, tuple[int, set[int]]] = {}  # number of PULLs still to come, and those that have come
        self._refused: dict[int, dict[int, int]] = {}  # by peer and receive: bytes of the message that did not fit
        self.away: set[int] = set()
        self.gone: dict[int, LinkError] = {}

    # Calls of this member.

    def receive(self, receive: Receive) -> None:
        """Open a receive."""
        if error := self.gone.get(receive.peer):
            receive.settled(error)
            return
        number, self._next_receive = self._next_receive, self._next_receive + 1
        self.receives[number] = receive
        self._tell.pull(receive.peer, Pull(number, receive.tag, receive.asked, 0))

    def send(
        self, tag: int, data: memoryview, peers: Sequence[int], settled: Callable[[int, ThinwireError | None], None]
    ) -> None:
        """Send `data` to each of `peers` as soon as it requests it."""
        message = Posted(tag, data, settled, {peer: Cursor() for peer in peers if peer not in self.gone})
        self._posted.append(message)
        for peer in peers:
            if error := self.gone.get(peer):
                settled(peer, error)
                continue
            self._unasked.setdefault((peer, tag), deque()).append(message)
            self._pair(peer, tag)
        self._tidy(message)

    def chunk(self, small: bool, late: bool) -> Chunk | None:
        """The next chunk that may be sent, of the `small` messages or of the long ones. If a connected receiver has not requested a message
        yet, the message waits, unless the other receivers have waited long (`late`). A call also means that the previous chunks were copied.
        """
        leaving, self._leaving = self._leaving, []
        for message in leaving:
            if message.sent and not message.copied:
                message.copy()
        for message in self._posted:
            if (message.nbytes <= SMALL_NBYTES) is small and (made := self._chunk_of(message, small, late)):
                return made
        return None

    @property
    def waiting_for_late(self) -> bool:
        """Whether there is a message that only some of its receivers have requested."""
        return any(
            len({cursor.receive is None for cursor in message.cursors.values()}) == 2 for message in self._posted
        )

    @property
    def unfinished(self) -> bool:
        """Whether a receiver has requested a message that it does not have yet."""
        return any(cursor.receive is not None for message in self._posted for cursor in message.cursors.values())

    # Messages from peers.

    def sync(self, peer: int, count: int) -> None:
        """Called when `peer` is about to list its `count` open receives."""
        for key in [key for key in self._pulls if key[0] == peer]:
            del self._pulls[key]
        self.away.discard(peer)
        self._syncing[peer] = count, set()
        self._synced(peer)

    def pull(self, peer: int, pull: Pull) -> None:
        """Called when `peer` requests a message, or the rest of one."""
        if peer in self.gone:
            return
        message = self._asked.get(peer, {}).get(pull.receive)
        if pull.receive in self._refused.get(peer, {}):
            self._tell.refuse(peer, pull.receive, self._refused[peer][pull.receive])
        elif message is None:
            if sum(len(pulls) for (other, _), pulls in self._pulls.items() if other == peer) >= PULLS:
                return  # an honest receiver has fewer
            self._pulls.setdefault((peer, pull.tag), deque()).append(pull)
            self._pair(peer, pull.tag)
        else:
            self._seek(message, peer, pull)
        if peer in self._syncing:
            left, listed = self._syncing[peer]
            listed.add(pull.receive)
            self._syncing[peer] = left - 1, listed
            self._synced(peer)

    def acknowledged(self, peer: int, receive: int, nbytes: int) -> None:
        """Called when `peer` has the first `nbytes` of a message."""
        message = self._asked.get(peer, {}).get(receive)
        if message is None:
            return
        cursor = message.cursors[peer]
        if not cursor.acknowledged <= nbytes <= message.nbytes:
            return
        sent = max(cursor.sent, nbytes)
        self._in_flight[peer] += (sent - cursor.sent) - (nbytes - cursor.acknowledged)
        cursor.sent, cursor.acknowledged = sent, nbytes
        if nbytes == message.nbytes:
            self._arrived(message, peer)

    def data(self, peer: int, receive: int, offset: int, data: memoryview) -> None:
        """Take a chunk from `peer`."""
        open_one = self.receives.get(receive)
        if open_one is None or open_one.peer != peer:
            return  # a repeated chunk
        try:
            open_one.take(offset, data)
        except PacketError as error:
            del self.receives[receive]
            open_one.settled(PacketError(f"a message of replica {peer} cannot be used: {error}; {SAME_RELEASE}"))
            return
        done = open_one.offset
        if done == open_one.nbytes:
            del self.receives[receive]
            open_one.settled(None)
        if done == open_one.nbytes or done - open_one.told >= self._window // 4:
            open_one.told = done
            self._tell.acknowledge(peer, receive, done)

    def refused(self, peer: int, receive: int, nbytes: int) -> None:
        """Fail a receive, because the message of `peer` has `nbytes`, not the requested number."""
        found = self.receives.get(receive)
        if found is not None and found.peer == peer:
            del self.receives[receive]
            found.settled(
                PacketError(
                    f"replica {peer} sent {nbytes} bytes where {found.nbytes} were expected. "
                    "Run the same strategy and version of Thinwire on every replica."
                )
            )

    def open_pulls(self, peer: int) -> list[Pull]:
        """The open receives from `peer`, which a sync lists."""
        return [
            Pull(number, one.tag, one.asked, one.offset) for number, one in self.receives.items() if one.peer == peer
        ]

    def leave(self, peer: int, error: LinkError) -> None:
        """Fail all messages from and to `peer`, which will not come back."""
        if peer in self.gone:
            return
        self.gone[peer] = error
        for number, receive in list(self.receives.items()):
            if receive.peer == peer:
                del self.receives[number]
                receive.settled(error)
        for message in list(self._posted):
            if peer in message.cursors:
                del message.cursors[peer]
                message.settle(peer, error)
                self._tidy(message)
        for keyed in (self._unasked, self._pulls):
            for key in [key for key in keyed if key[0] == peer]:
                del keyed[key]
        for by_peer in (self._asked, self._in_flight, self._syncing, self._refused):
            by_peer.pop(peer, None)

    def fail(self, error: LinkError) -> None:
        """Fail all messages, and those still to be posted."""
        for peer in range(self._size):
            self.leave(peer, error)

    # Helpers.

    def _pair(self, peer: int, tag: int) -> None:
        key = peer, tag
        while self._unasked.get(key) and self._pulls.get(key):
            message, pull = self._unasked[key].popleft(), self._pulls[key].popleft()
            self._asked.setdefault(peer, {})[pull.receive] = message
            self._in_flight.setdefault(peer, 0)
            message.cursors[peer].receive = pull.receive
            self._seek(message, peer, pull)
        for keyed in (self._unasked, self._pulls):
            if key in keyed and not keyed[key]:
                del keyed[key]

    def _seek(self, message: Posted, peer: int, pull: Pull) -> None:
        """Continue at the requested offset."""
        if not pull.fits(message.nbytes):
            self._refused.setdefault(peer, {})[pull.receive] = message.nbytes
            self._tell.refuse(peer, pull.receive, message.nbytes)
            self._arrived(message, peer)
            return
        cursor, offset = message.cursors[peer], min(pull.offset, message.nbytes)
        offset = max(message.begin, offset - offset % CHUNK_NBYTES)
        self._in_flight[peer] -= cursor.sent - cursor.acknowledged
        cursor.sent = cursor.acknowledged = offset

    def _synced(self, peer: int) -> None:
        left, listed = self._syncing[peer]
        if left > 0:
            return
        del self._syncing[peer]
        for receive, message in list(self._asked.get(peer, {}).items()):
            if receive not in listed:
                self._arrived(message, peer)
        self._refused[peer] = {one: nbytes for one, nbytes in self._refused.get(peer, {}).items() if one in listed}

    def _arrived(self, message: Posted, peer: int) -> None:
        cursor = message.cursors.pop(peer)
        assert cursor.receive is not None
        del self._asked[peer][cursor.receive]
        self._in_flight[peer] -= cursor.sent - cursor.acknowledged
        message.settle(peer, None)
        self._tidy(message)

    def _tidy(self, message: Posted) -> None:
        if not message.cursors and message in self._posted:
            self._posted.remove(message)

    def _chunk_of(self, message: Posted, small: bool, late: bool) -> Chunk | None:
        cursors = message.cursors
        if not late and any(cursor.receive is None and peer not in self.away for peer, cursor in cursors.items()):
            return None
        room = [
            (cursor.sent, peer, cursor)
            for peer, cursor in cursors.items()
            if cursor.receive is not None
            and peer not in self.away
            and peer not in self._syncing
            and cursor.sent < message.nbytes
            and (small or self._in_flight[peer] + CHUNK_NBYTES <= self._window)
        ]
        if not room:
            return None
        offset = min(room)[0]
        data = message.data[offset - message.begin : offset - message.begin + CHUNK_NBYTES]
        receivers = []
        for sent, peer, cursor in room:
            if sent == offset:
                assert cursor.receive is not None
                receivers.append((peer, cursor.receive))
                cursor.sent += len(data)
                self._in_flight[peer] += len(data)
        if message.sent:
            self._leaving.append(message)
        return Chunk(offset, receivers, data)


class Teller(Protocol):
    """Sends control messages to one peer."""

    def pull(self, peer: int, pull: Pull) -> None:
        """Ask `peer` for a message."""

    def acknowledge(self, peer: int, receive: int, nbytes: int) -> None:
        """Tell `peer` that the first `nbytes` of its message have arrived."""

    def refuse(self, peer: int, receive: int, nbytes: int) -> None:
        """Tell `peer` that the size of its buffer is not that of the message, `nbytes`."""
