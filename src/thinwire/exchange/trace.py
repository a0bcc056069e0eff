"""The times of a round's messages: a few stamps of this replica's clock for each peer."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.exchange.record import RESOLUTION, Flow, Record, timed


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
