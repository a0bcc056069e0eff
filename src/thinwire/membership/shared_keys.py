"""Keys that the members of a run share at a lighthouse or a hub: ballots, outcomes, addresses, and notes that a run has ended.

A member votes only for itself. The name of a view is a digest of its members (`commit.view_id`), and the members are sent with each
vote. A ballot can be written only by the member of its rank, and the outcome yes only when the ballots of all members are there. So
no request can make an outcome yes unless all members of the view voted for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

from thinwire.errors import PacketError
from thinwire.membership.channel import MOST_MEMBERS
from thinwire.membership.commit import NO, YES, ballot_of, keys_of, view_id

REVOKED = "revoked/"  # prefix of a key that nobody writes: it is there if the member with the name behind it is revoked
NOTE, GROUP = "end/", "group/"  # prefixes of keys that are not votes: notes on ends of runs, and addresses of a group
LAST = "-"  # begins the rest of a note that says something about an end that is noted already
_NOTED = re.compile(f"{NOTE}{LAST}?[0-9a-f]{{32}}")
_MOST_PENDING = 64  # notes of one name that wait for another word
_MOST_KEY, _MOST_VALUE = 256, 1 << 16  # bytes
_MOST_WRITTEN, _MOST_OF_ONE = 1 << 26, 1 << 19  # bytes by all members, and by one of them
_MOST_WRITERS = 8 * MOST_MEMBERS  # names whose ballots and addresses are kept


class Writer(Protocol):
    """The replica that writes: its authenticated name, and its incarnation."""

    name: str
    incarnation: str


class TooMuchError(Exception):
    """There is no room for this key or value."""


class SharedKeys:
    """The keys of one run. No I/O."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, str]] = {}  # by key: the value, and the name of its writer
        self._nbytes: Counter[str] = Counter()  # by name
        self._ballots: Counter[str] = Counter()  # by question: the number of ballots written
        self._voters: dict[str, tuple[str, set[str]]] = {}  # by name: the incarnation that voted last, and its ballots
        self._addresses: defaultdict[str, set[str]] = defaultdict(set)  # by name: keys of its groups
        self._writers: dict[str, None] = {}  # names that wrote ballots or addresses; the last one wrote last
        self.revoked: Collection[str] = ()  # the names of revoked members
        self.witnesses = 1  # names that must write the note of an end before it counts; the registry sets it
        self._pending: dict[str, set[str]] = {}  # by note: the names that wrote it, while they are too few

    def note(self, key: str) -> None:
        """Add the note of an ended run, which was written before a restart."""
        self._write("", key, "1")

    def read(self, keys: Sequence[str]) -> list[str] | None:
        """The values of `keys`; None if not all are written."""
        found = [value for key in keys if (value := self._value(key)) is not None]
        return found if len(found) == len(keys) else None

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """The value of each of `keys`; None for one that is not written."""
        return [self._value(key) for key in keys]

    def _value(self, key: str) -> str | None:
        if key.startswith(REVOKED):
            return "1" if key.removeprefix(REVOKED) in self.revoked else None
        return self._values[key][0] if key in self._values else None

    def put(self, writer: Writer, key: str, value: str, members: object) -> None:
        """Write a key, or a ballot of a view with these `members`. An address of a group replaces those of the writer's earlier groups, and a
        ballot those of an earlier process of its name: a process that died has deleted none. Raises `PacketError` if the writer must
        not write it; `TooMuchError`.
        """
        if key.startswith(NOTE) and not _NOTED.fullmatch(key):
            raise PacketError("the key of a note cannot be read; run the same release of Thinwire everywhere")
        if key.startswith(NOTE):
            if key not in self._values and self._witnessed(writer.name, key):
                self._write(writer.name, key, value)
            return
        if key.startswith(GROUP):
            owner = self._values[key][1] if key in self._values else writer.name
            if owner != writer.name:
                raise PacketError(f"this key was written by {owner}")
            for old in [old for old in self._addresses[owner] if _epoch(old) != _epoch(key)]:
                self._delete(old)
            self._writes(owner)
            self._write(owner, key, value)
            return
        voted = ballot_of(key)
        if voted is None or voted.rank >= len(_electorate(key, members)):
            raise PacketError(
                "the key is not one of a ballot of this view; run the same release of Thinwire everywhere"
            )
        if _electorate(key, members)[voted.rank][:2] != (writer.name, writer.incarnation):
            raise PacketError(f"{writer.name} votes for another member")
        if key not in self._values:
            self._writes(writer.name)
            self._write(writer.name, key, value)
            self._ballots[voted.question] += 1
            incarnation, ballots = self._voters.get(writer.name, ("", set()))
            if incarnation != writer.incarnation:
                for old in sorted(ballots):
                    self._withdraw(old)
                ballots = set()
            self._voters[writer.name] = writer.incarnation, ballots | {key}

    def _witnessed(self, name: str, key: str) -> bool:
        """Whether enough names have written this note, `name` among them: one member's word ends no run of three or more."""
        if key.startswith(NOTE + LAST):
            return True
        names = self._pending.setdefault(key, set()) | {name}
        if sum(name in others for others in self._pending.values()) >= _MOST_PENDING and name not in self._pending[key]:
            raise TooMuchError(f"{name} has noted too many ends that no other member notes")
        self._pending[key] = names
        if len(names) < self.witnesses:
            return False
        del self._pending[key]
        return True

    def settle(self, writer: Writer, key: str, value: str, members: object) -> str:
        """The outcome, which is the first proposal. Raises `PacketError` if the writer must not propose it; `TooMuchError`."""
        view = _electorate(key, members)
        outcome, ballots = keys_of(key.rpartition("/")[0], len(view))
        if key != outcome or value not in (YES.decode(), NO.decode()):
            raise PacketError(
                "the key and the value are not an outcome of this view; run the same release of Thinwire everywhere"
            )
        if (writer.name, writer.incarnation) not in [who[:2] for who in view]:
            raise PacketError(f"{writer.name} is no member of the view that votes")
        if key not in self._values:
            if self._voters.get(writer.name, (writer.incarnation,))[0] != writer.incarnation:
                raise PacketError(f"another process of {writer.name} has voted since, and this outcome may be deleted")
            # if a ballot was withdrawn, or two members vote for different things, the outcome is no
            voted = len(set(self.read(ballots) or ())) == 1
            self._write(writer.name, key, value if voted else NO.decode())
        return self._values[key][0]

    def ballots(self, writer: Writer, key: str, members: object) -> dict[str, str]:
        """The ballots of the vote with the outcome `key`, and the incarnations that cast them. Raises `PacketError` if the writer is no member."""
        view = _electorate(key, members)
        outcome, ballots = keys_of(key.rpartition("/")[0], len(view))
        if key != outcome or (writer.name, writer.incarnation) not in [who[:2] for who in view]:
            raise PacketError(f"{writer.name} is no member of the view that votes")
        return {ballot: incarnation for ballot, (_, incarnation, _) in zip(ballots, view)}

    def forget(self, writer: Writer, key: str) -> None:
        """Delete a key of this writer. The outcome of a question is deleted with its last ballot, because no member can ask for it then."""
        if key.startswith(NOTE):
            return
        own = key in self._values and self._values[key][1] == writer.name
        if key.startswith(GROUP):
            if own:
                self._delete(key)
        elif own or key not in self._values:
            self._withdraw(key)

    def _writes(self, name: str) -> None:
        """Keep what the last writers wrote: a name that never comes back deletes nothing. At most `MOST_MEMBERS` are there at once."""
        self._writers.pop(name, None)
        self._writers[name] = None
        if len(self._writers) > _MOST_WRITERS:
            first = next(iter(self._writers))
            del self._writers[first]
            for key in sorted(self._addresses.get(first, ())):
                self._delete(key)
            for key in sorted(self._voters.get(first, ("", ()))[1]):
                self._withdraw(key)

    def _withdraw(self, key: str) -> None:
        """Delete a ballot if it is there, and the outcome of its question if it was the last."""
        voted = ballot_of(key)
        if voted is None:
            return
        if key in self._values:
            name = self._values[key][1]
            self._delete(key)
            self._ballots[voted.question] -= 1
            self._voters[name][1].discard(key)
            if not self._voters[name][1]:
                del self._voters[name]
        if not self._ballots[voted.question]:
            del self._ballots[voted.question]
            self._delete(keys_of(voted.question, 0)[0])

    def _write(self, name: str, key: str, value: str) -> None:
        """Raises `TooMuchError`."""
        more = len(key) + len(value)
        if key in self._values:
            more -= len(key) + len(self._values[key][0])
        if len(key) > _MOST_KEY or len(value) > _MOST_VALUE:
            raise TooMuchError(f"a key or a value is too large; {_MOST_KEY} and {_MOST_VALUE} characters are allowed")
        if self._nbytes[name] + more > _MOST_OF_ONE or self._nbytes.total() + more > _MOST_WRITTEN:
            raise TooMuchError(
                f"the keys of {name}, or of all replicas, are too large together; {_MOST_OF_ONE:,} and {_MOST_WRITTEN:,} characters are "
                "allowed. Restart the lighthouse or hub: it begins without keys, and the replicas find it again"
            )
        self._values[key] = value, name
        if key.startswith(GROUP):
            self._addresses[name].add(key)
        self._nbytes[name] += more

    def _delete(self, key: str) -> None:
        if key in self._values:
            value, name = self._values.pop(key)
            self._nbytes[name] -= len(key) + len(value)
            self._addresses[name].discard(key)
            if not self._nbytes[name]:
                del self._nbytes[name], self._addresses[name]


def _epoch(key: str) -> str:
    return key.removeprefix(GROUP).partition("/")[0]


def _electorate(key: str, members: object) -> list[tuple[str, str, int]]:
    """The members of the view of the vote `key`: name, incarnation and calls, in rank order. Raises `PacketError`."""
    if not isinstance(members, list) or len(members) > MOST_MEMBERS:
        raise PacketError("a vote does not name the members of its view; run the same release of Thinwire everywhere")
    view = []
    for one in members:
        match one:
            case [str(name), str(incarnation), int(calls)]:
                view.append((name, incarnation, calls))
            case _:
                raise PacketError("the members of a vote cannot be read; run the same release of Thinwire everywhere")
    if view_id(view) != key.partition("/")[0]:
        raise PacketError("the view of this vote has other members")
    return view
