"""One replica: the only room that knows the order of things.

After inner step t: the fragments that are due depart (snapshot, delta, launch); the flights that are due land (outer
step, merge). Everything between is in `runtime/pipeline.py`, beside training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from thinwire.codecs import Identity
from thinwire.comm.group import Group
from thinwire.elastic.driver import Elastic, check, tokens_of_step
from thinwire.errors import ConfigurationError, ModelError
from thinwire.membership.rendezvous import Membership
from thinwire.observer import Observer
from thinwire.pieces.merge import Mix
from thinwire.pieces.outer import Average, Outer
from thinwire.pieces.partition import Fragment, check_optimizer, check_sharding
from thinwire.pieces.schedule import Calendar
from thinwire.runtime.fragment_state import DROPPED, FragmentState, hold, restore, saved
from thinwire.runtime.handshake import agree_on_resume, agree_on_start, check_start, digest, introduce, introduction
from thinwire.runtime.loop_warnings import LoopWarnings, silent
from thinwire.runtime.module_state import Stepped, clear, exported, gradient, reshard
from thinwire.runtime.pipeline import WEIGHTS, RoundPipeline, RoundRequest, RoundResult, agree
from thinwire.runtime.update import RoundUpdate
from thinwire.strategy import Gradients, Strategy


class Replica:
    """Attach a strategy to a model, its optimizer and a group; the training loop stays as it is.

    ```python
    with Replica(streaming_diloco(every=100, delay=5), model, optimizer, group):
        for batch in data:
            model(batch).loss.backward()
            optimizer.step()          # counts an inner step; departures and landings happen here
            optimizer.zero_grad()
    ```

    With a `Membership` in place of a group replicas may come and go (docs/elastic.md): nothing waits, and `step` jumps
    ahead where this replica was behind. With `tokens`, how many an inner step here has (set it anew before a step that
    has others), a delta counts by the tokens behind it; without, all count alike.

    On entry the replicas compare code, strategy and model, and all start from replica 0's weights if theirs differ.
    On a clean exit what is in the air lands, one last round averages what was trained since (none, if nothing was), and
    the model holds the outer weights (the anchors).

    *Every replica must take the same number of inner steps*: one call of `optimizer.step` is one. Gradient accumulation,
    closures and schedulers need nothing; a loop that wants to skip an update calls `step` with gradients set to None.

    Parameters: frozen ones are left alone, tied ones travel once, any floating dtype is exchanged as fp32 and written back
    in its own. Buffers stay local. Inner optimizer state is local and never reset (as in the paper). Parameters sharded by
    FSDP2 (`fully_shard`) are exchanged shard by shard: `group` joins a rank with its twins in the other replicas, `site`
    the ranks of this replica. FSDP1, DDP and GradScaler (which skips steps) are not supported.

    Cost: 4 bytes a parameter for the anchor, 4 for Nesterov momentum, 4 a parameter in the context. The main thread pays for a
    snapshot at departure and a merge at landing, and waits there if the flight is late.

    `observer(event, step, **fields)` hears depart, flight, land, refused, wire and warning events (wire on another thread); times are `clock()`'s.
    Without one, what the loop gets wrong goes to Python's `warnings`. Raises `ModelError` (nothing trainable; an optimizer that does not hold
    the parameters; a model inside DDP), `DisagreementError`, `LinkError`.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: Group | Membership,
        *,
        site: Group | None = None,
        tokens: float | None = None,
        observer: Observer = silent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self.step, self.tokens = 0, tokens
        self.stopping = False
        self.stall_seconds = 0.0
        self.seconds = 0.0  # spent by the main thread in departures and landings, stalls included
        self._observe, self._clock = observer, clock
        check_optimizer(model, optimizer)
        strategy.check_inner(optimizer, sharded=site is not None)
        check_sharding(model, whole_replica=site is not None)
        fragments = strategy.partition.fragments(model)
        self._calendar = Calendar(
            strategy.schedule, len(fragments), lambda _: float(max(g["lr"] for g in optimizer.param_groups))
        )
        self._calendar.departs(0)  # offsets for another number of fragments are refused here
        strategy.warm_up()
        self._gradients_exchanged = self._finished = False
        self._site = site
        self._elastic: Elastic | None = None
        self._stepped: Stepped | None = None  # with Gradients
        if isinstance(group, Membership):
            self._join(group, fragments, site)
        else:
            self._meet(group, fragments, site)
        hooks = [optimizer.register_step_post_hook(lambda *_: self._after_inner_step())]
        if isinstance(strategy.signal, Gradients):
            hooks.append(optimizer.register_step_pre_hook(self._before_inner_step))
        self._hooks = hooks
        self._loop_warnings = LoopWarnings(self, model, observer)

    def _meet(self, group: Group, fragments: list[Fragment], site: Group | None) -> None:
        """Be one of a fixed group."""
        if self.tokens is not None:
            raise ConfigurationError(
                "tokens= with a fixed group, whose replicas take the same steps and count alike; give a Membership, or leave it out."
            )
        self.group = group
        introduce(group, self.strategy, fragments)
        self._pipeline = RoundPipeline(self.strategy, group, site, self._clock, self._observe)
        self._buffers = self._pipeline.context.buffers
        self._pieces = [hold(self.strategy, f, index, group.rank, group.size) for index, f in enumerate(fragments)]
        anchors = [piece.anchor for piece in self._pieces]
        if agree_on_start(group, anchors):
            self._warn("replicas began with different weights; all start from replica 0's")
        check_start(fragments, anchors)
        self._load_anchors()
        if isinstance(self.strategy.signal, Gradients):
            self._stepped = Stepped(self.model, self._weights, group, self._warn)

    def _join(self, membership: Membership, fragments: list[Fragment], site: Group | None) -> None:
        """Be one of those who are there now."""
        if site is not None:
            raise ConfigurationError(
                "site= with a Membership: a sharded replica needs the same ranks in every round; give a fixed group, or a whole replica."
            )
        check(self.strategy)
        self._pieces = [hold(self.strategy, fragment, index, 0, 1) for index, fragment in enumerate(fragments)]
        check_start(fragments, [piece.anchor for piece in self._pieces])
        by_tokens = self.tokens is not None and tokens_of_step(self.tokens) > 0
        weights = {"weights": "by tokens" if by_tokens else "alike"}
        membership.require(introduction(self.strategy, fragments) | weights)
        self._elastic = Elastic(
            self.strategy, membership, self._pieces, self._observe, self._clock, self._start_again, by_tokens=by_tokens
        )
        self.step = self._elastic.join(self.step)

    def _warn(self, message: str) -> None:
        self._observe("warning", self.step, message=message)

    # ---- what a training loop may ask

    @property
    def fragments(self) -> list[Fragment]:
        return [piece.fragment for piece in self._pieces]

    @property
    def in_flight(self) -> list[int]:
        """Indices of the fragments that are in the air."""
        return [piece.index for piece in self._pieces if piece.flight]

    def request_stop(self) -> None:
        """All replicas are to stop at one step: `stopping` becomes true on all at the next landing; with a `Membership` here, now."""
        if self._elastic:
            self._elastic.request_stop()
            self.stopping = True
        else:
            self._pipeline.stop_requested = True

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """With `Gradients`: replace every gradient by the mean of all replicas' (fp32, in rank order), in place.

        Runs by itself before the optimizer's step; call it earlier where the mean is needed earlier, as before clipping. If
        any replica's gradient is not finite, all gradients become None on all replicas and the step changes nothing.
        """
        if self._gradients_exchanged or not isinstance(self.strategy.signal, Gradients):
            return
        began = self._clock()
        self._gradients_exchanged = True
        for piece in self._pieces:
            delta = self._buffers.like(piece.anchor)
            for (_, parameter), (_, into) in zip(piece.fragment.parameters, piece.slices(delta)):
                into.copy_(gradient(parameter))
            self._depart(piece, RoundUpdate(piece.present(delta), None, self.strategy.feedback, self._buffers))
        landings = [self._await(piece) for piece in self._pieces]
        refused = not all(landed.good for landed, _ in landings)
        for piece, (landed, report) in zip(self._pieces, landings):
            mean = piece.anchor if landed.moved.anchor is None else landed.moved.anchor
            for (_, parameter), (_, values) in zip(piece.fragment.parameters, piece.slices(mean)):
                # Exactly zero everywhere is what parameters without a gradient send: they are skipped, on all replicas alike.
                if refused or not bool(values.any()):
                    parameter.grad = None
                else:
                    gradient(parameter).copy_(values)
            self._buffers.give(mean)
            piece.remember(replace(landed, good=not refused), self._buffers)
            report()
        if refused and self._stepped:
            self._stepped.check()
        self.seconds += self._clock() - began

    def anchors(self) -> list[Tensor]:
        """The outer weights, flat and in fp32, a tensor a fragment (with `Gradients`: the parameters, which are equal everywhere)."""
        return [p.snapshot(torch.empty_like(p.anchor)) if self._stepped else p.anchor.clone() for p in self._pieces]

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Within: the model holds the outer weights, for evaluation. After: the replica's own again, bit for bit."""
        own = [(part, part.clone()) for part in self._weights()]
        reshard(self.model)
        self._load_anchors()
        try:
            yield
        finally:
            reshard(self.model)
            for part, kept in own:
                part.copy_(kept)

    def export(self) -> dict[str, Tensor]:
        """The model's state dict with the outer weights (whole tensors, on the CPU). With FSDP all ranks of a site must call it."""
        with self.anchored():
            return exported(self.model)

    def finish(self, keep_seconds: float = 0.0) -> None:
        """Land what is in the air, exchange what was trained since, and leave the outer weights in the model.

        With `keep_seconds` among replicas that come and go: if one is missing at the end, the first of the others keeps the final
        state for it so long, on a thread beside what comes next, until `close`; its membership is closed when it is over.
        """
        if self._finished:
            return
        self._finished = True
        self._loop_warnings.finishes(self.step)
        if self._elastic:
            self._elastic.finish(self.step, keep_seconds)
        else:
            self._pipeline.finished.tell(self.step)
            if not self._stepped:
                self._last_rounds()
        self._load_anchors()
        if not (self._elastic and self._elastic.keeping):
            self.close()

    def _last_rounds(self) -> None:
        """A fragment of which nothing was trained since its last round has none: all replicas know, who take the same steps."""
        for piece in self._pieces:
            trained = piece.since < self.step
            if piece.flight and not (trained and self.strategy.merge.whole_period):  # there the departure lands it
                self._land(piece)
        for piece in self._pieces:
            if piece.since < self.step:
                self._depart_delta(piece, getattr(self.strategy.outer, "last", self.strategy.outer))
        for piece in filter(lambda piece: piece.flight, self._pieces):
            self._land(piece)

    def close(self) -> None:
        """Detach from the optimizer and end the exchange threads. The group stays open; it is the caller's."""
        self._loop_warnings.closes()
        for hook in self._hooks:
            hook.remove()
        (self._elastic or self._pipeline).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    # ---- the order of things

    def _before_inner_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With `Gradients`. A closure would compute new gradients after the exchange, and the replicas would drift apart."""
        if any(map(callable, args[1:])) or kwargs.get("closure") is not None:
            raise ModelError(
                "step(closure) with Gradients(): gradients are exchanged before the step; call the closure first, then step() without it."
            )
        self.exchange_gradients()

    def _after_inner_step(self) -> None:
        began = self._clock()
        self.step += 1
        self._gradients_exchanged = False
        self._loop_warnings.stepped(self.step)
        if self._elastic:
            self.step = self._elastic.after_step(self.step, self.tokens)
        elif self._stepped:
            self._stepped.after(self.step)
        else:
            for index in self._calendar.departs(self.step):
                self._depart_delta(self._pieces[index], self.strategy.outer)
            for piece in self._pieces:
                if piece.flight and piece.flight.departed + self.strategy.schedule.delay == self.step:
                    self._land(piece)
        self.seconds += self._clock() - began

    @torch.no_grad()
    def _depart_delta(self, piece: FragmentState, outer: Outer) -> None:
        """Form the fragment's delta and let it fly."""
        began = self._clock()
        delta = piece.delta(self._buffers.like(piece.anchor))
        given: Tensor | None = None
        if self.strategy.merge.whole_period:
            self._turn_over(piece, delta)
        elif self.group.size == 1 and self.strategy.schedule.delay == 0 and self._plain:
            # One replica that averages with itself is the inner optimizer alone, exactly (law 2): anchor − (anchor − θ) would round.
            given = piece.snapshot(self._buffers.like(piece.anchor))
        if self.strategy.privacy:
            self.strategy.privacy.apply(delta, self.group.size)
        self._depart(piece, self._moved(piece, delta, outer, given), began)
        piece.since = self.step

    @property
    def _plain(self) -> bool:
        s = self.strategy
        return (s.outer, s.codec, s.feedback, s.filters, s.privacy) == (Average(), Identity(), None, (), None)

    def _moved(self, piece: FragmentState, delta: Tensor, outer: Outer, given: Tensor | None = None) -> RoundUpdate:
        return RoundUpdate(piece.present(delta), outer, self.strategy.feedback, self._buffers, given)

    def _depart(self, piece: FragmentState, moved: RoundUpdate, began: float | None = None) -> None:
        began = self._clock() if began is None else began
        piece.flight = flight = self._pipeline.launch(
            self._request(piece, piece.rounds, self.step, not self._finished), moved
        )
        piece.rounds += 1
        fields = {"fragment": piece.index, "round": flight.number, "nbytes": flight.nbytes}
        self._observe("depart", self.step, **fields, seconds_spent=self._clock() - began)

    def _request(self, piece: FragmentState, number: int, step: int, scheduled: bool) -> RoundRequest:
        lands, codec = step + self.strategy.schedule.delay, piece.due(self.strategy.policy, number)
        known = (piece.exchange, piece.codec, piece.policy, self.stall_seconds)
        return RoundRequest(piece.index, number, step, lands, codec, *known, scheduled)

    def _await(self, piece: FragmentState) -> tuple[RoundResult, Callable[[], None]]:
        """Wait for the fragment's flight and report it; what comes back second reports the landing, when it is done."""
        flight = piece.flight
        assert flight is not None
        began = self._clock()
        landed = flight.arrival.result()
        stall = self._clock() - began
        self.stall_seconds += stall
        piece.flight = None
        if not self.strategy.merge.whole_period:  # there it is the own delta, which is needed longer
            self._buffers.give(flight.delta)
        self.stopping |= landed.stop
        fields = {"fragment": piece.index, "round": flight.number}
        self._observe(
            "flight", self.step, **fields, begin=landed.begin, end=landed.end,
            queued_seconds=landed.queued_seconds, transfer_seconds=landed.transfer_seconds,
        )  # fmt: skip
        if not landed.good:
            reason = "NaN or infinity in the delta" if landed.refused_by else "the anchor would not be finite"
            self._observe("refused", self.step, **fields, by=list(landed.refused_by), reason=reason)
        return landed, partial(self._report_landing, fields, began, stall)

    def _report_landing(self, fields: dict[str, int], began: float, stall: float) -> None:
        spent = self._clock() - began - stall
        self._observe("land", self.step, **fields, begin=began, stall_seconds=stall, seconds_spent=spent)

    @torch.no_grad()
    def _land(self, piece: FragmentState) -> None:
        """Take over what the flight brought. A refused round changes nothing: the delta is still in the parameters."""
        landed, report = self._await(piece)
        piece.since = piece.since if landed.good else DROPPED
        if landed.good:
            piece.move(landed, self._buffers)
            if isinstance(self.strategy.merge, Mix):
                for part, slice_ in piece.slices(piece.anchor):
                    self.strategy.merge.into(part, slice_.to(part.device))
            piece.since = self.step if self.strategy.merge.forgets else piece.since
        elif self.group.rank in landed.refused_by:
            self._start_again()
        piece.remember(landed, self._buffers)
        report()

    def _turn_over(self, piece: FragmentState, delta: Tensor) -> None:
        """Where a round takes a whole period: land the one before, and let the parameters begin the next (see `Eager`, `Reset`)."""
        if piece.flight:
            self._land(piece)
        if piece.rounds:
            if piece.own is None:  # this replica started again from the anchors
                delta.zero_()
            elif piece.since == DROPPED and bool(torch.isfinite(piece.own).all()):  # it departs again
                delta.add_(piece.own)
        piece.begin_next(delta, self.strategy, 1 / self.group.size, self._buffers)

    @torch.no_grad()
    def _start_again(self) -> None:
        """Go back to the anchors if own values are not finite, and clear what is not finite in optimizer and buffers."""
        bad = not all(piece.finite() for piece in self._pieces)
        if agree(self._site, (int(bad),), WEIGHTS) == (0,):  # all shards, or none
            return  # a delta from before the last new start
        self._warn("this replica's weights were not finite; it starts again from the anchors")
        for piece in self._pieces:
            piece.deviation = piece.own = None
        self._load_anchors()
        clear(self.model, self.optimizer)

    # ---- weights in and out

    def _weights(self) -> list[Tensor]:
        return [part for piece in self._pieces for part, _ in piece.slices(piece.anchor)]

    @torch.no_grad()
    def _load_anchors(self) -> None:
        if not isinstance(self.strategy.signal, Gradients) or self.step == 0:
            for piece in self._pieces:
                piece.load_into_parameters(piece.anchor)

    # ---- to be saved and to go on

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that this replica needs beside model and inner optimizer to go on bit for bit: tensors, and facts for JSON.

        Flights in the air are kept as deltas that departed; when loaded they depart again, with the same bytes. Nothing waits.
        """
        tensors = saved(self._pieces)
        flights = {str(p.index): [p.flight.number, p.flight.departed] for p in self._pieces if p.flight}
        facts = {
            "step": self.step,
            "rounds": [piece.rounds for piece in self._pieces],
            "since": [piece.since for piece in self._pieces],
            "flights": flights,
            "calendar": self._calendar.facts(),
        }
        facts |= {"weights": self._stepped.facts()} if self._stepped else {}
        return tensors, facts | ({"agreed": self._elastic.facts()} if self._elastic else {})

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`; model and inner optimizer are the caller's. Collective: all must load the same step.

        Raises `CheckpointError` (of another model or strategy), `DisagreementError` (replicas loaded different anchors).
        """
        self.step = facts["step"]
        self._calendar.load(facts["calendar"])
        restore(self._pieces, tensors, facts, self.strategy.outer)
        if self._elastic:
            self._elastic.load(facts["agreed"])
            return
        alike = self._stepped.resume(facts.get("weights", {})) if self._stepped else digest(self.anchors())
        agree_on_resume(self.group, self.step, alike)
        flights = sorted((departed, int(index), number) for index, (number, departed) in facts["flights"].items())
        for departed, index, number in flights:
            piece = self._pieces[index]
            delta = tensors.get(f"{index}.delta", piece.own)  # one tensor where a round takes a whole period
            assert delta is not None
            moved = self._moved(piece, delta.to(piece.anchor.device), self.strategy.outer)
            piece.flight = self._pipeline.launch(self._request(piece, number, departed, False), moved)
