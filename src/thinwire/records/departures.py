"""The bytes that a replica has sent, from its departures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from thinwire.records.events import Event
from thinwire.records.sessions import whole

Integers = NDArray[np.int64]


def fragment_of(event: Event, names: Mapping[str, int]) -> int:
    """The number of the event's fragment; an elastic replica writes a name, which `names` maps to it. -1: there is none."""
    given = event["fragment"]
    return int(given) if isinstance(given, int | float) and math.isfinite(given) else names.get(str(given), -1)


def sent_by(
    steps: Sequence[int], departs: Sequence[tuple[float, Event]], told: Sequence[tuple[float, Event]] = ()
) -> Integers:
    """Cumulative bytes after each of `steps`: those of departures, of the same step too, or those that the events `told` count, if these are more.

    These are steps and evaluations, which count every byte, also what no departure tells, but not what departs after them.
    """
    departed = np.cumsum([0, *(whole(event["nbytes"]) for _, event in departs)])
    counted = np.maximum.accumulate([0, *(whole(event.get("sent")) for _, event in told)])
    sent: Integers = np.maximum(_after(steps, departs, departed), _after(steps, told, counted))
    return sent


def _after(steps: Sequence[int], events: Sequence[tuple[float, Event]], sums: Integers) -> Integers:
    """The elements of `sums`, which begins before the first event, after each of `steps`."""
    at = np.maximum.accumulate([0, *(event["step"] for _, event in events)])
    found: Integers = sums[np.searchsorted(at[1:], np.array(steps, dtype=np.int64), side="right")]
    return found


def as_sent(
    departs: Sequence[tuple[float, Event]], flights: Sequence[tuple[float, Event]], names: Mapping[str, int]
) -> list[tuple[float, Event]]:
    """Departures with the bytes that their flights have sent."""
    sent = {(fragment_of(event, names), event["round"]): event["nbytes"] for _, event in flights}
    return [
        (offset, event | {"nbytes": sent.get((fragment_of(event, names), event["round"]), event["nbytes"])})
        for offset, event in departs
    ]


def sent_of_each(departs: Sequence[tuple[float, Event]], names: Mapping[str, int]) -> Mapping[int, int]:
    """Bytes by fragment."""
    total: Counter[int] = Counter()
    for _, event in departs:
        total[fragment_of(event, names)] += whole(event["nbytes"])
    return total
