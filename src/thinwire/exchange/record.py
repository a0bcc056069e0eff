"""The record that a replica keeps of one round, with durations by its own clock only, and the stamps it is made of.

Only the messages 0, 1, 2, 4, 8, ... of a flow are timed, so that a record stays small; both ends time the same messages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from thinwire.errors import PacketError


class Watch(Protocol):
    """Finds what is slow in the records of all members, round after round."""

    def add(self, records: Sequence[Record]) -> Sequence[Any]:
        """Take the records of one round. Returns findings, each with the name of a `suspect`, or None."""

    def forget(self, name: str) -> None:
        """Forget a member, which has left."""


class Rules(Protocol):
    """By which rules a member is evicted; thinwire.app.diagnosis.Rules has the usual ones."""

    def watch(self) -> Watch:
        """A watch that begins now."""


RESOLUTION = 0.01  # seconds: in shorter waits a thread may only have waited to be scheduled
MOST_FLOWS = 4096  # most flows in a record that is read


def timed(index: int) -> bool:
    """Whether message `index` of a flow is timed."""
    return index & (index - 1) == 0


def recorded(number: int) -> bool:
    """Whether round `number` of a fragment is recorded: each of the first 1024, then every 2nd up to 2048, every 4th up to 4096, ...

    So the number of records grows with the logarithm of a run's length. A round that fails is always recorded.

    >>> [recorded(number) for number in (0, 1023, 1024, 1025, 4096, 4100)]
    [True, True, True, False, True, False]
    """
    return number % (1 << max(0, (number >> 10).bit_length())) == 0 if number >= 1 << 10 else True


@dataclass(frozen=True)
class Flow:
    """The messages between this replica and one peer in one stage of a round, in one direction.

    Args:
        peer: name of the other replica.
        stage: number of the stage.
        nbytes: bytes of all messages that were sent, or were due.
        parts: number of messages that were sent, or were due.
        there: number of messages that have arrived; in a flow to a peer, the number that the carrier has taken.
        begin: seconds, on the clock of the record, at which the first was sent, or was asked for.
        at: seconds at which each timed message was sent, or was seen to have arrived, by its number.
        waited: numbers of the timed messages for which the replica waited; the others may have arrived before it looked for them.

    >>> Flow("1", stage=0, nbytes=1000, parts=1, there=1, begin=0.0, at={0: 0.5}).facts()
    ['1', 0, 1000, 1, 1, 0.0, [[0, 0.5, 0]]]
    """

    peer: str
    stage: int
    nbytes: int
    parts: int
    there: int
    begin: float
    at: Mapping[int, float]
    waited: frozenset[int] = frozenset()

    def facts(self) -> list[Any]:
        """For JSON."""
        times = [[index, round(at, 5), int(index in self.waited)] for index, at in sorted(self.at.items())]
        return [self.peer, self.stage, self.nbytes, self.parts, self.there, round(self.begin, 5), times]

    @classmethod
    def of(cls, facts: Sequence[Any]) -> Flow:
        """Read the values that `facts` returned. Raises `ValueError`, `TypeError`."""
        peer, stage, nbytes, parts, there, begin, times = facts
        if len(times) > 64:
            raise ValueError("a flow has more than 64 times")
        at = {_whole(index): _number(when) for index, when, _ in times}
        waited = frozenset(_whole(index) for index, _, blocked in times if blocked)
        return cls(
            str(peer)[:64], _whole(stage), _whole(nbytes), _whole(parts), _whole(there), _number(begin), at, waited
        )


@dataclass(frozen=True)
class Record:
    """One round as one replica saw it.

    Args:
        name: name of the replica.
        fragment: number of the fragment.
        round: number of the fragment's round.
        own_seconds: seconds of an inner step since the previous departure, without waits; 0: unknown.
        over: whether all that was due has arrived; if not, the round failed here.
        sent: its flows to others.
        received: its flows from others.
        scheduled: whether it departed alone, by the schedule; if not, it departed together with others when training ended or resumed.

    >>> Record("0", fragment=1, round=7, own_seconds=0.1, over=True).key
    (1, 7)
    """

    name: str
    fragment: int
    round: int
    own_seconds: float
    over: bool
    sent: tuple[Flow, ...] = field(default=())
    received: tuple[Flow, ...] = field(default=())
    scheduled: bool = True

    @property
    def key(self) -> tuple[int, int]:
        """Fragment and round, which are equal in all records of one round."""
        return self.fragment, self.round

    @property
    def group(self) -> set[str]:
        """The replicas that took part, as far as this replica's messages show."""
        return {self.name} | {flow.peer for flow in self.sent + self.received}

    def shifted(self, seconds: float) -> Record:
        """The record by a clock that is `seconds` ahead of its own."""
        sent, received = (
            tuple(replace(f, begin=f.begin + seconds, at={i: at + seconds for i, at in f.at.items()}) for f in flows)
            for flows in (self.sent, self.received)
        )
        return replace(self, sent=sent, received=received)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "fragment": self.fragment, "round": self.round,
            "own_seconds": round(self.own_seconds, 6), "over": self.over, "scheduled": self.scheduled,
            "sent": [flow.facts() for flow in self.sent], "received": [flow.facts() for flow in self.received],
        }  # fmt: skip

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Record:
        """Read a record from a peer or a file. Raises `PacketError` if `facts` are not a record."""
        try:
            if len(facts["sent"]) + len(facts["received"]) > MOST_FLOWS:
                raise ValueError(f"it has more than {MOST_FLOWS} flows")
            return cls(
                str(facts["name"])[:64], _whole(facts["fragment"]), _whole(facts["round"]), _number(facts["own_seconds"]),
                facts["over"] is True, _flows(facts["sent"]), _flows(facts["received"]),
                facts.get("scheduled") is not False,
            )  # fmt: skip
        except (KeyError, ValueError, TypeError) as error:
            raise PacketError(
                f"a record of a round cannot be read ({error!r}); run the same version of Thinwire on every replica."
            ) from None


