"""One group at the hub: its connected members, and the frames between them. No I/O.

The hub reads only the header of frames that it forwards, and stores only frames that a receiver has requested. A member's frames wait
until the receiver has taken them; the number of waiting bytes is limited to those that an honest member has in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from thinwire.errors import PacketError
from thinwire.net import frames
from thinwire.net.frames import Frame
from thinwire.net.messages import window_nbytes
from thinwire.net.state import Grouped

CONTROL_NBYTES = 1 << 20  # most waiting control bytes from one member to another
_STUCK_NBYTES = 64 << 20  # most waiting control bytes for a member that reads nothing, before it is disconnected
_SAID_AGAIN = (*frames.PASSED_ON, frames.DATA)
LOOK_SECONDS = 0.5  # seconds between two looks of the hub, at its connections and for changes by commands
SILENT_LOOKS = 60  # looks without a byte after which a connection is over; the hub's pings (`channels`) ask for some
_RESENT = 3  # windows: after a reconnect chunks are sent again while older ones still wait


class PassedOn(NamedTuple):
    """A frame without its header."""

    kind: int
    rank: int
    body: bytes


class Pipe:
    """Frames that wait to be written to a member."""

    def __init__(self) -> None:
        self._frames: deque[PassedOn] = deque()
        self._ready = asyncio.Event()
        self._waiting: Counter[int] = Counter()  # bytes by sender

    def put(self, frame: PassedOn, most: int | None = None) -> None:
        """Append a frame. Raises `PacketError` if more than `most` bytes of the member `frame.rank` would wait."""
        waiting = self._waiting[frame.rank] + len(frame.body) + frames.HEADER.size
        if most is not None and waiting > most:
            raise PacketError(
                f"{waiting} bytes wait for one receiver, at most {most} are allowed: the sender floods the hub"
            )
        self._waiting[frame.rank] = waiting
        self._frames.append(frame)
        self._ready.set()

    def put_alone(self, frame: PassedOn) -> None:
        """Append a frame, which replaces all waiting ones."""
        self._frames.clear()
        self._waiting.clear()
        self.put(frame)

    @property
    def nbytes(self) -> int:
        """Bytes of all waiting frames."""
        return self._waiting.total()

    def forget(self, rank: int) -> None:
        """Drop the waiting frames of member `rank`: its connection broke, and it will send them again."""
        self._frames = deque(frame for frame in self._frames if frame.rank != rank or frame.kind not in _SAID_AGAIN)
        self._waiting[rank] = sum(len(frame.body) + frames.HEADER.size for frame in self._frames if frame.rank == rank)

    async def get(self) -> PassedOn:
        """Wait for the next frame, and take it."""
        while not self._frames:
            self._ready.clear()
            await self._ready.wait()
        frame = self._frames.popleft()
        self._waiting[frame.rank] -= len(frame.body) + frames.HEADER.size
        return frame


class Connection:
    """One connected process: a control stream and some bulk streams. Setting `end` ends them all.

    Args:
        received: the bytes that have come so far over the connection of its control stream, in which no bulk stands before a ping.
        run: it is the stream of this process's requests in the elastic run of this name.
        label: that of its fixed group, or of its view's.
        address: from which it comes.
    """

    def __init__(
        self, number: int, name: str, process: bytes, expires: float, received: Callable[[], int], run: str | None,
        label: bytes = b"", address: str = "",
    ) -> None:  # fmt: skip
        self.number, self.name, self.process, self.expires, self.run = number, name, process, expires, run
        self.label, self.address, self.since = label, address, time.time()
        self._received, self._before, self._silent = received, -1, 0
        self.control, self.bulk, self.end = Pipe(), Pipe(), asyncio.Event()
        self.streams = 0  # number of bulk streams
        self.refusal = ""  # the reason why it must not connect again
        self.relay: Relay | None = None
        self.rank = 0

    def takes_place_of(self, other: Connection) -> bool:
        """Whether it is of another process than `other`, with the same name in the same group or run."""
        here, there = (self.name, self.run, self.label), (other.name, other.run, other.label)
        return here == there and self.process != other.process

    @property
    def nbytes(self) -> int:
        """Bytes that have come from it."""
        return self._received()

    def why_over(self, now: float) -> str:
        """Look at it: why it is over, if it is. Looks are counted and not seconds, so a hub that stood still ends nobody for that."""
        received = self._received()
        self._silent = self._silent + 1 if received == self._before else 0
        self._before = received
        if self._silent >= SILENT_LOOKS:
            return f"nothing has come from it for {SILENT_LOOKS * LOOK_SECONDS:g} s or more"
        return "its certificate has expired" if self.expires < now else ""


class Relay:
    """A group at the hub. `gone(rank, reason)` is called when a member will not come back."""

    def __init__(self, group: Grouped, gone: Callable[[int, int], None]) -> None:
        self.group, self._gone = group, gone
        self.size = len(group.members)
        self.gone = dict(group.gone)
        self.connections: dict[int, Connection] = {}
        self.away = dict.fromkeys(range(self.size), time.monotonic())  # the time of disconnection
        # (rank, peer): rank has listed its receives to peer since both are connected
        self._synced: set[tuple[int, int]] = set()
        self._most = _RESENT * window_nbytes(self.size) + frames.LIMIT_NBYTES

    def connect(self, rank: int, connection: Connection) -> None:
        """Connect the member `rank`; its older connection ends."""
        if old := self.connections.pop(rank, None):
            old.end.set()
        self._break_off(rank)
        present = [(other, there.number) for other, there in self.connections.items()]
        names = [name for name, _ in self.group.members]
        connection.relay, connection.rank = self, rank
        welcome = frames.packed_welcome(connection.number, self.group.number, rank, names, present)
        connection.control.put(PassedOn(frames.WELCOME, 0, welcome))
        for other, reason in self.gone.items():
            connection.control.put(PassedOn(frames.GONE, other, frames.packed(frames.GONE, reason)))
        self._tell(PassedOn(frames.BACK, rank, frames.packed(frames.BACK, connection.number)))
        self.connections[rank] = connection
        self.away.pop(rank, None)

    def disconnect(self, connection: Connection) -> None:
        """Drop a connection whose streams have ended; its member may reconnect."""
        rank = connection.rank
        if self.connections.get(rank) is connection:
            del self.connections[rank]
            self.away[rank] = time.monotonic()
            self._break_off(rank)
            self._tell(PassedOn(frames.AWAY, rank, b""))

    def leave(self, rank: int, reason: int) -> None:
        """Remove the member `rank` permanently."""
        if rank not in self.gone:
            self._gone(rank, reason)  # first: if the disk is full, it is tried again
            self.gone[rank] = reason
            self._tell(PassedOn(frames.GONE, rank, frames.packed(frames.GONE, reason)))

    def control(self, rank: int, frame: Frame) -> None:
        """Handle a frame of the control stream of `rank`. Raises `PacketError`."""
        if frame.kind == frames.LEAVE:
            self.leave(rank, frames.LEFT)
            if connection := self.connections.get(rank):
                connection.end.set()
            return
        if frame.kind == frames.DATA:
            self.data(rank, frame, small=True)
            return
        self._check(rank, frame.rank)
        there = self.connections.get(frame.rank)
        if there is None:
            return  # the sender repeats it when that member is back
        if frame.kind == frames.SYNC and frame.number(0) == there.number:
            self._synced.add((rank, frame.rank))
        if (rank, frame.rank) in self._synced:
            body = frames.packed(frame.kind, *frame.fields)
            there.control.put(PassedOn(frame.kind, rank, body), CONTROL_NBYTES)

    def data(self, rank: int, frame: Frame, small: bool = False) -> None:
        """Forward a chunk of `rank` to each of its receivers. Raises `PacketError`."""
        offset, receivers, chunk = frames.opened_data(frame.body)
        if small and len(chunk) > frames.SMALL_NBYTES:
            raise PacketError(
                f"a chunk of {len(chunk)} bytes came on the control stream; at most {frames.SMALL_NBYTES} are allowed there; {frames.SAME_RELEASE}"
            )
        for other, receive in receivers:
            self._check(rank, other)
            if there := self.connections.get(other):
                passed = PassedOn(frames.DATA, rank, frames.packed_passed(receive, offset, chunk))
                (there.control if small else there.bulk).put(passed, CONTROL_NBYTES if small else self._most)

    def _check(self, rank: int, other: int) -> None:
        if other == rank or not 0 <= other < self.size:
            raise PacketError(
                f"a frame of member {rank} is for member {other}; another member from 0 to {self.size - 1} is needed; {frames.SAME_RELEASE}"
            )

    def _break_off(self, rank: int) -> None:
        """Drop the frames from and to `rank`; both sides send them again when it is back."""
        self._synced = {pair for pair in self._synced if rank not in pair}
        for connection in self.connections.values():
            connection.control.forget(rank)
            connection.bulk.forget(rank)

    def _tell(self, frame: PassedOn) -> None:
        for rank, connection in self.connections.items():
            if rank != frame.rank:
                connection.control.put(frame)
            if connection.control.nbytes > _STUCK_NBYTES:
                connection.end.set()


def flatten(frame: PassedOn, sequence: int, version: int) -> bytes:
    """The bytes of the frame, with its header."""
    return frames.head(frame.kind, frame.rank, sequence, version) + frame.body


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts names with numbers by size: replica-2 before replica-10."""
    parts: list[tuple[str, int]] = []
    text, digits = "", ""
    for letter in name + "\0":
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((text, int(digits)))
            text = digits = ""
        text += letter
    return (*parts, (text, -1))
