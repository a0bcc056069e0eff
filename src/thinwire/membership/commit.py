"""One yes or no for all members, decided once and for ever.

A vote store keeps what members write; of two values proposed for one key it keeps the first. The protocol, for the member
of rank r among M:

* Whoever is against proposes no. It knows the answer without hearing it: yes needs its ballot, which was never cast.
* Whoever is for casts its ballot. Whoever sees all M ballots proposes yes; else it waits for the outcome.
* At its deadline it looks once more, and proposes yes if all ballots are there by now, else no.

Whatever happens (deaths, delays, any order), there is one outcome, and it is yes only if all M were for. A member
that cannot reach the vote store after casting its ballot does not know: `UndecidedError`. Nobody waits beyond its deadline.

`ballot` is the protocol without input and output: it yields what to do on the vote store and is sent what came of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

YES, NO = b"yes", b"no"

_RANK = re.compile("0|[1-9][0-9]{0,4}")
Electorate = Sequence[tuple[str, str, int]]  # the members of a view in rank order: name, incarnation, and calls so far


def view_id(members: Electorate) -> str:
    """The name of the view of these members, and of no other."""
    return hashlib.blake2b(json.dumps(members).encode(), digest_size=16).hexdigest()


class VoteStore(Protocol):
    """Where members write and read. Every call may raise `LinkError`; then the vote store is never used again."""

    def of(self, members: Electorate) -> VoteStore:
        """This store, for votes of the view of these members: who is none of them, or votes for another, is refused."""

    def put(self, key: str) -> None:
        """Write `key`; again is as once."""

    def all(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` are written."""

    def settle(self, key: str, value: bytes) -> bytes:
        """Propose `value`; what `key` holds now, for ever: the first value that was proposed."""

    def wait(self, key: str, seconds: float) -> bytes | None:
        """What `key` holds, as soon as it was settled; None after `seconds`."""

    def forget(self, keys: Sequence[str]) -> None:
        """This member will not ask again about the questions of these ballots, its own. Does not wait, and never raises."""


@dataclass(frozen=True)
class Put:
    key: str


@dataclass(frozen=True)
class All:
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Settle:
    key: str
    value: bytes


@dataclass(frozen=True)
class Wait:
    """For the outcome, until the member's own deadline."""

    key: str


Step = Put | All | Settle | Wait


def keys_of(question: str, size: int) -> tuple[str, tuple[str, ...]]:
    """The key of the outcome, and those of the ballots in rank order."""
    return f"{question}/outcome", tuple(f"{question}/{rank}" for rank in range(size))


class Ballot(NamedTuple):
    """Of which question a ballot is, and of which rank."""

    question: str
    rank: int


def ballot_of(key: str) -> Ballot | None:
    """The reverse of `keys_of`; None if `key` is no ballot.

    >>> ballot_of("land/2")
    Ballot(question='land', rank=2)
    """
    question, slash, rank = key.rpartition("/")
    return Ballot(question, int(rank)) if slash and _RANK.fullmatch(rank) else None


def ballot(question: str, rank: int, size: int, yes: bool) -> Generator[Step, Any, bool]:
    """One member's part in the vote on `question`; returns the outcome.

    >>> steps = ballot("land", rank=0, size=2, yes=True)
    >>> next(steps)
    Put(key='land/0')
    >>> steps.send(None)
    All(keys=('land/0', 'land/1'))
    """
    outcome, ballots = keys_of(question, size)
    if not yes:
        return bool((yield Settle(outcome, NO)) == YES)
    yield Put(ballots[rank])
    if not (yield All(ballots)):
        heard = yield Wait(outcome)
        if heard is not None:
            return bool(heard == YES)
        if not (yield All(ballots)):
            return bool((yield Settle(outcome, NO)) == YES)
    return bool((yield Settle(outcome, YES)) == YES)


def carry_out(steps: Generator[Step, Any, bool], vote_store: VoteStore, seconds: float) -> bool:
    """Do what `steps` asks for on `vote_store`. Raises what it raises."""
    came: Any = None
    while True:
        try:
            step = steps.send(came)
        except StopIteration as end:
            return bool(end.value)
        match step:
            case Put(key):
                came = vote_store.put(key)  # type: ignore[func-returns-value]
            case All(keys):
                came = vote_store.all(keys)
            case Settle(key, value):
                came = vote_store.settle(key, value)
            case Wait(key):
                came = vote_store.wait(key, seconds)
