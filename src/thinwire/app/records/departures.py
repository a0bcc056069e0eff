"""The bytes that a replica has sent, from its departures and flights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thinwire.app.records.history import Columns, Floats, Integers, Placed
from thinwire.app.records.sessions import whole


def round_keys(rows: Columns) -> Floats:
    """A number for each fragment's round; for fragments below 4,096 and rounds below 2^40."""
    keys: Floats = rows["fragment"] * 2.0**40 + rows.finite("round")
    return keys


def places_in(keys: Floats, wanted: Floats) -> tuple[Integers, NDArray[np.bool_]]:
    """The last place in `keys` of each of `wanted`, and whether there is one."""
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    found = np.zeros(len(wanted), dtype=bool) if not len(keys) else (at >= 0) & (keys[order][at] == wanted)
    places: Integers = order[at] if len(keys) else at
    return places, found


def sent_bytes(departs: Columns, flights: Columns) -> Integers:
    """The bytes of each departure: those that its flight has sent, or else those that it foresaw."""
    nbytes = departs.whole("nbytes")
    at, flown = places_in(round_keys(flights), round_keys(departs))
    nbytes[flown] = flights.whole("nbytes")[at[flown]]
    return nbytes


class SentBytes:
    """Cumulative bytes after a step: those of departures, of the same step too, or those that steps and evaluations count, if these are more.

    Steps and evaluations count every byte, also what no departure tells, but not what departs after them.
    """

    def __init__(self, departs: Columns, nbytes: Integers, steps: Columns, evaluations: Sequence[Placed]) -> None:
        self._departed = _Sums(departs.whole("step"), np.cumsum(nbytes))
        place = np.concatenate([steps["place"], [one.place for one in evaluations]])
        step = np.concatenate([steps.whole("step"), [one.event["step"] for one in evaluations]])
        sent = np.concatenate([steps.whole("sent"), [whole(one.event.get("sent")) for one in evaluations]])
        order = np.argsort(place, kind="stable")
        self._told = _Sums(step[order].astype(np.int64), np.maximum.accumulate(sent[order].astype(np.int64)))

    def after(self, steps: Integers) -> Integers:
        found: Integers = np.maximum(self._departed.after(steps), self._told.after(steps))
        return found


class _Sums:
    """Running sums, each from a step on."""

    def __init__(self, steps: Integers, sums: Integers) -> None:
        self._steps = np.maximum.accumulate(steps)
        self._sums = np.concatenate([[0], np.maximum(sums, 0)]).astype(np.int64)

    def after(self, steps: Integers) -> Integers:
        found: Integers = self._sums[np.searchsorted(self._steps, steps, side="right")]
        return found
