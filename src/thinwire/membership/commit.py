"""Atomic commit: one yes or no for all members, which never changes.

A vote store keeps what members write; if two values are proposed for one key, it keeps the first. The protocol for the member of
rank r of M:

* A member that is against casts the ballot `no`. It knows the outcome at once, because yes needs its ballot for the same.
* A member that is for casts its ballot, with a digest of what it votes for. If it then sees all M ballots with one digest it proposes
  yes; otherwise it waits for the outcome.
* The wait ends with the last ballot, whether or not its member lives on: the store then settles yes for the one that waits. It does not
  end with an earlier no: only then do the ballots show who voted for what, and who has not voted.
* At its deadline, or as soon as all members without a ballot have gone or call for another view, it looks once more, and proposes yes
  if all ballots are there, otherwise no.

With any deaths, delays and order there is one outcome, and it is yes only if all M members were for the same. A member that cannot reach the
vote store after casting its ballot does not know the outcome: `UndecidedError`. No member waits beyond its deadline.

`ballot` is the protocol without I/O: a generator that yields operations on the vote store and is sent their results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

YES, NO = b"yes", b"no"

_RANK = re.compile("0|[1-9][0-9]{0,4}")
Electorate = Sequence[tuple[str, str, int]]  # the members of a view in rank order: name, incarnation, and calls so far


def view_id(members: Electorate) -> str:
    """The unique name of the view of these members."""
    return hashlib.blake2b(json.dumps(members).encode(), digest_size=16).hexdigest()


class VoteStore(Protocol):
    """The store of votes. Every call may raise `LinkError`; then the store is not used again."""

    def of(self, members: Electorate) -> VoteStore:
        """This store for votes of the view of these members. A replica that is not a member, or votes for another, is refused."""

    def put(self, key: str, value: str = "1") -> None:
        """Write `key`; idempotent."""

    def all(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are written, with one value."""

    def values(self, keys: Sequence[str]) -> list[str | None]:
        """The values of `keys`; None for one that is not written."""

    def settle(self, key: str, value: bytes) -> bytes:
        """Propose `value` for `key`. Returns the value of `key`, which is the first proposal and never changes."""

    def wait(self, key: str, seconds: float) -> bytes | None:
        """Wait for the last ballot, and return the value of `key`, which is settled then: yes if all are alike. After `seconds`, or if all
        members whose ballots are missing have gone or call for another view: its value, or None if it is not settled.
        """

    def report(self, text: str) -> None:
        """Write a line to the log of the server, which bounds them."""

    def forget(self, keys: Sequence[str]) -> None:
        """Delete these ballots of this member, because it will not ask about their questions again. Does not wait, and never raises."""


@dataclass(frozen=True)
class Put:
    key: str
    value: str = "1"


@dataclass(frozen=True)
class All:
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Settle:
    key: str
    value: bytes


@dataclass(frozen=True)
class Wait:
    """Wait for the last ballot, until the member's own deadline, or until those that are missing will not vote."""

    key: str


Step = Put | All | Settle | Wait


def keys_of(question: str, size: int) -> tuple[str, tuple[str, ...]]:
    """The key of the outcome, and the keys of the ballots in rank order."""
    return f"{question}/outcome", tuple(f"{question}/{rank}" for rank in range(size))


class Ballot(NamedTuple):
    """The question of a ballot, and the rank of its member."""

    question: str
    rank: int


def ballot_of(key: str) -> Ballot | None:
    """The inverse of `keys_of`; None if `key` is not a ballot.

    >>> ballot_of("land/2")
    Ballot(question='land', rank=2)
    """
    question, slash, rank = key.rpartition("/")
    return Ballot(question, int(rank)) if slash and _RANK.fullmatch(rank) else None


def ballot(question: str, rank: int, size: int, yes: bool, what: str = "1") -> Generator[Step, Any, bool]:
    """One member's part in the vote on `question`; returns the outcome. `what` is a digest of what it votes for.

    >>> steps = ballot("land", rank=0, size=2, yes=True)
    >>> next(steps)
    Put(key='land/0', value='1')
    >>> steps.send(None)
    All(keys=('land/0', 'land/1'))
    """
    outcome, ballots = keys_of(question, size)
    if not yes:
        yield Put(ballots[rank], NO.decode())
        return False
    yield Put(ballots[rank], what)
    if not (yield All(ballots)):
        heard = yield Wait(outcome)
        if heard is not None:
            return bool(heard == YES)
        if not (yield All(ballots)):
            return bool((yield Settle(outcome, NO)) == YES)
    return bool((yield Settle(outcome, YES)) == YES)


def _wait(vote_store: VoteStore, outcome: str, seconds: float) -> bytes | None:
    return vote_store.wait(outcome, seconds)


def carry_out(
    steps: Generator[Step, Any, bool], vote_store: VoteStore, seconds: float,
    wait: Callable[[VoteStore, str, float], bytes | None] = _wait,
) -> bool:  # fmt: skip
    """Execute the operations of `steps` on `vote_store`; `wait` waits there for an outcome. Raises their errors."""
    came: Any = None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return bool(end.value)
        match step:
            case Put(key, value):
                came = vote_store.put(key, value)  # type: ignore[func-returns-value]
            case All(keys):
                came = vote_store.all(keys)
            case Settle(key, value):
                came = vote_store.settle(key, value)
            case Wait(key):
                came = wait(vote_store, key, seconds)
