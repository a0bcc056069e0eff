"""Chooses the level of each round of a codec with levels, so that it arrives before it must land."""

from __future__ import annotations

import math

from thinwire.codecs import packet_nbytes
from thinwire.drivers.flight import Flight
from thinwire.lab.codecs.deadlines import Deadlines
from thinwire.lab.codecs.levelled import MOST_SKIPS
from thinwire.packet import HEADER_NBYTES


class DeadlinePacer:
    """One replica's choices: the finest level whose bytes arrive in time, by the times of its earlier rounds (`Deadlines`)."""

    def __init__(self) -> None:
        self._deadlines = Deadlines()
        self._flying: dict[Flight, bool] = {}  # rounds of codecs with levels; whether they send values
        self._heard_at = -math.inf  # the latest end of a round
        self._skipped: dict[int, int] = {}  # by fragment: the rounds in a row that sent no values

    def before_send(self, flight: Flight, now: float, seconds: float) -> None:
        """If the codec has levels, choose the finest one with which `flight` arrives within `seconds`, which are infinite if there is no
        deadline. The first round of a fragment gets the coarsest one: it probes the link."""
        codec, numel, fragment = flight.codec, flight.round.delta.numel(), flight.fragment.index
        if not numel or codec.within(0.0, numel) is codec:
            return
        self._hear()
        skipped, share = self._skipped.get(fragment, 0), 1.0
        if flight.round.lands > flight.round.departed and not math.isinf(seconds):
            if flight.round.number == 0:
                skipped, share = MOST_SKIPS, 0.0
            elif seconds > 0:
                share = self._deadlines.share(now, flight.nbytes, now + seconds)
        flight.codec = codec.within(share, numel, skipped)
        nbytes = sum(part.nbytes for part in flight.codec.layout(numel))
        self._skipped[fragment] = 0 if nbytes > 1 else skipped + 1  # a byte names the level
        if flight.nbytes:  # a replica alone sends nothing
            self._flying[flight] = nbytes > 1
            part = (HEADER_NBYTES + nbytes) / packet_nbytes(codec, numel)
            self._deadlines.departed(flight, now, max(1, round(flight.nbytes * part)))

    def _hear(self) -> None:
        """Record the rounds with levels that have arrived since the last call."""
        for flight in [one for one in self._flying if one.arrival.done() and not one.arrival.exception()]:
            values = self._flying.pop(flight)
            seconds = flight.transfer_seconds or flight.end - max(flight.begin, self._heard_at)
            self._heard_at = max(flight.end, self._heard_at)
            self._deadlines.arrived(flight, flight.end, flight.nbytes_sent, seconds, values)

    def on_land(self, late: bool) -> None:
        """Record that a round has landed, and whether training waited for it."""
        self._hear()
        self._deadlines.landed(late)
