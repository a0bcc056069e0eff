"""The wires of all replicas: the times of their messages, first in first out, also on shared wires and with outages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs import Codec
from thinwire.exchange import Exchange
from thinwire.lab.simulate.layers import Floats
from thinwire.lab.simulate.scenario import Wire

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

NEVER = (np.inf, 0.0)


class Uplinks:
    """The queues of W wires in virtual time. Messages on one wire follow each other in the order of booking.

    `busy_seconds` is the time for which each wire carried messages, without outages, float64 [W].

    Args:
        wires: the uplinks [W].

    >>> from thinwire.comm import Link
    >>> uplinks = Uplinks([Wire(Link(8.0, 0.5))])  # one byte per second
    >>> begin, arrival = uplinks.book(np.array([0]), np.zeros(1), np.array([3.0]))
    >>> arrival.tolist()
    [3.5]
    """

    def __init__(self, wires: Sequence[Wire]) -> None:
        rates = np.array([wire.link.bits_per_second * (1 - wire.loss) for wire in wires])
        self.seconds_per_byte = 8 / rates
        self.delay_seconds = np.array([wire.link.delay_seconds for wire in wires])
        self.busy_seconds = np.zeros(len(wires))
        self._free = np.full(len(wires), -np.inf)
        self._outages = [iter(wire.outages) for wire in wires]
        # Begin and end of the first outage that is not over.
        self._down, self._up = np.array([next(ahead, NEVER) for ahead in self._outages]).T
        self._sound = bool(np.isinf(self._down).all())

    def book(self, wires: Integers, now: Floats, nbytes: Floats) -> tuple[Floats, Floats]:
        """Book the next message on each of `wires` (no wire twice). Returns the times at which its first bit leaves and its last arrives."""
        seconds = nbytes * self.seconds_per_byte[wires]
        begin = np.maximum(now, self._free[wires])
        end = begin + seconds
        if not self._sound:
            begin, end = self._held_up(wires, begin, end)
        self._free[wires] = end
        self.busy_seconds[wires] += seconds
        return begin, end + self.delay_seconds[wires]

    def _held_up(self, wires: Integers, begin: Floats, end: Floats) -> tuple[Floats, Floats]:
        """Delay messages that meet an outage: those that have begun continue after it, the others begin after it."""
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
    """The messages of one round, one from each of M replicas.

    Args:
        asked: seconds at which each asked to send, float64 [M]; infinity for a replica that is away.
        nbytes: bytes of each replica's message, int64 [M].
        begin: seconds at which each first bit leaves, float64 [M]; NaN until then.
        arrival: seconds at which each last bit arrives, float64 [M]; NaN until then.

    >>> Messages.of(np.zeros(3), nbytes=100).begin.tolist()
    [nan, nan, nan]
    """

    asked: Floats
    nbytes: Integers
    begin: Floats
    arrival: Floats

    @classmethod
    def of(cls, asked: Floats, nbytes: int | Integers) -> Messages:
        each = np.broadcast_to(np.asarray(nbytes, dtype=np.int64), asked.shape)
        return cls(asked, each, np.full_like(asked, np.nan), np.full_like(asked, np.nan))


def nbytes_of_each(exchange: Exchange, codec: Codec, numel: int, there: Flags) -> Integers:
    """Bytes that each of M replicas sends in a round, by `Exchange.nbytes_of_each`.

    Args:
        exchange: how packets become their mean.
        codec: the codec of the packets.
        numel: number of elements.
        there: which replicas take part, bool [M].

    Returns:
        Bytes, int64 [M]; 0 for a replica that takes no part.

    >>> from thinwire.codecs import Identity
    >>> from thinwire.lab.star.exchange import Star
    >>> nbytes_of_each(Star(1), Identity(), 1000, np.array([True, True, True])).tolist()
    [4048, 8102, 4048]
    """
    each = np.zeros(len(there), dtype=np.int64)
    each[there] = _nbytes_by_rank(exchange, codec, numel, int(there.sum()))  # type: ignore[arg-type]  # frozen values hash
    return each


@lru_cache(maxsize=1024)
def _nbytes_by_rank(exchange: Exchange, codec: Codec, numel: int, size: int) -> tuple[int, ...]:
    return tuple(exchange.nbytes_of_each(codec, numel, size))


def send(uplinks: Uplinks, shares: Integers, waiting: Sequence[Messages], due: Messages) -> None:
    """Book all messages of a round that must land, and earlier requests of other rounds for the same wires.

    Replicas that share a wire may be rounds apart, so the request that is known first may be for a later time. When a
    round must land, every request that can come before its last one is known: a replica that asks later has already
    landed this round.

    Args:
        uplinks: the queues of the wires.
        shares: the wire of each replica, int64 [M].
        waiting: all rounds that are not landed, `due` among them.
        due: the round that must land.

    >>> from thinwire.comm import Link
    >>> round_ = Messages.of(np.zeros(2), nbytes=1)
    >>> send(Uplinks([Wire(Link(8.0))]), np.array([0, 0]), [round_], round_)
    >>> round_.arrival.tolist()
    [1.0, 2.0]
    """
    last = np.full(len(uplinks.delay_seconds), -np.inf)  # by wire: the last request of `due`
    np.maximum.at(last, shares, np.where(np.isfinite(due.asked), due.asked, -np.inf))
    asked = np.array([messages.asked for messages in waiting]).T  # [M, rounds]
    goes = np.array([np.isnan(messages.begin) for messages in waiting]).T & (asked <= last[shares][:, None])
    replica, round_ = np.nonzero(goes)
    now = asked[goes]
    order = np.argsort(now, kind="stable")  # requests at the same time are in the order of replicas
    order = order[_order_of_small(shares[replica[order]])]
    replica, round_, now = replica[order], round_[order], now[order]
    wire = shares[replica]
    nbytes = np.array([messages.nbytes for messages in waiting], dtype=np.float64)[round_, replica]
    begin, arrival = np.empty_like(now), np.empty_like(now)
    turn = np.arange(len(wire)) - np.searchsorted(wire, wire)  # position in the queue of its wire
    for entries in np.split(_order_of_small(turn), np.cumsum(np.bincount(turn))[:-1]):
        begin[entries], arrival[entries] = uplinks.book(wire[entries], now[entries], nbytes[entries])
    for number, messages in enumerate(waiting):
        own = round_ == number
        messages.begin[replica[own]], messages.arrival[replica[own]] = begin[own], arrival[own]


def _order_of_small(numbers: Integers) -> Integers:
    """A stable argsort; numpy has a radix sort for integers of 16 bits or less."""
    return np.argsort(numbers.astype(np.min_scalar_type(int(numbers.max(initial=0)))), kind="stable")
