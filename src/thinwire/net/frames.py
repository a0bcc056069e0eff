"""The frames between members and hub: fixed binary headers, little-endian, checked before anything is allocated.

A frame begins with

| bytes | field    | meaning                                                                   |
|-------|----------|---------------------------------------------------------------------------|
| 1     | kind     | of the frame, below                                                       |
| 1     | version  | of the frames of this connection, which both sides speak (versions.py)    |
| 2     | rank     | to the hub: the receiver; from the hub: the sender, or the member it is about |
| 8     | sequence | 0, 1, 2, ... of all frames of this stream in this direction               |

The fields of its kind follow. Control frames and messages of at most `SMALL_NBYTES` bytes are sent on the control stream, the
chunks of longer messages on bulk streams. A receiver requests each message (PULL) when its buffer is ready. Only
requested messages are sent, so none must be stored. Until the WELCOME the hub tells a member who waits with it (WAITING).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from thinwire.errors import ConfigurationError, PacketError
from thinwire.net.keys import check_name

SAME_RELEASE = "run the same release of Thinwire everywhere"

CHUNK_NBYTES = 1 << 17
SMALL_NBYTES = 1 << 13  # a message up to this size is sent on the control stream
MEMBERS = 64  # most members of one group
LIMIT_NBYTES = CHUNK_NBYTES + 2048  # most bytes of one frame

HELLO, WELCOME, BACK, AWAY, GONE, SYNC, PULL, ACK, REFUSE, LEAVE, ATTACH, DATA, MEET, ASK, ANSWER, WAITING = range(16)
PASSED_ON = (SYNC, PULL, ACK, REFUSE)  # forwarded from member to member unchanged

LEFT, REVOKED, REPLACED, LOST = range(4)  # the reason why a member is gone
REASONS = {
    LEFT: "closed its group",
    REVOKED: "was revoked at the hub",
    REPLACED: "has restarted",
    LOST: "has died, or its link is cut",
}

HEADER = struct.Struct("<BBHQ")
_FIELDS = {
    HELLO: struct.Struct("<16s32sHH64s"),  # of this process; of the group's label; members; see `grouping.GroupRequest`
    BACK: struct.Struct("<Q"),  # the member's connection
    AWAY: struct.Struct("<"),
    GONE: struct.Struct("<B"),  # why
    SYNC: struct.Struct("<QI"),  # the member that it is about, and its connection; the number of PULLs that follow
    PULL: struct.Struct("<QIQQ"),  # receive, tag, bytes, offset
    ACK: struct.Struct("<QQ"),  # receive, bytes that are there
    REFUSE: struct.Struct("<QQ"),  # receive, bytes of the message that was posted
    LEAVE: struct.Struct("<"),
    ATTACH: struct.Struct("<Q"),  # the member's connection
    # Of this process; name of the run, filled up with zeros; questions and answers follow, as JSON.
    MEET: struct.Struct("<16s64s"),
}
_WELCOME = struct.Struct("<QQHH")  # connection, group, rank, members; then their names, and whether each is connected
_DATA_UP = struct.Struct("<QH")  # offset, receivers; then each, then the chunk
_RECEIVER = struct.Struct("<HQ")  # rank, receive
_DATA_DOWN = struct.Struct("<QQ")  # receive, offset; then the chunk


@dataclass(frozen=True)
class Frame:
    """A frame whose header and length were checked. `fields` are those of its kind; `body` follows them."""

    kind: int
    rank: int
    fields: tuple[int | bytes, ...] = ()
    body: bytes = b""

    def number(self, place: int) -> int:
        """The field at `place`, which is a number."""
        value = self.fields[place]
        assert isinstance(value, int)
        return value

    def data(self, place: int) -> bytes:
        """The field at `place`, which is bytes."""
        value = self.fields[place]
        assert isinstance(value, bytes)
        return value


def group_label(size: int, run: str) -> bytes:
    """The label of a fixed group of `size` members in the run of this name."""
    return hashlib.sha256(f"thinwire {size} {run}".encode()).digest()


def run_digest(run: str) -> str:
    """What a fixed group states beside its label: members of one run that ask for groups of other sizes have the same."""
    return hashlib.sha256(f"thinwire run {run}".encode()).hexdigest()


def with_reducer(run: str) -> str:
    """The name under which the members of a run meet if the hub averages their packets: no other group counts as theirs."""
    return f"{run} with a reducer"


def packed(kind: int, *fields: int | bytes) -> bytes:
    """The bytes of a frame of fixed size, without its header."""
    return _FIELDS[kind].pack(*fields)


def head(kind: int, rank: int, sequence: int, version: int) -> bytes:
    """The header of a frame."""
    return HEADER.pack(kind, version, rank, sequence)


def opened(raw: bytes, sequence: int, kinds: Sequence[int], version: int) -> Frame:
    """Check and parse `raw`: a frame of this `version` with this `sequence`, of one of these `kinds`. Raises `PacketError`."""
    if len(raw) < HEADER.size:
        raise PacketError(f"a frame has {len(raw)} bytes; at least {HEADER.size} are needed; {SAME_RELEASE}")
    kind, stated, rank, number = HEADER.unpack_from(raw)
    if stated != version:
        raise PacketError(f"a frame has version {stated}, and this connection uses version {version}; {SAME_RELEASE}")
    if number != sequence:
        raise PacketError(
            f"frame {number} came where frame {sequence} was expected: a frame was repeated, lost or reordered; connect again"
        )
    if kind not in kinds:
        raise PacketError(f"a frame of kind {kind} came, which is not allowed here; {SAME_RELEASE}")
    rest = raw[HEADER.size :]
    if kind in (DATA, WELCOME, WAITING, ASK, ANSWER):
        return Frame(kind, rank, (), rest)
    if len(rest) != _FIELDS[kind].size:
        raise PacketError(
            f"a frame of kind {kind} has {len(rest)} bytes; {_FIELDS[kind].size} are needed; {SAME_RELEASE}"
        )
    return Frame(kind, rank, _FIELDS[kind].unpack(rest))


def packed_welcome(
    connection: int, group: int, rank: int, names: Sequence[str], present: Sequence[tuple[int, int]]
) -> bytes:
    """The body of a WELCOME: the names of the group's members, then the rank and connection of each member that is connected now."""
    there = b"".join(_RECEIVER.pack(*one) for one in present)
    return (
        _WELCOME.pack(connection, group, rank, len(names))
        + packed_names(names)
        + struct.pack("<H", len(present))
        + there
    )


