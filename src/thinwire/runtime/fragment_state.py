"""Two records of a fragment: what is (`FragmentState`), and what a round may make of it (`RoundUpdate`).

A round writes the next anchor, outer state and feedback range by range, while a range is in the cache, into spare buffers; the
fragment keeps its own until `commit`. Only what a `FragmentState` offers for it touches the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Codec, in_full
from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.guard import Guard, Judged, norm_of
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, local
from thinwire.pieces.policy import Policy
from thinwire.pieces.transforms import Filter, said, settled
from thinwire.strategy import Strategy
from thinwire.types import State

DROPPED = -1


@dataclass
class FragmentState:
    """A fragment and what this replica remembers of it."""

    fragment: Fragment
    index: int
    anchor: Tensor  # flat fp32; what takes its place is written elsewhere, but then its room may be used again
    state: State
    feedback: State  # what the codec held back; on the CPU
    codec: Codec  # the strategy's, fitted to this fragment
    exchange: State = field(default_factory=dict)  # what the exchange remembers; on the CPU
    aggregate: State = field(
        default_factory=dict
    )  # what the aggregate remembers of what is aggregated here; on the CPU
    policy: State = field(default_factory=dict)  # what the strategy's policy knows of this fragment; on the CPU
    filters: tuple[Filter, ...] = ()  # as well
    filtered: tuple[State, ...] = ()  # what each remembers; on the CPU
    guard: State = field(default_factory=dict)  # what the strategy's guard knows of this replica's norms; on the CPU
    rounds: int = 0
    since: int = 0  # the inner step after which nothing trained has departed; DROPPED if what departed was dropped
    counted: float = 0.0  # tokens trained when the last delta departed that counted, if they are counted
    flight: RoundUpdate | None = None
    own: Tensor | None = None  # where a round takes a whole period: the own delta that is in the air
    # eager updates only: what this replica is ahead of the anchor
    deviation: Tensor | None = None
    deviation_state: State = field(default_factory=dict)

    @property
    def base(self) -> Tensor:
        """Where the fragment's inner steps started."""
        return self.anchor if self.deviation is None else self.anchor + self.deviation

    def due(self, policy: Policy, number: int) -> Codec:
        """What round `number`, which departs now, is coded in."""
        if any(one.dense(state) for one, state in zip(self.filters, self.filtered)):
            return in_full(self.codec)
        return policy.at(self.codec, self.anchor.numel(), number, self.policy)

    def slices(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's local part, detached, with its slice of `flat`, in the same shape."""
        begin = 0
        for _, parameter in self.fragment.parameters:
            part = local(parameter.detach())
            yield part, flat[begin : begin + part.numel()].view(part.shape)
            begin += part.numel()

    def snapshot(self, into: Tensor) -> Tensor:
        """The replica's own parameters, flat, in fp32, where the anchor lives."""
        for part, slice_ in self.slices(into):
            slice_.copy_(part)
        return into

    def delta(self, into: Tensor) -> Tensor:
        """base − parameters, in one pass."""
        for (part, slice_), (_, base) in zip(self.slices(into), self.slices(self.base)):
            torch.sub(base, part.to(base.device), out=slice_)
        return into

    @torch.no_grad()
    def guarded(self, guard: Guard, delta: Tensor, periods: float) -> tuple[float, Judged] | None:
        """Have `guard` judge `delta`, trained for so many `periods`. If it clips, `delta` is shorter now and the parameters have gone back along
        it; returns the norm that it had, and what the guard said.
        """
        norm = norm_of(delta)
        if not math.isfinite(norm):  # refused elsewhere
            return None
        judged = guard.judged(norm, periods, self.guard)
        self.guard = judged.state
        if judged.scale == 1:
            return None
        self.load_into_parameters(self.base - delta.mul_(judged.scale))
        return norm, judged

    def finite(self) -> bool:
        """Whether all of the replica's own parameters are."""
        return all(bool(torch.isfinite(part).all()) for part, _ in self.slices(self.anchor))

    def begin_round(
        self,
        strategy: Strategy,
        delta: Tensor,
        step: int,
        buffers: Buffers,
        *,
        outer: Outer | None = None,
        given: Tensor | None = None,
        number: int | None = None,
        codec: Codec | None = None,
    ) -> RoundUpdate:
        """The round in which `delta` departs after inner step `step`: the next one, or `number` once more, in the codec that is due, or
        `codec`. It is in the air until it is committed or discarded. See `RoundUpdate`.
        """
        number = self.rounds if number is None else number
        self.flight = RoundUpdate(
            self,
            delta,
            outer,
            strategy.feedback,
            buffers,
            number=number,
            departed=step,
            lands=step + strategy.schedule.delay,
            codec=codec or self.due(strategy.policy, number),
            given=given,
        )
        self.rounds = max(self.rounds, number + 1)
        return self.flight

    def load_into_parameters(self, flat: Tensor) -> None:
        """Overwrite the replica's own parameters."""
        for part, values in self.slices(flat):
            part.copy_(values)

    def carry_over(self, departed: Tensor, alpha: float = 0.0, kept: float = 1.0) -> None:
        """θ ← anchor + alpha·(departed − anchor) + kept·(θ − departed), where the parameters were `departed` when a round left."""
        rest = torch.lerp(self.anchor, departed, alpha) - kept * departed
        for part, values in self.slices(rest):
            part.copy_(kept * part.to(values) + values)

    def begin_next(self, delta: Tensor, strategy: Strategy, share: float, buffers: Buffers) -> None:
        """Where a round takes a whole period and `delta` is about to depart: from where the next inner steps go on."""
        if strategy.merge.eager:
            self._step_aside(delta, strategy.outer, share, buffers)
        else:
            buffers.give(*([] if self.own is None else [self.own]))
            self.own = delta
        self.load_into_parameters(self.base)

    def _step_aside(self, delta: Tensor, outer: Outer, share: float, buffers: Buffers) -> None:
        """Eager updates: what is new in `delta` since the last counts at once, as this replica's share of the mean."""
        if self.deviation is None or self.own is None:
            self.deviation = torch.zeros_like(self.anchor)
            self.deviation_state, self.own = outer.init(self.deviation), torch.zeros_like(self.anchor)
        fresh = torch.sub(delta, self.own, out=self.own).mul_(share)
        present, state = self.deviation, self.deviation_state
        if outer.elementwise:
            moved = buffers.like(present)
            after: State = {name: buffers.like(kept) for name, kept in state.items()}
            outer.step_into(present, fresh, state, moved, after)
        else:
            moved, after = outer.step(present, fresh, state)
        buffers.swap([fresh, present, *state.values()], [moved, *after.values()])
        self.deviation, self.deviation_state, self.own = moved, after, delta


def hold(strategy: Strategy, fragment: Fragment, index: int, rank: int, size: int) -> FragmentState:
    """What a replica holds for `fragment` at first."""
    parts = [local(p.detach()) for _, p in fragment.parameters]
    device = torch.device("cpu") if strategy.anchors == "host" else parts[0].device
    anchor = torch.cat([part.reshape(-1).to(device, torch.float32) for part in parts])
    feedback = strategy.feedback.init(anchor.numel()) if strategy.feedback else {}
    codec = strategy.codec.fitted(fragment.shapes)
    strategy.aggregate.check(size)
    memory = strategy.exchange.init(codec, anchor.numel(), rank, size)
    aggregated = strategy.aggregate.init(strategy.exchange.owns(codec, anchor.numel(), rank, size), size)
    filters = tuple(one.fitted(codec, anchor.numel(), size) for one in strategy.filters)
    filtered = tuple(one.init(anchor.numel()) for one in filters)
    policy, state = strategy.policy.init(codec), strategy.outer.init(anchor)
    guard = strategy.guard.init() if strategy.guard and strategy.guards else {}
    return FragmentState(
        fragment, index, anchor, state, feedback, codec, memory, aggregated, policy, filters, filtered, guard
    )


class RoundUpdate:
    """A round of the fragment `of`, which stays as it is until `commit` or `discard`; then the round is over.

    Which round: `delta` departs after inner step `departed` as round `number`, coded by `codec`, and is to land after step `lands`.

    What it makes, written beside training: `anchor` (next, stepped by `outer`; without, the estimate itself), `outer` and `feedback`
    (their next states), `filtered`, `exchange`, `aggregate` and `policy`. Flat and fp32; all but anchor and outer state on the CPU.

    What was said and when, known once `wait` returns: `good` (else it is to be discarded), `refused_by` (replicas whose delta was not
    finite), `stop` (some replica asked to stop), `nbytes` that this replica foresees to send and `nbytes_sent`, and times on the replica's clock.

    `given` is the next anchor where that is known beforehand (one replica alone).
    """

    def __init__(
        self,
        of: FragmentState,
        delta: Tensor,
        outer: Outer | None,
        feedback: Feedback | None,
        buffers: Buffers,
        *,
        number: int = 0,
        departed: int = 0,
        lands: int = 0,
        codec: Codec | None = None,
        given: Tensor | None = None,
    ) -> None:
        self.of, self.delta = of, delta
        self.number, self.departed, self.lands, self.codec = number, departed, lands, codec or of.codec
        self.trained, self.share = 0.0, 1.0  # tokens when it departed, if they are counted; by what the delta is scaled
        self.anchor = given
        self.outer: State = {}
        self.feedback: State = {}
        self.filtered: tuple[State, ...] = ()
        self.exchange, self.aggregate, self.policy = of.exchange, of.aggregate, of.policy
        self.good = self.stop = False
        self.refused_by: tuple[int, ...] = ()
        self.nbytes = self.nbytes_sent = 0
        self.begin = self.end = self.queued_seconds = self.transfer_seconds = 0.0
        self.arrival: Future[None] = Future()  # done when all this is known
        self._step, self._feedback, self._buffers, self._given = outer, feedback, buffers, given
        remembers = feedback is not None or bool(of.filters)  # and that in host memory
        self._inputs = [delta.cpu() if remembers else delta]  # what each filter gets; last what is coded
        self._signal: Tensor | None = None
        self._whole: Tensor | None = None  # the estimate, for filters or an outer step that need all of it
        self._sent: Tensor | None = None  # what the own packet says, for filters
        self._finite = True

    def signal(self, begin: int, end: int) -> Tensor:
        """What to encode for a range; lent until the next call."""
        coded = self._coded()[begin:end]
        if self._feedback is None:
            return coded
        if self._signal is None or self._signal.numel() < end - begin:
            self._buffers.give(*self._tensors(self._signal))
            self._signal = self._buffers.floats(end - begin)
        return self._feedback.signal(coded, _range(self.of.feedback, begin, end), self._signal[: end - begin])

    def settle(self, begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
        """Take the mean of a range."""
        end, filters = begin + mean.numel(), self.of.filters
        if filters:
            self._sent = self._room(self._sent)
            self._sent[begin:end] = sent()
        if self._feedback:
            if not self.feedback:
                self.feedback = self._like(self.of.feedback)
            before, after = _range(self.of.feedback, begin, end), _range(self.feedback, begin, end)
            mean = self._feedback.settle(self._coded()[begin:end], sent(), mean, before, after)
        if self._given is not None:
            return
        on_cpu = self.of.anchor.device.type == "cpu"
        if self._step is not None and self._step.elementwise and on_cpu and not filters:
            self._stepped(self._step, begin, end, mean)
        else:
            self._whole = self._room(self._whole)
            self._whole[begin:end].copy_(mean)

    def finish(self) -> bool:
        """After the last range: whether the anchor is finite."""
        if self._whole is not None:
            estimate, of = self._whole, self.of
            if self._sent is not None:
                states, inputs = of.filtered, self._inputs
                estimate, self.filtered = settled(of.filters, states, inputs, self._sent, estimate, self.feedback)
            if self._step is None:
                self.anchor = estimate
                self._whole = None if estimate is self._whole else self._whole
            else:
                here = estimate.to(of.anchor.device)
                self.anchor, self.outer = self._step.step(of.anchor, here, of.state)
            self._check(self.anchor)
        return self._finite and self.anchor is not None

    def close(self) -> None:
        """Give back what was for the way only."""
        for room in (self._signal, self._whole, self._sent):
            self._buffers.give(*self._tensors(room))
        self._signal = self._whole = self._sent = None

    def wait(self) -> None:
        """Return when the round has arrived. Raises what went wrong on the way."""
        self.arrival.result()

    def commit(self) -> None:
        """Make the fragment what the round has made of it. Without an outer step its anchor stays, and the estimate is given back."""
        of, swap = self.of, self._buffers.swap
        assert self.anchor is not None
        if self._step is None:
            self._buffers.give(self.anchor)
        else:
            swap([of.anchor, *of.state.values()], [self.anchor, *self.outer.values()])
            of.anchor, of.state = self.anchor, self.outer
        swap(of.feedback.values(), self.feedback.values())
        swap(of.exchange.values(), self.exchange.values())
        swap(of.aggregate.values(), self.aggregate.values())
        of.feedback, of.exchange, of.aggregate = self.feedback, self.exchange, self.aggregate
        of.policy, of.filtered = self.policy, self.filtered
        self._over()

    def discard(self) -> None:
        """Leave the fragment as it is: nobody needs what the round made."""
        self._buffers.swap(
            [
                *(*self._tensors(self.anchor), *self.outer.values(), *self.feedback.values()),
                *(*self.exchange.values(), *self.aggregate.values()),
            ],
            [
                *(*self.of.state.values(), *self.of.feedback.values()),
                *(*self.of.exchange.values(), *self.of.aggregate.values()),
            ],
        )
        self._over()

    def _over(self) -> None:
        if self.delta is not self.of.own:  # where a round takes a whole period the delta is needed longer
            self._buffers.give(self.delta)
        self.of.flight = None

    def _coded(self) -> Tensor:
        """What is to be coded, before feedback: the delta, or what the filters make of it, once."""
        if len(self._inputs) == 1 and self.of.filters:
            self._inputs = said(self.of.filters, self.of.filtered, self._inputs[0])
        return self._inputs[-1]

    def _room(self, room: Tensor | None) -> Tensor:
        return self._buffers.floats(self._inputs[0].numel()) if room is None else room

    def _stepped(self, outer: Outer, begin: int, end: int, mean: Tensor) -> None:
        if self.anchor is None:
            self.anchor, self.outer = self._buffers.like(self.of.anchor), self._like(self.of.state)
        moved = self.anchor[begin:end]
        before, after = _range(self.of.state, begin, end), _range(self.outer, begin, end)
        outer.step_into(self.of.anchor[begin:end], mean, before, moved, after)
        self._check(moved)

    def _check(self, moved: Tensor) -> None:
        # A sum of squares may overflow for finite values: only then each is looked at.
        if not bool(torch.isfinite(torch.dot(moved, moved))):
            self._finite &= bool(torch.isfinite(moved).all())

    def _like(self, state: State) -> dict[str, Tensor]:
        return {name: self._buffers.like(kept) for name, kept in state.items()}

    @staticmethod
    def _tensors(tensor: Tensor | None) -> list[Tensor]:
        return [] if tensor is None else [tensor]


def _range(state: Mapping[str, Tensor], begin: int, end: int) -> State:
    return {name: kept[begin:end] for name, kept in state.items()}
