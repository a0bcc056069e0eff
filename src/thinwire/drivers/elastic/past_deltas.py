"""Deltas that a replica sent before and must not send again: the history that another member brings may have counted them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from thinwire.drivers.elastic.global_state import GlobalState, Record
from thinwire.drivers.elastic.messages import Ready
from thinwire.types import State

UNKNOWN: Literal["unknown"] = "unknown"  # some delta, and not known which


class Doubt(NamedTuple):
    """A delta of a round whose decision this replica does not know, or others may not know, and its `feedback` if it was counted. `mark` is
    that of the round (`GlobalState.counted`), if it is known.
    """

    round: int
    ready: Ready
    feedback: State
    mark: str = ""


class PastDeltas:
    """By fragment, the rounds that may have counted what this replica still holds as its own progress:

    - those `since` its checkpoint, if it resumed from one, until a delta of its present life counts;
    - those whose decision it never learned, or which it had committed, and which were not in the history of those whom it met then.
      Their deltas are kept until a later delta of the fragment counts, which holds them: 4 bytes a value.

    >>> past = PastDeltas({0: 7, 1: 7})
    >>> past.counted_in(GlobalState([], [], round=9, counted={8: (0, ("oslo",), "")}), {}, "oslo", 0)
    'unknown'
    """

    def __init__(self, since: Mapping[int, int] = MappingProxyType({})) -> None:
        self._since = dict(since)
        self._doubted: dict[int, list[Doubt]] = {}
        self._dropped = set[int]()  # fragments whose doubted deltas are perhaps no longer held

    def held_since(self, doubt: Doubt | None) -> dict[int, int]:
        """By fragment, the first round that may have counted what this replica holds, that of `doubt` among them: `since` of a process that
        resumes from a checkpoint of now, which does not hold the deltas.
        """
        first = dict(self._since)
        for number, ready, *_ in chain(*self._doubted.values(), [doubt] if doubt else []):
            first[ready.fragment] = min(number, first.get(ready.fragment, number))
        return first

    def doubted(self, doubt: Doubt, whole: bool = True) -> None:
        """Its round is not in the history that was met, so its delta is sent again, in the next one; not `whole`: without an earlier one,
        or not at all.
        """
        self._doubted.setdefault(doubt.ready.fragment, []).append(doubt)
        if not whole:
            self._dropped.add(doubt.ready.fragment)

    def forget(self, fragment: int) -> None:
        """A delta of `fragment` has counted, or this replica's progress in it was dropped."""
        self._since.pop(fragment, None)
        self._doubted.pop(fragment, None)
        self._dropped.discard(fragment)

    def start_again(self) -> None:
        """This replica's progress may be dropped, and what it doubted with it."""
        self._dropped.update(self._doubted)

    def counted_in(
        self, agreed: GlobalState, known: Record, name: str, fragment: int
    ) -> Doubt | Literal["unknown"] | None:
        """The delta of `name` that the history `agreed` counted, and that this replica still holds as its own progress. `known` is the
        record before it.
        """
        since = self._since.get(fragment)
        doubts = [
            doubt
            for doubt in self._doubted.get(fragment, ())
            if agreed.counted_unlike(known, doubt.round, name, fragment)
        ]
        if since is not None and agreed.counted_since(since, name, fragment, known):
            return UNKNOWN
        if doubts and (len(doubts) > 1 or fragment in self._dropped):
            return UNKNOWN
        return doubts[0] if doubts else None
