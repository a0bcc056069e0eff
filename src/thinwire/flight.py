"""Rounds in progress: what happens to a delta beside training, between snapshot and landing.

Two threads, each first in first out: one encodes and starts sending, so that a departure never waits for an earlier
flight's bytes to arrive; the other waits, decodes, takes the outer step and hears the site's vote. Nothing here
touches the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec, check_finite, warm_up
from thinwire.errors import NonFiniteError
from thinwire.exchange import Departure
from thinwire.group.base import Group
from thinwire.outer import State
from thinwire.packet import REFUSED, STOP
from thinwire.seeds import Key
from thinwire.strategy import Strategy


@dataclass(frozen=True)
class Landed:
    """What a flight brings: the moved anchor, outer state and feedback (None for a dropped round), and what was said on the way."""

    anchor: Tensor | None
    state: State
    feedback: State
    refused_by: tuple[int, ...]  # replicas whose delta was not finite
    stop: bool  # some replica asked to stop
    begin: float
    end: float
    queued_seconds: float
    transfer_seconds: float


@dataclass(frozen=True)
class Flight:
    """A round in the air."""

    number: int
    departed: int  # inner step
    delta: Tensor
    nbytes: int  # that this replica sends for it
    arrival: Future[Landed]


class Crew:
    """Flies a replica's rounds over `group`; `site` joins the ranks of one sharded replica, which must judge a round alike."""

    def __init__(
        self, strategy: Strategy, group: Group, site: Group | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.strategy, self.group, self.site, self.clock = strategy, group, site, clock
        self.stop_requested = False
        warm_up(strategy.codec)
        few = torch.zeros(1)
        strategy.outer.step(few, few, strategy.outer.init(few))
        self._outbound = ThreadPoolExecutor(1, "thinwire-outbound")
        self._inbound = ThreadPoolExecutor(1, "thinwire-inbound")

    def launch(
        self,
        delta: Tensor,
        codec: Codec,
        fragment: int,
        number: int,
        step: int,
        feedback: State,
        settle: Callable[[Tensor], tuple[Tensor, State]],
    ) -> Flight:
        """Send `delta`, with what `feedback` holds back, in `codec`; `settle` turns the estimate into the new anchor and state, on
        the inbound thread.
        """
        begin = self.clock()
        nbytes = self.strategy.exchange.nbytes_sent(codec, delta.numel(), self.group.size)
        departure = self._outbound.submit(self._depart, delta, codec, feedback, fragment, number)
        arrival = self._inbound.submit(self._arrive, departure, delta, codec, feedback, settle, begin)
        return Flight(number, step, delta, nbytes, arrival)

    def close(self) -> None:
        """Forget what has not been started; flights in progress end with the group."""
        for pool in (self._outbound, self._inbound):
            pool.shutdown(wait=False, cancel_futures=True)

    @torch.no_grad()
    def _depart(self, delta: Tensor, codec: Codec, feedback: State, fragment: int, number: int) -> Departure:
        flags = STOP if self.stop_requested else 0
        key = Key(self.strategy.seed, fragment, number, self.group.rank)
        signal = delta.cpu()
        if self.strategy.feedback:
            signal = self.strategy.feedback.signal(signal, feedback)
        return self.strategy.exchange.depart(self.group, codec, signal, key, flags)

    @torch.no_grad()
    def _arrive(
        self,
        departed: Future[Departure],
        delta: Tensor,
        codec: Codec,
        feedback: State,
        settle: Callable[[Tensor], tuple[Tensor, State]],
        begin: float,
    ) -> Landed:
        departure = departed.result()
        estimate, flags = self.strategy.exchange.arrive(departure, codec)
        anchor: Tensor | None = None
        state: State = {}
        verdict = 0
        if estimate is not None:
            if self.strategy.feedback:
                sent = self.strategy.exchange.sent(departure, codec)
                estimate, feedback = self.strategy.feedback.settle(delta.cpu(), sent, estimate, feedback)
            anchor, state = settle(estimate)
            try:
                check_finite(anchor)  # damaged or huge packets: the same bytes, so the same verdict, on every replica
            except NonFiniteError:
                verdict = REFUSED
        flags = self._agree((*flags, verdict))
        refused = tuple(rank for rank, f in enumerate(flags[:-1]) if f & REFUSED)
        return Landed(
            anchor=None if any(f & REFUSED for f in flags) else anchor,
            state=state,
            feedback=feedback,
            refused_by=refused,
            stop=any(f & STOP for f in flags),
            begin=begin,
            end=self.clock(),
            queued_seconds=getattr(departure.transfer, "queued_seconds", 0.0),
            transfer_seconds=getattr(departure.transfer, "transfer_seconds", 0.0),
        )

    def _agree(self, flags: tuple[int, ...]) -> tuple[int, ...]:
        """The union of the flags that the ranks of this site have seen: a shard's NaN drops the round for all shards."""
        if self.site is None:
            return flags
        own = torch.tensor(flags, dtype=torch.uint8)
        peers = [peer for peer in range(self.site.size) if peer != self.site.rank]
        others = {peer: torch.zeros_like(own) for peer in peers}
        self.site.post(0, {peer: own for peer in peers}, others, "vote").wait()
        for other in others.values():
            own |= other
        return tuple(own.tolist())