def _flows(facts: Iterable[Sequence[Any]]) -> tuple[Flow, ...]:
    return tuple(Flow.of(flow) for flow in facts)


def _whole(value: object) -> int:
    if type(value) is not int or not -1 <= value < 1 << 62:
        raise ValueError(f"{value!r} is given where a whole number is needed")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} is given where a number is needed")
    return float(value)  # type: ignore[arg-type]


@dataclass
class _Noted:
    nbytes: int = 0
    parts: int = 0
    there: int = 0
    begin: float = 0.0
    at: dict[int, float] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)


class Trace:
    """The stamps of one round. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int], _Noted] = {}  # by stage and peer
        self._received: dict[tuple[int, int], _Noted] = {}

    def expect(self, stage: int, nbytes: Mapping[int, Sequence[int]], now: float) -> None:
        """Note that messages of these `nbytes` are expected from each peer."""
        with self._lock:
            for peer, sizes in nbytes.items():
                if sizes:
                    self._received[stage, peer] = _Noted(sum(sizes), len(sizes), begin=now)

    def left(self, stage: int, index: int, nbytes: int, to: Collection[int], now: float) -> None:
        """Note that a message for the ranks `to` was handed to the carrier."""
        with self._lock:
            for peer in to:
                noted = self._sent.setdefault((stage, peer), _Noted(begin=now))
                noted.nbytes, noted.parts, noted.there = noted.nbytes + nbytes, noted.parts + 1, noted.there + 1
                if timed(index):
                    noted.at[index] = now

    def came(self, stage: int, index: int, peers: Sequence[int], began: float, arrivals: Mapping[int, float]) -> None:
        """Note that messages of `peers`, awaited in this order since `began`, had arrived at `arrivals`."""
        with self._lock:
            seen = began
            for peer in peers:
                at = arrivals.get(peer)
                noted = self._received.get((stage, peer))
                if at is None or noted is None:
                    continue
                noted.there += 1
                if timed(index):
                    noted.at[index] = at
                    if at - seen >= RESOLUTION:
                        noted.waited.add(index)
                seen = max(seen, at)

    def shorter(self, stage: int, peer: int, nbytes: int) -> None:
        """Note that a message of `peer` is `nbytes` shorter than expected."""
        with self._lock:
            self._received[stage, peer].nbytes -= nbytes

    def lies_there(self, stage: int, peer: int) -> None:
        """Note that a message of `peer` has arrived, at an unknown time before now."""
        with self._lock:
            self._received[stage, peer].there += 1

    def not_taken(self, peer: int | None) -> None:
        """Note that `peer` (None: an unknown peer) does not receive the messages to it."""
        with self._lock:
            for (_, to), noted in self._sent.items():
                if to == peer:
                    noted.there = min(noted.there, noted.parts - 1)

    def record(
        self, fragment: int, number: int, names: Sequence[str], rank: int, own_seconds: float, over: bool
    ) -> Record:
        """The record so far, with the replicas' names; a hub that averages has no name, and is left out."""
        with self._lock:
            sent, received = (
                tuple(
                    Flow(names[peer], stage, n.nbytes, n.parts, n.there, n.begin, dict(n.at), frozenset(n.waited))
                    for (stage, peer), n in sorted(noted.items())
                    if peer < len(names)
                )
                for noted in (self._sent, self._received)
            )
        return Record(names[rank], fragment, number, own_seconds, over, sent, received)
