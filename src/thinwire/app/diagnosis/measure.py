"""Measures how long messages took, from the records of both ends, without a shared clock.

t is the sender's clock when a message left, t' the receiver's when it had arrived and when it was asked for:

    A  = t'(there) − t(left)         seconds of the way, plus the difference of the clocks
    x  = A − usual A + min(0, the same of the other direction)
    y  = t'(there) − t'(asked for)   at most the seconds of the way, if the receiver asked late

The difference of the clocks is in A and in the usual A alike, so x is a difference of durations; a clock that drifts or jumps
moves the two directions apart, which the second term takes back. So x is what the way took longer than usual, and at most that
long; the lateness of the sender is in none of them. What the way takes usually is the mean of both directions' usual A, where
the clocks' difference cancels.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple

from thinwire.exchange.record import Flow, Record

REMEMBERED = 16  # rounds of a fragment from which the usual seconds are taken
SHORTEST = 1e-3  # seconds: the least that any way is assumed to take

Cell = tuple[str, str]  # sender, receiver
_Place = tuple[int, int, int]  # fragment, stage, index of the message


class Stamp(NamedTuple):
    """One timed message."""

    place: _Place
    apparent: float  # A
    asked: float  # y
    waited: bool


@dataclass(frozen=True)
class Reading:
    """One way in one round. It took its `usual` seconds and at `most` so many more. `least` of these are certain, because the receiver waited.

    spread   of the usual: the median of absolute deviations
    """

    usual: float
    most: float
    least: float
    spread: float


def stamps(records: Iterable[Record]) -> dict[Cell, list[Stamp]]:
    """The timed messages of one round of which both ends have a record, by way."""
    by_name = {record.name: record for record in records}
    found: dict[Cell, list[Stamp]] = {}
    for receiver in by_name.values():
        for came in receiver.received:
            sender = by_name.get(came.peer)
            left = _other_end(sender, receiver.name, came.stage) if sender else None
            if left is not None:
                found.setdefault((came.peer, receiver.name), []).extend(_stamps(receiver, left, came))
    return found


def _other_end(sender: Record, receiver: str, stage: int) -> Flow | None:
    return next((flow for flow in sender.sent if flow.peer == receiver and flow.stage == stage), None)


def _stamps(record: Record, left: Flow, came: Flow) -> list[Stamp]:
    return [
        Stamp((record.fragment, came.stage, index), at - left.at[index], at - came.begin, index in came.waited)
        for index, at in came.at.items()
        if index in left.at
    ]


class Usual:
    """The usual seconds of every way."""

    def __init__(self, known: int) -> None:
        self.known = known
        self._past: dict[tuple[Cell, _Place], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def learn(self, cell: Cell, seen: Sequence[Stamp]) -> None:
        for stamp in seen:
            self._past[cell, stamp.place].append(stamp.apparent)

    def read(self, found: Mapping[Cell, Sequence[Stamp]]) -> dict[Cell, Reading]:
        """Read the ways whose usual seconds are known."""
        return {cell: reading for cell, seen in found.items() if (reading := self._read(cell, seen, found)) is not None}

    def _read(self, cell: Cell, seen: Sequence[Stamp], found: Mapping[Cell, Sequence[Stamp]]) -> Reading | None:
        back = cell[::-1]
        backwards = {stamp.place: stamp for stamp in found.get(back, ())}
        waited, seen_later = [], []
        for stamp in seen:
            there, again = self._past.get((cell, stamp.place), ()), self._past.get((back, stamp.place), ())
            other = backwards.get(stamp.place)
            if other is None or min(len(there), len(again)) < self.known:
                continue
            usual = max(SHORTEST, (median(there) + median(again)) / 2)
            longer = stamp.apparent - median(there) + min(0.0, other.apparent - median(again))
            spread = median(abs(apparent - median(there)) for apparent in there)
            if stamp.waited:
                waited.append(Reading(usual, longer, min(longer, stamp.asked - usual), spread))
            else:
                seen_later.append(Reading(usual, longer, -inf, spread))
        if waited:
            return sorted(waited, key=lambda reading: reading.least)[len(waited) // 2]
        return min(seen_later, key=lambda reading: reading.most, default=None)