@dataclass(frozen=True)
class Welcome:
    """A member's place in its group. `present` has the rank and connection of each member that is connected."""

    connection: int
    group: int
    rank: int
    names: tuple[str, ...]
    present: tuple[tuple[int, int], ...]


def opened_welcome(body: bytes) -> Welcome:
    """Parse the body of a WELCOME. Raises `PacketError`."""
    try:
        connection, group, rank, size = _WELCOME.unpack_from(body)
        if not 0 <= rank < size <= MEMBERS:
            raise ValueError
        names, place = _names(body, _WELCOME.size, size)
        (count,) = struct.unpack_from("<H", body, place)
        if len(body) != place + 2 + count * _RECEIVER.size:
            raise ValueError
        present = tuple(_RECEIVER.unpack_from(body, place + 2 + at * _RECEIVER.size) for at in range(count))
    except (struct.error, ValueError, IndexError, ConfigurationError):
        raise PacketError(f"the hub's welcome cannot be read; {SAME_RELEASE}") from None
    return Welcome(connection, group, rank, names, present)


def packed_names(names: Sequence[str]) -> bytes:
    """The body of a WAITING: the members that wait."""
    return b"".join(bytes([len(name)]) + name.encode() for name in names)


def opened_names(body: bytes) -> tuple[str, ...]:
    """Parse the body of a WAITING. Raises `PacketError`."""
    with suppress(ValueError, ConfigurationError):
        names, end = _names(body, 0, MEMBERS)
        if end == len(body):
            return names
    raise PacketError(f"the hub's list of waiting members cannot be read; {SAME_RELEASE}")


def _names(body: bytes, place: int, most: int) -> tuple[tuple[str, ...], int]:
    """At most `most` names from `place` on, and the place after them."""
    names: list[str] = []
    while len(names) < most and place < len(body):
        length = body[place]
        names.append(check_name(body[place + 1 : place + 1 + length].decode("ascii")))
        place += 1 + length
    return tuple(names), place


def packed_data(offset: int, receivers: Sequence[tuple[int, int]], chunk: bytes | memoryview) -> bytes:
    """The body of a chunk sent to the hub. `receivers` are pairs of a rank and the number of its receive."""
    to = b"".join(_RECEIVER.pack(*one) for one in receivers)
    return b"".join((_DATA_UP.pack(offset, len(receivers)), to, chunk))


def opened_data(body: bytes) -> tuple[int, list[tuple[int, int]], memoryview]:
    """Parse a chunk sent to the hub: offset, receivers, chunk. Raises `PacketError`."""
    if len(body) < _DATA_UP.size:
        raise PacketError(
            f"a chunk with its header has {len(body)} bytes; at least {_DATA_UP.size} are needed; {SAME_RELEASE}"
        )
    offset, count = _DATA_UP.unpack_from(body)
    begin = _DATA_UP.size + count * _RECEIVER.size
    if not 0 < count < MEMBERS or not 0 < len(body) - begin <= CHUNK_NBYTES:
        raise PacketError(
            f"a chunk with its header has {len(body)} bytes and {count} receivers; 1 to {MEMBERS - 1} receivers, and 1 to {CHUNK_NBYTES} bytes "
            "after the header, are needed"
        )
    receivers = [_RECEIVER.unpack_from(body, _DATA_UP.size + at * _RECEIVER.size) for at in range(count)]
    return offset, receivers, memoryview(body)[begin:]


def packed_passed(receive: int, offset: int, chunk: memoryview) -> bytes:
    """The body of a chunk that the hub sends to the member that posted `receive`."""
    return b"".join((_DATA_DOWN.pack(receive, offset), chunk))


def opened_passed(body: bytes) -> tuple[int, int, memoryview]:
    """Parse a chunk sent by the hub: receive, offset, chunk. Raises `PacketError`."""
    if not _DATA_DOWN.size < len(body) <= _DATA_DOWN.size + CHUNK_NBYTES:
        most = _DATA_DOWN.size + CHUNK_NBYTES
        raise PacketError(
            f"a chunk with its header has {len(body)} bytes; {_DATA_DOWN.size + 1} to {most} are needed; {SAME_RELEASE}"
        )
    receive, offset = _DATA_DOWN.unpack_from(body)
    return receive, offset, memoryview(body)[_DATA_DOWN.size :]
