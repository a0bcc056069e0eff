"""Rounds in progress: what happens to a delta beside training, between snapshot and landing.

Two threads: one encodes and sends, the round first that lands first (`SendQueue`), so that a departure never waits for an
earlier flight's bytes to arrive; the other, first in first out, waits, decodes, takes the outer step and hears the
site's vote. Nothing here touches the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm.group import Group
from thinwire.diagnosis.records import recorded
from thinwire.errors import LinkError, PeerError
from thinwire.exchange import Round, SendContext
from thinwire.exchange.base import MOST_STAGES, Outgoing, Stage
from thinwire.exchange.chunks import cut
from thinwire.packet import REFUSED, STOP, payload
from thinwire.pieces.policy import Deciding
from thinwire.rng import Key
from thinwire.runtime.handshake import Finished
from thinwire.runtime.update import RoundUpdate
from thinwire.state import State
from thinwire.strategy import Gradients, Strategy


@dataclass(frozen=True)
class RoundResult:
    """What a flight brings: whether the fragment moves, to where, and what was said on the way."""

    moved: RoundUpdate
    policy: State  # what the policy knows after it
    good: bool  # else the round is dropped: nothing has changed
    exchange: State
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
    arrival: Future[RoundResult]


@dataclass(frozen=True)
class RoundRequest:
    """Which round flies, and how: the fragment's index, the round's number, the inner steps of departure and landing.

    `stalled` is how long the replica has waited for landings until now.
    """

    fragment: int
    number: int
    departs: int
    lands: int
    codec: Codec
    exchange: State
    fitted: Codec  # the strategy's own, from which the policy has made `codec`
    policy: State
    stalled: float = 0.0  # seconds that the main thread has waited so far
    scheduled: bool = True  # else it departs with others at once: training has ended, or goes on from a checkpoint


Observe = Callable[..., None]


class PolicyMessage:
    """What replica 0 tells all others with a round, for the policy: a message of its own, of `numel` numbers.

    `decide` makes them, on replica 0.
    """

    def __init__(self, round_: Round, decide: Callable[[], Tensor]) -> None:
        self.round = round_
        self._stage = Stage(round_, round_.codec, MOST_STAGES - 1, purpose="policy")
        (message,) = cut(round_.codec, 0, round_.numel)
        self._own: Outgoing | None = None
        if round_.rank == 0:  # after the round's own messages, which do not wait for it
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
    """Flies a replica's rounds over `group`; `site` joins the ranks of one sharded replica, which must judge a round alike.

    `observe("wire", step, ...)` hears, on the inbound thread, what became of a round's messages (diagnosis/records.py).
    """

    def __init__(
        self,
        strategy: Strategy,
        group: Group,
        site: Group | None,
        clock: Callable[[], float] = time.monotonic,
        observe: Observe = lambda event, step, **fields: None,
    ) -> None:
        self.exchange, self.seed, self.site, self.clock = strategy.exchange, strategy.seed, site, clock
        self.policy = strategy.policy
        self.context, self._observe = SendContext(group), observe
        self.finished = Finished(group)
        self._ahead = int(isinstance(strategy.signal, Gradients))  # a gradient is of the step that comes
        self.stop_requested = False
        self._pace = Pace()
        self._inbound = ThreadPoolExecutor(1, "thinwire-inbound")
        self._launched = 0

    def launch(self, request: RoundRequest, moved: RoundUpdate) -> Flight:
        """Send the delta that is in `moved`, and let the mean of all settle there."""
        begin, delta, group = self.clock(), moved.present.delta, self.context.group
        nbytes = self.exchange.nbytes_sent(request.codec, delta.numel(), group.size, group.rank)
        order = (request.lands, self._launched)
        own = self._pace.departs(request.departs, begin - request.stalled)
        self._launched += 1
        departure = self.context.send_queue.put(order, lambda: self._depart(request, moved, order))
        arrival = self._inbound.submit(self._arrive, departure, request, moved, begin, own)
        return Flight(request.number, request.departs, delta, nbytes, arrival)

    def close(self) -> None:
        """Forget what has not been started; flights in progress end with the group."""
        self.context.close()
        self._inbound.shutdown(wait=False, cancel_futures=True)

    @torch.no_grad()
    def _depart(
        self, request: RoundRequest, moved: RoundUpdate, order: tuple[int, int]
    ) -> tuple[Round, Any, PolicyMessage | None]:
        key = Key(self.seed, request.fragment, request.number, self.context.group.rank)
        flags = STOP if self.stop_requested else 0
        numel = moved.present.delta.numel()
        round_ = Round(self.context, request.codec, numel, key, moved.signal, flags, order, request.departs)
        return round_, self.exchange.depart(round_, request.exchange), self._notice(request, moved, round_)

    def _notice(self, request: RoundRequest, moved: RoundUpdate, of: Round) -> PolicyMessage | None:
        policy = self.policy
        count = policy.tells(request.fitted, request.number) if isinstance(policy, Deciding) else 0
        if not isinstance(policy, Deciding) or not count:
            return None
        round_ = Round(self.context, Identity(), count, of.key, of.signal, 0, of.order, of.step)
        return PolicyMessage(round_, lambda: policy.decide(request.fitted, moved.signal, of.numel, of.key))

    @torch.no_grad()
    def _arrive(
        self,
        departed: Future[tuple[Round, Any, PolicyMessage | None]],
        request: RoundRequest,
        moved: RoundUpdate,
        begin: float,
        own_seconds: float,
    ) -> RoundResult:
        round_, departure, notice = departed.result()
        known, over = request.policy, False
        try:
            arrival = self.exchange.arrive(departure, moved.settle)
            if notice and isinstance(self.policy, Deciding):
                known = self.policy.told(request.fitted, notice.arrive())
            over = True
        except PeerError as error:
            own = round_.own_failure()
            if own is not None:
                raise own from None
            if isinstance(error, LinkError):
                raise self.finished.explained(error, request.departs + self._ahead) from error
            raise
        finally:
            if recorded(request.number) or not over:
                names = [str(rank) for rank in range(round_.size)]
                record = replace(round_.record(names, own_seconds, over), scheduled=request.scheduled)
                self._observe("wire", request.departs, **record.facts())
        void = arrival.void or any(f & REFUSED for f in arrival.flags)
        verdict = 0 if not void and moved.finish() else REFUSED
        moved.close()
        flags = agree(self.site, (*arrival.flags, verdict), ROUNDS)
        queued, transferred = round_.times()
        return RoundResult(
            moved=moved,
            policy=known,
            good=not any(f & REFUSED for f in flags),
            exchange=arrival.state,
            refused_by=tuple(rank for rank, f in enumerate(flags[:-1]) if f & REFUSED),
            stop=any(f & STOP for f in flags),
            begin=begin,
            end=self.clock(),
            queued_seconds=queued,
            transfer_seconds=transferred,
        )


class Pace:
    """How fast a replica trains by itself.

    >>> pace = Pace()
    >>> [pace.departs(step, seconds) for step, seconds in ((10, 3.0), (20, 8.0))]
    [0.0, 0.5]
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def departs(self, step: int, own: float) -> float:
        """Seconds an inner step since the departure before, from `own` seconds until now; 0: unknown."""
        before, self._last = self._last, (step, own)
        return (own - before[1]) / (step - before[0]) if before and step > before[0] else 0.0


ROUNDS, WEIGHTS = 0, 1  # what is voted on: the votes of two threads must not mix


def agree(site: Group | None, flags: tuple[int, ...], about: int) -> tuple[int, ...]:
    """The union of the flags that the ranks of a site have seen: what a shard finds counts for all shards."""
    if site is None:
        return flags
    own = torch.tensor(flags, dtype=torch.uint8)
    peers = [peer for peer in range(site.size) if peer != site.rank]
    others = {peer: torch.zeros_like(own) for peer in peers}
    site.post(about, {peer: own for peer in peers}, others, "vote").wait()
    for other in others.values():
        own |= other
    return tuple(own.tolist())
