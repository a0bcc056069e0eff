"""The wires of all replicas at once: who is sent when, first in first out, also where a wire is shared or goes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.simulate.layers import Floats
from thinwire.simulate.scenario import Wire

Integers = NDArray[np.int64]

NEVER = (np.inf, 0.0)


class Uplinks:
    """The books of W wires, in virtual time: arrays [W]. A message occupies its wire alone, in the order of booking.

    `busy_seconds` is how long each was occupied (outages not counted).
    """

    def __init__(self, wires: Sequence[Wire]) -> None:
        rates = np.array([wire.link.bits_per_second * (1 - wire.loss) for wire in wires])
        self.seconds_per_byte = 8 / rates
        self.delay_seconds = np.array([wire.link.delay_seconds for wire in wires])
        self.busy_seconds = np.zeros(len(wires))
        self._free = np.full(len(wires), -np.inf)
        self._outages = [iter(wire.outages) for wire in wires]
        self._down, self._up = np.array([next(ahead, NEVER) for ahead in self._outages]).T  # the first that is not over
        self._sound = bool(np.isinf(self._down).all())

    def book(self, wires: Integers, now: Floats, nbytes: Floats) -> tuple[Floats, Floats]:
        """The next message on each of `wires` (no wire twice): when its first bit leaves, and its last arrives."""
        seconds = nbytes * self.seconds_per_byte[wires]
        begin = np.maximum(now, self._free[wires])
        end = begin + seconds
        if not self._sound:
            begin, end = self._held_up(wires, begin, end)
        self._free[wires] = end
        self.busy_seconds[wires] += seconds
        return begin, end + self.delay_seconds[wires]

    def _held_up(self, wires: Integers, begin: Floats, end: Floats) -> tuple[Floats, Floats]:
        """Move what meets an outage: what has begun goes on after it, what has not begins after it."""
        begin, end = begin.copy(), end.copy()
        while True:
            down, up = self._down[wires], self._up[wires]
            met = down < end
            if not met.any():
                return begin, end
            lost = np.where(met, np.maximum(up - np.maximum(down, begin), 0.0), 0.0)
            begin = np.where(met & (down <= begin), begin + lost, begin)
            end = end + lost
            for wire in wires[met]:  # later messages leave after this one, and so after this outage
                self._down[wire], self._up[wire] = next(self._outages[wire], NEVER)


@dataclass(eq=False)
class Messages:
    """What every replica sends for one round: arrays [M]. NaN is not yet; a replica that is away asks at infinity."""

    asked: Floats
    nbytes: int
    begin: Floats
    arrival: Floats

    @classmethod
    def of(cls, asked: Floats, nbytes: int) -> Messages:
        return cls(asked, nbytes, np.full_like(asked, np.nan), np.full_like(asked, np.nan))


def send(uplinks: Uplinks, shares: Integers, waiting: Sequence[Messages], due: Messages) -> None:
    """Book all of `due`, and of what else is `waiting` all that was asked for before it on the same wire.

    Replicas that share a wire get ahead of each other by rounds, so of two requests the one known first may be for
    the later time. But when a round is due to land, every request is known that can come before its last one: whoever
    asks for more has landed it.
    """
    round_, replica = np.nonzero(np.array([np.isnan(m.begin) & np.isfinite(m.asked) for m in waiting]))
    wire = shares[replica]
    now = np.array([m.asked for m in waiting])[round_, replica]
    order = np.lexsort((round_, replica, now, wire))
    round_, replica, wire, now = round_[order], replica[order], wire[order], now[order]
    is_due = np.array([m is due for m in waiting])[round_]
    # an entry goes if one of `due` follows it on its wire, itself included: count them from the back, wire by wire
    follow = np.cumsum(is_due[::-1])[::-1]
    after_wire = np.append(follow, 0)[np.searchsorted(wire, wire, side="right")]
    goes = np.flatnonzero(follow > after_wire)
    round_, replica, wire, now = round_[goes], replica[goes], wire[goes], now[goes]
    turn = np.arange(len(wire)) - np.searchsorted(wire, wire)  # the how-manieth on its wire
    nbytes = np.array([m.nbytes for m in waiting], dtype=np.float64)[round_]
    for entries in np.split(by_turn := np.argsort(turn, kind="stable"), np.cumsum(np.bincount(turn))[:-1]):
        begin, arrival = uplinks.book(wire[entries], now[entries], nbytes[entries])
        for number in np.unique(round_[entries]):
            own = round_[entries] == number
            waiting[number].begin[replica[entries][own]] = begin[own]
            waiting[number].arrival[replica[entries][own]] = arrival[own]
    assert len(by_turn) == len(goes)
