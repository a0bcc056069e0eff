"""The pipeline of rounds: the work beside training, between the snapshot of a delta and its landing.

There are two threads. One encodes and sends; the round that lands first is sent first (`SendQueue`), so a departure never waits until
the bytes of an earlier flight have arrived. The other takes rounds in order: it waits, decodes, takes the outer step and votes with the
site. Neither touches the model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.codecs.base import Pacer
from thinwire.comm.group import Group, gather
from thinwire.drivers.fragment import RoundUpdate
from thinwire.drivers.loop_warnings import silent
from thinwire.drivers.monitor import ROUND, Monitor, WatchedGroup, done_in
from thinwire.drivers.token_weights import FactOfAll, TokenCount, weigh
from thinwire.errors import DisagreementError, LinkError, PeerError
from thinwire.exchange import Round, SendContext
from thinwire.exchange.chunks import cut
from thinwire.exchange.record import recorded
from thinwire.exchange.send_queue import JobThread, Outgoing
from thinwire.exchange.stage import MOST_STAGES, Stage, tag_of
from thinwire.packet import PARTIAL, REFUSED, STOP, payload
from thinwire.pieces.policy import Deciding
from thinwire.pieces.schedule import Adaptive
from thinwire.rng import Key
from thinwire.strategy import Strategy
from thinwire.types import Observer


class PolicyMessage:
    """A message of `numel` numbers from replica 0 to all others, for the policy of a round.

    `decide` computes them on replica 0.
    """

    def __init__(self, round_: Round, decide: Callable[[], Tensor]) -> None:
        self.round = round_
        self._stage = Stage(round_, round_.codec, MOST_STAGES - 1, purpose="policy")
        (message,) = cut(round_.codec, 0, round_.numel)
        self._own: Outgoing | None = None
        if round_.rank == 0:  # sent after the round's other messages, which do not wait for it
            self._own = self._stage.send(0, message, round_.peers, lambda begin, end: decide()[begin:end], round_.key)
        else:
            self._stage.expect({0: (message,)})

    def arrive(self) -> Tensor:
        """The numbers. Raises `LinkError`, `PacketError`."""
        self._stage.receive(0)
        packet = self._stage.packet(0, 0) if self._own is None else self._own.wait()
        told = torch.zeros(self.round.numel)
        self.round.codec.decode_add(payload(packet), told, self.round.key)
        self.round.close()
        return told


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

    def launch(self, update: RoundUpdate, stalled: float, scheduled: bool, resumed: bool = False) -> None:
        """Send the delta of `update`, and write the results there; its `arrival` is done when it may land.

        `stalled` are the seconds that the main thread has waited for landings so far. `scheduled` is false if several rounds depart at
        once, when training has ended or resumes from a checkpoint; `resumed` is true in the second case.
        """
        begin, group = self.clock(), self.context.group
        update.begin = begin
        update.operation = self.monitor.begin(
            f"{ROUND}{update.number} of fragment {update.fragment.index}", update.departed + self._ahead
        )
        update.nbytes = self.exchange.nbytes_sent(update.codec, update.delta.numel(), group.size, group.rank)
        counts = None
        if update.trained:
            key = Key(self.seed, update.fragment.index, update.number, group.rank)
            counts = TokenCount(group, tag_of(key, MOST_STAGES - 2), update.trained - update.fragment.counted)
        samples = None
        if update.sample:
            samples = self.facts(update, 1, update.sample, "frozen parameters")
        order = (update.lands, next(self._launched))
        own = self._step_timer.departs(update.departed, begin - stalled)
        if self._pacer:
            left = (update.lands - update.departed) * own if scheduled or resumed else math.inf
            self._pacer.before_send(update, begin, left)
        departure = self.context.send_queue.put(order, lambda: self._depart(update, order, counts))
        update.arrival = self._inbound.submit(self._arrive, departure, update, own, scheduled, samples)

    def facts(self, update: RoundUpdate, index: int, own: bytes, purpose: str) -> FactOfAll:
        """Send `own` to all others as the message `index` (from 1) about the round of `update`."""
        group = self.context.group
        key = Key(self.seed, update.fragment.index, update.number, group.rank)
        return FactOfAll(group, tag_of(key, MOST_STAGES - 1, index), own, purpose)  # the policy's stage has one message

    def wait(self, update: RoundUpdate) -> None:
        """Wait until `update` has arrived. Raises the error of the exchange, and as `Monitor.wait`."""
        self.monitor.wait(done_in(update.arrival), update.operation)
        update.wait()

    def gather(self, payload: bytes, limit: int, purpose: str, step: int) -> list[bytes]:
        """Gather like `comm.group.gather`, after `step` on all replicas. Raises as `Monitor.run`."""
        operation = f"{purpose} {step}"
        return self.monitor.run(
            lambda: gather(self.context.group, payload, limit, purpose, operation), f"the gather of {purpose}", step
        )

    def landed(self, update: RoundUpdate, began: float) -> None:
        """Record that `update` has landed, for which training waited from `began` on."""
        if self._pacer:
            self._pacer.on_land(late=update.end > began)

    def close(self) -> None:
        """Drop rounds that have not started; rounds in progress end with the group, and nobody observes them."""
        self._observe = silent
        self.context.close()
        self._inbound.close(cancel=True)
        self.monitor.close()

    @torch.no_grad()
    def _depart(
        self, update: RoundUpdate, order: tuple[int, int], counts: TokenCount | None
    ) -> tuple[Round, Any, PolicyMessage | None]:
        if counts:
            try:
                update.share = counts.share()
            except LinkError as error:
                raise self.monitor.explained(error, update.operation) from error
        signal, _ = weigh(update, update.share)
        key = Key(self.seed, update.fragment.index, update.number, self.context.group.rank)
        flags = STOP * self.stop_requested | PARTIAL * update.partial
        numel = update.delta.numel()
        round_ = Round(
            self.context,
            update.codec,
            numel,
            key,
            signal,
            flags,
            order,
            update.departed,
            self._aggregate,
            update.fragment.aggregate,
            anchor=update.fragment.anchor,
            device=update.fragment.device,
            on_stream=update.on_stream,
        )
        return round_, self.exchange.depart(round_, update.fragment.exchange), self._policy_message(update, round_)

    def _policy_message(self, update: RoundUpdate, round_: Round) -> PolicyMessage | None:
        policy, codec = self._deciding, update.fragment.codec
        if policy is None or not (count := policy.tells(codec, update.number)):
            return None
        own = Round(
            self.context, Identity(), count, round_.key, round_.signal, 0, round_.order, round_.step,
            on_stream=update.on_stream,
        )  # fmt: skip
        return PolicyMessage(own, lambda: policy.decide(codec, update.signal, round_.numel, round_.key))

    @torch.no_grad()
    def _arrive(
        self,
        departed: Future[tuple[Round, Any, PolicyMessage | None]],
        update: RoundUpdate,
        own_seconds: float,
        scheduled: bool,
        samples: FactOfAll | None,
    ) -> None:
        with update.on_stream():
            self._receive(*departed.result(), update, own_seconds, scheduled, samples)

    def _receive(
        self,
        round_: Round,
        departure: Any,
        notice: PolicyMessage | None,
        update: RoundUpdate,
        own_seconds: float,
        scheduled: bool,
        samples: FactOfAll | None,
    ) -> None:
        over = False
        try:
            _, settle = weigh(update, update.share)
            arrival = self.exchange.arrive(departure, settle)
            if notice and self._deciding is not None:
                update.policy = self._deciding.told(update.fragment.codec, notice.arrive())
            update.unlike = samples is not None and set(samples.wait().values()) != {update.sample}
            if update.compared:
                update.compared()
            over = True
        except PeerError as error:
            own = round_.own_failure()
            if own is not None:
                raise own from None
            if isinstance(error, LinkError):
                raise self.monitor.explained(error, update.operation) from error
            if isinstance(error, DisagreementError):
                raise self.monitor.disagree(error) from error
            raise
        finally:
            if recorded(update.number) or not over:
                names = [str(rank) for rank in range(round_.size)]
                record = replace(round_.record(names, own_seconds, over), scheduled=scheduled)
                of_log = record.shifted(self.clock() - self.context.clock())  # by the clock of all events
                self._observe("wire", update.departed, **of_log.facts())
        tolerated = self._aggregate.tolerates(round_.size)
        void = arrival.void or sum(bool(f & REFUSED) for f in arrival.flags) > tolerated
        verdict = 0 if not void and update.finish() else REFUSED
        update.close()
        flags = or_flags(self.site, (*arrival.flags, verdict), ROUNDS)
        update.exchange, update.aggregate = arrival.state, round_.after or update.fragment.aggregate
        update.good = not flags[-1] & REFUSED and sum(bool(f & REFUSED) for f in flags) <= tolerated
        update.refused_by = tuple(rank for rank, f in enumerate(flags[:-1]) if f & REFUSED)
        if update.good and round_.rank in update.refused_by:
            update.keep_own_state()
        update.stop, update.partial = any(f & STOP for f in flags), any(f & PARTIAL for f in flags)
        update.end, update.nbytes_sent = self.clock(), round_.nbytes_sent
        update.queued_seconds, update.transfer_seconds = round_.times()


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
