"""The pipeline of rounds: the work beside training, between the snapshot of a delta and its landing.

There are two threads. One encodes and sends; the round that lands first is sent first (`SendQueue`), so a departure never waits until
the bytes of an earlier flight have arrived. The other takes rounds in order: it waits, decodes, takes the outer step and votes with the
site. Neither touches the model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thinwire.codecs.base import Pacer
from thinwire.comm.group import Group, gather
from thinwire.drivers.flight import Flight
from thinwire.drivers.loop_warnings import silent
from thinwire.drivers.monitor import ROUND, Monitor, WatchedGroup, done_in
from thinwire.drivers.token_weights import FactOfAll, TokenCount
from thinwire.errors import DisagreementError, LinkError, PeerError
from thinwire.exchange import Arrival, Arriving, Round, SendContext
from thinwire.exchange.record import recorded
from thinwire.exchange.send_queue import JobThread
from thinwire.exchange.stage import MOST_STAGES, tag_of
from thinwire.packet import PARTIAL, REFUSED, STOP
from thinwire.pieces.policy import Deciding, Decision
from thinwire.pieces.schedule import Adaptive
from thinwire.rng import Key
from thinwire.strategy import Strategy
from thinwire.types import Observer


class RoundPipeline:
    """Runs a replica's rounds over `group`. `site` is the group of the ranks of one sharded replica, which must accept or refuse a round
    together.

    With `watched`, all waits for a round are in `wait`, so they have no other limit than the monitor's.
    `observe("wire", step, ...)` is called on the inbound thread with the record of a round's messages (exchange/record.py).
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        site: Group | None,
        clock: Callable[[], float] = time.monotonic,
        observe: Observer = silent,
        watched: bool = True,
    ) -> None:
        self.exchange, self.seed, self.site, self.clock = strategy.exchange, strategy.seed, site, clock
        self._aggregate = strategy.aggregate
        # asked once: `isinstance` compares all attributes of a protocol
        self._deciding = strategy.policy if isinstance(strategy.policy, Deciding) else None
        self.context, self._observe = SendContext(WatchedGroup(group) if watched else group), observe
        self.monitor = Monitor(
            group,
            lambda step, text: self._observe("warning", step, message=text),
            by_rate=isinstance(strategy.schedule, Adaptive),
        )
        self._ahead = int(strategy.exchanges_gradients)  # a gradient belongs to the next step
        self.stop_requested = False
        self._step_timer, self._pacer = StepTimer(), _pacer(strategy)
        self._inbound = JobThread("thinwire-inbound")
        self._launched = itertools.count()

    def launch(
        self, flight: Flight, stalled: float, scheduled: bool, resumed: bool = False,
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:  # fmt: skip
        """Send what departs, and write the results into `flight`; its `arrival` is done when it may land.

        `stalled` are the seconds that the main thread has waited for landings so far. `scheduled` is false if several rounds depart at
        once, when training has ended or resumes from a checkpoint; `resumed` is true in the second case. `checks` are called when all has
        arrived; they may wait for the others, and raise.
        """
        begin, group, state, fragment = self.clock(), self.context.group, flight.round, flight.fragment
        key, numel = Key(self.seed, fragment.index, state.number, group.rank), state.delta.numel()
        flight.begin = begin
        flight.operation = self.monitor.begin(
            f"{ROUND}{state.number} of fragment {fragment.index}", state.departed + self._ahead
        )
        flight.nbytes = self.exchange.nbytes_sent(flight.codec, numel, group.size, group.rank)
        if state.tokens:
            flight.counts = TokenCount(group, tag_of(key, MOST_STAGES - 2), state.tokens - fragment.counted)
        own_seconds = self._step_timer.departs(state.departed, begin - stalled)
        if self._pacer:
            left = (state.lands - state.departed) * own_seconds if scheduled or resumed else math.inf
            self._pacer.before_send(flight, begin, left)
        order = (state.lands, next(self._launched))
        round_ = Round(
            self.context, flight.codec, numel, key, flight.signal, STOP * self.stop_requested | PARTIAL * state.partial,
            order, state.departed, self._aggregate, fragment.aggregate, anchor=fragment.anchor, device=fragment.device,
            decodes_own=flight.decodes_own, on_stream=flight.on_stream,
        )  # fmt: skip
        send = self.context.send_queue
        departed = send.put(order, partial(self.exchange.depart, round_, fragment.exchange))
        policy = self._deciding
        decision = send.put(order, partial(policy.before_send, fragment.codec, round_)) if policy else None
        flight.arrival = self._inbound.submit(
            self._arrive, flight, round_, departed, decision, checks, own_seconds, scheduled
        )

    def facts(self, flight: Flight, index: int, own: bytes, purpose: str) -> FactOfAll:
        """Send `own` to all others as the message `index` (from 1) about the round of `flight`."""
        group = self.context.group
        key = Key(self.seed, flight.fragment.index, flight.round.number, group.rank)
        return FactOfAll(group, tag_of(key, MOST_STAGES - 1, index), own, purpose)  # the policy's stage has one message

    def wait(self, flight: Flight) -> None:
        """Wait until `flight` has arrived. Raises the error of the exchange, and as `Monitor.wait`."""
        self.monitor.wait(done_in(flight.arrival), flight.operation)
        flight.wait()
        if self._pacer:
            self._pacer.on_land(late=flight.end > flight.landing)

    def gather(self, payload: bytes, limit: int, purpose: str, step: int) -> list[bytes]:
        """Gather like `comm.group.gather`, after `step` on all replicas. Raises as `Monitor.run`."""
        operation = f"{purpose} {step}"
        return self.monitor.run(
            lambda: gather(self.context.group, payload, limit, purpose, operation), f"the gather of {purpose}", step
        )

    def close(self) -> None:
        """Drop rounds that have not started; rounds in progress end with the group, and nobody observes them."""
        self._observe = silent
        self.context.close()
        self._inbound.close(cancel=True)
        self.monitor.close()

    @torch.no_grad()
    def _arrive(
        self, flight: Flight, round_: Round, departed: Future[Any], decided: Future[Decision | None] | None,
        checks: Sequence[Callable[[], None]], own_seconds: float, scheduled: bool,
    ) -> None:  # fmt: skip
        """Receive the others' packets, take the outer step, and decide with the site whether the round is good."""
        over = False
        with flight.on_stream():
            departure = departed.result()
            try:
                arriving = Arriving(self.exchange.arrive(departure))
                for begin, mean, own in arriving:
                    flight.settle(begin, mean, own)
                round_.close()
                if decided and (decision := decided.result()):
                    flight.policy = decision.on_arrival()
                for check in checks:
                    check()
                over = True
            except PeerError as error:
                cause = round_.own_failure() or error  # errors of peers that miss a message follow from an own one
                if isinstance(cause, LinkError):
                    raise self.monitor.explained(cause, flight.operation) from cause
                if isinstance(cause, DisagreementError):
                    raise self.monitor.disagree(cause) from cause
                raise cause from None
            finally:
                if recorded(flight.round.number) or not over:
                    self._record(flight, round_, own_seconds, over, scheduled)
            self._decide(flight, round_, arriving.arrival)

    def _record(self, flight: Flight, round_: Round, own_seconds: float, over: bool, scheduled: bool) -> None:
        names = [str(rank) for rank in range(round_.size)]
        record = replace(round_.record(names, own_seconds, over), scheduled=scheduled)
        of_log = record.shifted(self.clock() - self.context.clock())  # by the clock of all events
        self._observe("wire", flight.round.departed, **of_log.facts())

    def _decide(self, flight: Flight, round_: Round, arrival: Arrival) -> None:
        """Finish the flight, and have all ranks of the site accept or refuse it together."""
        tolerated = self._aggregate.tolerates(round_.size)
        void = arrival.void or sum(bool(f & REFUSED) for f in arrival.flags) > tolerated
        verdict = 0 if not void and flight.finish() else REFUSED
        flight.close()
        flags = or_flags(self.site, (*arrival.flags, verdict), ROUNDS)
        flight.exchange, flight.aggregate = arrival.state, round_.after or flight.fragment.aggregate
        flight.good = not flags[-1] & REFUSED and sum(bool(f & REFUSED) for f in flags) <= tolerated
        flight.refused_by = tuple(rank for rank, f in enumerate(flags[:-1]) if f & REFUSED)
        if flight.good and round_.rank in flight.refused_by:
            flight.keep_own_state()
        flight.stop, flight.partial = any(f & STOP for f in flags), any(f & PARTIAL for f in flags)
        flight.end, flight.nbytes_sent = self.clock(), round_.nbytes_sent
        flight.queued_seconds, flight.transfer_seconds = round_.times()


def _pacer(strategy: Strategy) -> Pacer | None:
    """What chooses the form of each round, if a codec of the strategy has several."""
    pacers = (codec.pacer() for codec in strategy.policy.codecs(strategy.codec))
    return next((pacer for pacer in pacers if pacer is not None), None)


class StepTimer:
    """Measures the speed of a replica's own training.

    >>> timer = StepTimer()
    >>> [timer.departs(step, seconds) for step, seconds in ((10, 3.0), (20, 8.0))]
    [0.0, 0.5]
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def departs(self, step: int, own: float) -> float:
        """Seconds of an inner step since the previous departure, from the total of `own` seconds so far; 0: unknown."""
        before, self._last = self._last, (step, own)
        return (own - before[1]) / (step - before[0]) if before and step > before[0] else 0.0


ROUNDS, WEIGHTS = 0, 1  # the subjects of votes, so that the votes of two threads do not mix


def or_flags(site: Group | None, flags: tuple[int, ...], about: int) -> tuple[int, ...]:
    """The union of the flags that the ranks of a site have seen, because a flag of one shard counts for all."""
    if site is None:
        return flags
    own = torch.tensor(flags, dtype=torch.uint8)
    peers = [peer for peer in range(site.size) if peer != site.rank]
    others = {peer: torch.zeros_like(own) for peer in peers}
    site.post(about, {peer: own for peer in peers}, others, "vote").wait()
    for other in others.values():
        own |= other
    return tuple(own.tolist())
