"""The posts of one member: receive buffers, and messages with the progress of each receiver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from thinwire.errors import PacketError, ThinwireError
from thinwire.net.frames import CHUNK_NBYTES

AT_MOST = 1 << 63  # a bit in the bytes of a PULL whose message may be shorter


class Pull(NamedTuple):
    """A receiver's request for a message of `nbytes` (at most, with `AT_MOST`), from `offset` on."""

    receive: int
    tag: int
    nbytes: int
    offset: int

    def fits(self, nbytes: int) -> bool:
        """Whether a message of `nbytes` may answer it."""
        return nbytes <= self.nbytes & ~AT_MOST if self.nbytes & AT_MOST else nbytes == self.nbytes


class Chunk(NamedTuple):
    """A part of a message, to be sent to each of `receivers` (rank, receive)."""

    offset: int
    receivers: list[tuple[int, int]]
    data: memoryview


@dataclass(eq=False)
class Receive:
    """A buffer that waits for its message. `buffer` is None after the receive was given up. With `sized` the message may be shorter;
    `sized` returns its number of bytes when its first chunk has arrived.
    """

    peer: int
    tag: int
    nbytes: int
    buffer: memoryview | None
    settled: Callable[[ThinwireError | None], None]
    sized: Callable[[], int] | None = None
    here: bytearray = field(init=False)  # a byte for each chunk: whether it has arrived
    prefix: int = 0  # number of chunks before the first missing one
    told: int = 0  # number of acknowledged bytes
    lock: threading.Lock = field(default_factory=threading.Lock)  # protects the buffer

    def __post_init__(self) -> None:
        self.here = bytearray(-(-self.nbytes // CHUNK_NBYTES))

    @property
    def offset(self) -> int:
        """Bytes before the first missing one."""
        return min(self.nbytes, self.prefix * CHUNK_NBYTES)

    @property
    def asked(self) -> int:
        """The number of bytes in its PULL."""
        return self.nbytes | AT_MOST if self.sized else self.nbytes

    def abandon(self) -> None:
        """Give the buffer back to its owner: nothing more is written into it. Thread-safe."""
        with self.lock:
            self.buffer = None

    def take(self, offset: int, data: memoryview) -> None:
        """Write a chunk into the buffer, unless it has arrived before. Raises `PacketError`."""
        due = min(CHUNK_NBYTES, self.nbytes - offset)
        if offset % CHUNK_NBYTES or not (0 < len(data) <= due if self.sized else len(data) == due):
            raise PacketError(
                f"{len(data)} bytes came at byte {offset} of a message of {self.nbytes} bytes; {due} are due there"
            )
        place = offset // CHUNK_NBYTES
        if self.here[place]:
            return
        self.here[place] = 1
        with self.lock:
            if self.buffer is not None:
                self.buffer[offset : offset + len(data)] = data
        if self.sized and offset == 0:
            self._end_at(min(self.nbytes, self.sized()), len(data))
        missing = self.here.find(0, self.prefix)
        self.prefix = len(self.here) if missing < 0 else missing

    def _end_at(self, nbytes: int, first: int) -> None:
        """Set the message's length of `nbytes`, which its first chunk of `first` bytes declares. Raises `PacketError`."""
        if first != min(CHUNK_NBYTES, nbytes):
            raise PacketError(
                f"{first} bytes came first of a message of {nbytes} bytes; {min(CHUNK_NBYTES, nbytes)} are due first"
            )
        self.nbytes = nbytes
        del self.here[-(-nbytes // CHUNK_NBYTES) :]


@dataclass(eq=False)
class Cursor:
    """The offsets up to which a message was sent to one receiver, and acknowledged by it."""

    receive: int | None = None  # None: the receiver has not requested it
    sent: int = 0
    acknowledged: int = 0


@dataclass(eq=False)
class Posted:
    """A message posted under one tag, for one or more receivers. `settled` is called once with each receiver."""

    tag: int
    data: memoryview
    settled: Callable[[int, ThinwireError | None], None]
    cursors: dict[int, Cursor]  # the receivers that do not have it yet, by rank
    nbytes: int = field(init=False)
    begin: int = 0  # the offset of `data` in the message
    copied: bool = (
        False  # whether it was sent completely and settled, and the part that may be requested again is a copy
    )

    def __post_init__(self) -> None:
        self.nbytes = len(self.data)

    @property
    def sent(self) -> bool:
        """Whether the last byte has been sent to each receiver."""
        return all(cursor.receive is not None and cursor.sent == self.nbytes for cursor in self.cursors.values())

    def settle(self, peer: int, error: ThinwireError | None) -> None:
        """Tell the poster that the message has arrived at `peer`, or failed with `error`."""
        if not self.copied:
            self.settled(peer, error)

    def copy(self) -> None:
        """Copy the part that is not acknowledged, which may be requested again, and return the buffer to its poster."""
        begin = min((cursor.acknowledged for cursor in self.cursors.values()), default=self.nbytes)
        self.data, self.begin = memoryview(bytes(self.data[begin:])), begin
        for peer in self.cursors:
            self.settled(peer, None)
        self.copied = True
