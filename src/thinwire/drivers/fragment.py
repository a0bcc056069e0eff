"""Two records of a fragment: its present state (`FragmentState`), and the update that a round computes (`RoundUpdate`).

A round writes the next anchor, outer state and feedback into spare buffers, range by range, while a range is in the cache. The
fragment's own buffers stay until `commit`. Only methods of `FragmentState` touch the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, in_full
from thinwire.codecs.base import whole_anywhere
from thinwire.drivers.monitor import Operation
from thinwire.exchange import Buffers, Direct
from thinwire.exchange.buffers import CPU
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import Filter, said, settled
from thinwire.pieces.guard import Guard, Judged, norm_of
from thinwire.pieces.merge import Merge
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, local
from thinwire.pieces.policy import Deciding, Policy
from thinwire.strategy import Strategy
from thinwire.types import State

DROPPED = -1
LEAST_EVIDENCE = 16  # values that are not zero: fewer may be equal by chance, as signs


@dataclass
class FragmentState:
    """A fragment, and this replica's state of it."""

    fragment: Fragment
    index: int
    anchor: Tensor  # flat fp32; the next anchor is written to another buffer, after which this one may be reused
    state: State  # of the outer step, in the strategy's `state_dtype`
    feedback: State  # errors of the codec, for the next delta; on `device`, in `state_dtype`
    codec: Codec  # the strategy's, fitted to this fragment
    exchange: State = field(default_factory=dict)  # the exchange's state; on the CPU
    aggregate: State = field(default_factory=dict)  # the aggregate's, for the part aggregated here; on the CPU
    policy: State = field(default_factory=dict)  # the policy's state for this fragment; on the CPU
    filters: tuple[Filter, ...] = ()  # the strategy's, fitted to this fragment
    filtered: tuple[State, ...] = ()  # the state of each filter; on the CPU
    guard: State = field(default_factory=dict)  # the guard's state: this replica's norms; on the CPU
    device: torch.device = CPU  # of feedback, and of the values that packets of whole fragments hold
    rounds: int = 0
    since: int = 0  # the inner step of the last departure; DROPPED if that delta was dropped
    counted: float = 0.0  # tokens trained before the last counted delta departed, if they are counted
    flight: RoundUpdate | None = None
    own: Tensor | None = None  # if a round takes a whole period: the own delta in flight
    disk: Any | None = None  # DiskTensors, which hold anchor, outer state and feedback; None: they are in memory
    deviation: Tensor | None = None  # eager updates only: the difference between this replica and the anchor
    deviation_state: State = field(default_factory=dict)
    touched: Callable[[], None] = field(default=lambda: None, repr=False)  # called before parameters are used

    @property
    def base(self) -> Tensor:
        """The values at which the fragment's inner steps started."""
        return self.held(self._ahead)

    @property
    def _ahead(self) -> Tensor:
        return self.anchor if self.deviation is None else self.anchor + self.deviation

    def held(self, flat: Tensor) -> Tensor:
        """`flat` as the parameters hold it; see `held_by`."""
        if all(held_by(part, values) is values for part, values in self.slices(flat)):
            return flat
        return torch.cat([held_by(part, values).reshape(-1) for part, values in self.slices(flat)])

    def due(self, policy: Policy, number: int) -> Codec:
        """The codec of round `number`, which departs now."""
        if any(one.dense(state) for one, state in zip(self.filters, self.filtered)):
            return in_full(self.codec)
        return policy.at(self.codec, self.anchor.numel(), number, self.policy)

    def slices(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's local part, detached, with its slice of `flat` in the same shape."""
        return ((part, values) for part, values in self.aligned(flat))

    def aligned(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """As `slices`, with the slices of several tensors."""
        parts = self.parts()
        sizes = [part.numel() for part in parts]
        for part, *values in zip(parts, *(flat.split_with_sizes(sizes) for flat in flats)):
            yield part, *(one.view(part.shape) for one in values)

    def parts(self) -> list[Tensor]:
        """Each parameter's local part, detached."""
        self.touched()
        return [local(parameter.detach()) for _, parameter in self.fragment.parameters]

    def snapshot(self, into: Tensor) -> Tensor:
        """Copy the replica's own parameters, flat and in fp32, to the anchor's device."""
        for part, slice_ in self.slices(into):
            slice_.copy_(part)
        return into

    def delta(self, into: Tensor) -> Tensor:
        """Compute base − parameters, in one pass."""
        for part, slice_, base in self.aligned(into, self._ahead):
            base = held_by(part, base)
            if part.device != base.device and part.dtype != torch.float64:
                part = slice_.copy_(part)  # without another tensor in between
            torch.sub(base, part.to(base.device), out=slice_)
        return into

    def guarded(self, guard: Guard, delta: Tensor, periods: float) -> tuple[float, Judged] | None:
        """Let `guard` judge `delta`, which was trained for so many `periods`. If the guard clips, scale `delta` down, move the parameters back by
        the difference, and return the earlier norm and the judgement.
        """
        norm = norm_of(delta)
        if not math.isfinite(norm):  # a later check refuses it
            return None
        judged = guard.judged(norm, periods, self.guard)
        self.guard = judged.state
        if judged.scale == 1:
            return None
        self.load_into_parameters(self.base - delta.mul_(judged.scale))
        return norm, judged

    def finite(self) -> bool:
        """Whether all of the replica's own parameters are finite."""
        return all(bool(torch.isfinite(part).all()) for part in self.parts())

    def begin_round(
        self, strategy: Strategy, delta: Tensor, step: int, buffers: Buffers, *, outer: Outer | None = None,
        given: Tensor | None = None, number: int | None = None, codec: Codec | None = None,
    ) -> RoundUpdate:  # fmt: skip
        """Begin the round in which `delta` departs after inner step `step`. Its number is the next one or `number`, and its codec the one that is
        due or `codec`. It is in flight until it is committed or discarded. See `RoundUpdate`.
        """
        number = self.rounds if number is None else number
        self.flight = RoundUpdate(
            self, delta, outer, strategy.feedback, buffers, number=number, departed=step,
            lands=step + strategy.schedule.delay, codec=codec or self.due(strategy.policy, number), given=given,
        )  # fmt: skip
        self.rounds = max(self.rounds, number + 1)
        return self.flight

    def load_into_parameters(self, flat: Tensor) -> None:
        """Overwrite the replica's own parameters."""
        for part, values in self.slices(flat):
            part.copy_(values)

    def mix_anchor(self, merge: Merge) -> None:
        """Merge the anchor into the replica's own parameters."""
        for part, values in self.slices(self.anchor):
            merge.into(part, values.to(part.device))

    def carry_over(self, departed: Tensor, alpha: float = 0.0, kept: float = 1.0) -> None:
        """θ ← anchor + alpha·(departed − anchor) + kept·(θ − departed); `departed` are the parameters at the departure of a round."""
        rest = torch.lerp(self.held(self.anchor), departed, alpha) - kept * departed
        for part, values in self.slices(rest):
            part.copy_(kept * part.to(values) + values)

    def move_to_disk(self) -> None:
        """Move anchor, outer state and feedback into a file."""
        from thinwire.drivers.disk import DiskTensors  # few runs need it

        self.disk = DiskTensors([self.anchor, *self.state.values(), *self.feedback.values()])
        self.anchor, *others = self.disk.tensors
        self.state = dict(zip(self.state, others))
        self.feedback = dict(zip(self.feedback, others[len(self.state) :]))
        self.release()

    def release(self) -> None:
        """Release the memory of what is on disk, unless it is in flight."""
        if self.disk and not self.flight:
            self.disk.release()

    def begin_next(self, delta: Tensor, strategy: Strategy, share: float, buffers: Buffers) -> None:
        """If a round takes a whole period: set the parameters at which the next inner steps start, before `delta` departs."""
        if strategy.merge.eager:
            self._apply_own_share(delta, strategy.outer, share, buffers)
        else:
            buffers.give(self.own)
            self.own = delta
        self.load_into_parameters(self.base)

    def _apply_own_share(self, delta: Tensor, outer: Outer, share: float, buffers: Buffers) -> None:
        """Eager updates: apply the change of `delta` since the last one at once, as this replica's share of the mean."""
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


def held_by(part: Tensor, values: Tensor) -> Tensor:
    """`values` as `part` holds them: what bf16 rounds off is no training, so it is in no delta, and stays in the anchor."""
    return values.to(part.dtype).to(values.dtype) if part.dtype.itemsize < values.dtype.itemsize else values


class RoundUpdate:
    """A round of `fragment`. It does not change the fragment before `commit`; `commit` or `discard` ends the round.

    Departure: `delta` departs after inner step `departed` as round `number`, encoded by `codec`, and must land after step `lands`.

    Results, written beside training: the next `anchor`, stepped by `outer` (without an outer step the estimate itself), and the next
    states of `outer`, `feedback`, `filtered`, `exchange`, `aggregate` and `policy`. Flat fp32; all except anchor, outer state and
    feedback are on the CPU.

    Known after `wait`: `good` (if false, it must be discarded), `refused_by` (replicas whose delta was not finite), `stop` (a replica
    asked to stop), `partial` (on some replica a parameter had no gradient), `nbytes` that this replica expects to send, `nbytes_sent`, and times.

    `given` is the next anchor if it is known beforehand (one replica alone). `on_stream` is a context in which work on the device of the delta
    follows what this thread has queued there.
    """

    good: bool
    stop: bool
    partial = False  # at the departure: of this replica
    refused_by: tuple[int, ...]
    nbytes: int
    nbytes_sent: int
    begin: float
    end: float
    queued_seconds: float
    transfer_seconds: float

    def __init__(
        self, fragment: FragmentState, delta: Tensor, outer: Outer | None, feedback: Feedback | None, buffers: Buffers, *,
        number: int = 0, departed: int = 0, lands: int = 0, codec: Codec | None = None, given: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.fragment, self.delta = fragment, delta
        self.number, self.departed, self.lands, self.codec = number, departed, lands, codec or fragment.codec
        self.trained, self.share = 0.0, 1.0  # tokens at the departure, if they are counted; the factor of the delta
        self.anchor = given
        self.outer: State = {}
        self.feedback: State = {}
        self.filtered: tuple[State, ...] = ()
        self.exchange, self.aggregate, self.policy = fragment.exchange, fragment.aggregate, fragment.policy
        self.arrival: Future[None] = Future()  # done when all results are known
        self.operation = Operation(0, departed, "")  # of this replica, by the number of its departure
        self.on_stream = stream_of(delta)
        self._step, self._feedback, self._buffers, self._given = outer, feedback, buffers, given
        remembers = feedback is not None or bool(fragment.filters)  # these keep state on the fragment's device
        self._inputs = [delta.to(fragment.device) if remembers else delta]  # of each filter, and last of the codec
        self._signal: Tensor | None = None
        self._whole: Tensor | None = None  # the whole estimate, for filters or an outer step that need it
        self._sent: Tensor | None = None  # the decoded own packet, for filters
        self._finite = True
        self.compares, self._evidence = False, 0  # see `alike`
        self.compared: Callable[[], None] | None = None  # waits for all digests of the anchor, and compares them
        self.sample, self.unlike = b"", False  # of frozen parameters; whether that of another replica differs

    @property
    def alike(self) -> bool:
        """Whether the round has `compares` set and every replica's decoded delta equals this one's, which needs the same data on all."""
        return self.compares and self._evidence >= LEAST_EVIDENCE

    def _compare(self, mean: Tensor, own: Tensor) -> None:
        self._evidence += int(own.count_nonzero())
        self.compares = bool(((mean - own).abs() <= 1e-6 * own.abs()).all())  # a mean of three equal values may round

    def signal(self, begin: int, end: int) -> Tensor:
        """The values to encode for a range; valid until the next call."""
        coded = self._coded()[begin:end]
        if self._feedback is None:
            return coded
        if self._signal is None or self._signal.numel() < end - begin:
            self._buffers.give(self._signal)
            self._signal = self._buffers.floats(end - begin, coded.device)
        return self._feedback.signal(
            coded, part_in_fp32(self.fragment.feedback, begin, end), self._signal[: end - begin]
        )

    def settle(self, begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
        """Take the mean of a range, and compute its results."""
        end, filters = begin + mean.numel(), self.fragment.filters
        if self.compares:
            self._compare(mean, sent().to(mean.device))
        if filters:
            self._sent = self._room(self._sent, mean.device)
            self._sent[begin:end] = sent()
        if self._feedback:
            if not self.feedback:
                self.feedback = self._like(self.fragment.feedback)
            before, after = part_in_fp32(self.fragment.feedback, begin, end), part_in_fp32(self.feedback, begin, end)
            here = self.fragment.device
            mean = self._feedback.settle(self._coded()[begin:end], sent().to(here), mean.to(here), before, after)
            store(after, self.feedback, begin, end)
        if self._given is not None:
            return
        together = mean.device == self.fragment.anchor.device
        if self._step is not None and self._step.elementwise and together and not filters:
            self._stepped(self._step, begin, end, mean)
        else:
            self._whole = self._room(self._whole, mean.device)
            self._whole[begin:end].copy_(mean)

    def finish(self) -> bool:
        """Called after the last range. Returns whether the anchor is finite."""
        if self._whole is not None:
            estimate, fragment = self._whole, self.fragment
            if self._sent is not None:
                states, inputs = fragment.filtered, self._inputs
                estimate, self.filtered = settled(fragment.filters, states, inputs, self._sent, estimate, self.feedback)
            if self._step is None:
                self.anchor = estimate
                self._whole = None if estimate is self._whole else self._whole
            else:
                here = estimate.to(fragment.anchor.device)
                self.anchor, after = self._step.step(fragment.anchor, here, in_fp32(fragment.state))
                self.outer = {name: value.to(fragment.state[name].dtype) for name, value in after.items()}
            self._check(self.anchor)
        return self._finite and self.anchor is not None

    def keep_own_state(self) -> None:
        """The round is good without this replica's delta: feedback and filters keep what that would have made NaN or infinite."""
        for kept, made in zip((self.fragment.feedback, *self.fragment.filtered), (self.feedback, *self.filtered)):
            for name, value in made.items():
                value.copy_(torch.where(torch.isfinite(value), value, kept[name]))

    def close(self) -> None:
        """Release the buffers that only the exchange needed."""
        self._buffers.give(self._signal, self._whole, self._sent)
        self._signal = self._whole = self._sent = None

    def wait(self) -> None:
        """Wait until the round has arrived. Raises the error of the exchange."""
        self.arrival.result()

    def commit(self) -> None:
        """Replace the fragment's state by the round's results. Without an outer step the anchor stays, and the estimate is released."""
        fragment, swap = self.fragment, self._buffers.swap
        assert self.anchor is not None
        if self._step is None:
            self._buffers.give(self.anchor)
        elif fragment.disk is None:
            swap([fragment.anchor, *fragment.state.values()], [self.anchor, *self.outer.values()])
            fragment.anchor, fragment.state = self.anchor, self.outer
        else:
            self._overwrite({**fragment.state, "": fragment.anchor}, {**self.outer, "": self.anchor})
        if fragment.disk is None:
            swap(fragment.feedback.values(), self.feedback.values())
            fragment.feedback = self.feedback
        else:
            self._overwrite(fragment.feedback, self.feedback)
        swap(fragment.exchange.values(), self.exchange.values())
        swap(fragment.aggregate.values(), self.aggregate.values())
        fragment.exchange, fragment.aggregate = self.exchange, self.aggregate
        fragment.policy, fragment.filtered = self.policy, self.filtered
        self._over()

    def discard(self) -> None:
        """Leave the fragment unchanged, and release the round's results."""
        fragment = self.fragment
        made = (self.outer, self.feedback, self.exchange, self.aggregate)
        kept = (fragment.state, fragment.feedback, fragment.exchange, fragment.aggregate)
        self._buffers.swap(
            [self.anchor, *(tensor for state in made for tensor in state.values())],
            [tensor for state in kept for tensor in state.values()],
        )
        self._over()

    def _overwrite(self, kept: State, by: State) -> None:
        """Write the values `by` over those on disk."""
        for name, value in by.items():
            kept[name].copy_(value)
        self._buffers.give(*by.values())

    def _over(self) -> None:
        if self.delta is not self.fragment.own:  # if a round takes a whole period, the delta is needed longer
            self._buffers.give(self.delta)
        self.fragment.flight = None

    def _coded(self) -> Tensor:
        """The values to encode, before feedback: the delta, or the output of the filters, which run once."""
        if len(self._inputs) == 1 and self.fragment.filters:
            self._inputs = said(self.fragment.filters, self.fragment.filtered, self._inputs[0])
        return self._inputs[-1]

    def _room(self, room: Tensor | None, device: torch.device) -> Tensor:
        return self._buffers.floats(self._inputs[0].numel(), device) if room is None else room

    def _stepped(self, outer: Outer, begin: int, end: int, mean: Tensor) -> None:
        if self.anchor is None:
            self.anchor, self.outer = self._buffers.like(self.fragment.anchor), self._like(self.fragment.state)
        moved = self.anchor[begin:end]
        before, after = part_in_fp32(self.fragment.state, begin, end), part_in_fp32(self.outer, begin, end)
        outer.step_into(self.fragment.anchor[begin:end], mean, before, moved, after)
        store(after, self.outer, begin, end)
        self._check(moved)

    def _check(self, moved: Tensor) -> None:
        # A sum of squares may overflow for finite values; only then each value is checked.
        if not bool(torch.isfinite(torch.dot(moved, moved))):
            self._finite &= bool(torch.isfinite(moved).all())

    def _like(self, state: State) -> dict[str, Tensor]:
        return {name: self._buffers.like(kept) for name, kept in state.items()}


def in_state_dtype(state: State, strategy: Strategy, anchor: Tensor) -> State:
    """`state` with those tensors in the strategy's `state_dtype` that have a value for each parameter of `anchor`."""
    if strategy.state_dtype == "fp32":
        return state
    return {name: kept.to(torch.bfloat16) if kept.numel() == anchor.numel() else kept for name, kept in state.items()}


def in_fp32(state: State) -> State:
    """`state` in fp32: what is in fp32 itself, copies of the rest."""
    return {name: kept.float() for name, kept in state.items()}


def part_in_fp32(state: State, begin: int, end: int) -> State:
    """Elements `begin` … `end` of `state` in fp32: views of what is in fp32, copies of the rest."""
    return {name: kept[begin:end].float() for name, kept in state.items()}


def store(values: State, into: State, begin: int, end: int) -> None:
    """Round `values` to elements `begin` … `end` of `into`: to nearest, ties to even, so to the same bits on all machines."""
    for name, value in values.items():
        if into[name].dtype != value.dtype:
            into[name][begin:end].copy_(value)


def stays_on_device(strategy: Strategy) -> bool:
    """Whether the rounds of `strategy` stay on the device of the model.

    >>> from thinwire import streaming_diloco, streaming_sign
    >>> stays_on_device(streaming_sign(anchors="device")), stays_on_device(streaming_diloco(anchors="device"))
    (True, False)
    """
    plain = isinstance(strategy.exchange, Direct) and isinstance(strategy.aggregate, Mean) and not strategy.filters
    decides = isinstance(strategy.policy, Deciding)  # it measures values on the host
    return strategy.anchors == "device" and plain and not decides and whole_anywhere(strategy.codec)


def stream_of(values: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which other threads' work on the device of `values` follows what this thread has queued there."""
    return partial(torch.cuda.stream, torch.cuda.current_stream(values.device)) if values.is_cuda else nullcontext


def first_state(strategy: Strategy, fragment: Fragment, index: int, rank: int, size: int) -> FragmentState:
    """A replica's first state of `fragment`."""
    parts = [local(p.detach()) for _, p in fragment.parameters]
    device = parts[0].device if strategy.anchors == "device" else CPU
    anchor = torch.cat([part.reshape(-1).to(device, torch.float32) for part in parts])
    feedback = in_state_dtype(strategy.feedback.init(anchor.numel()), strategy, anchor) if strategy.feedback else {}
    codec = strategy.codec.fitted(fragment.shapes)
    strategy.aggregate.check(size)
    memory = strategy.exchange.init(codec, anchor.numel(), rank, size)
    aggregated = strategy.aggregate.init(strategy.exchange.owns(codec, anchor.numel(), rank, size), size)
    filters = tuple(one.fitted(codec, anchor.numel(), size) for one in strategy.filters)
    filtered = tuple(one.init(anchor.numel()) for one in filters)
    policy, state = strategy.policy.init(codec), in_state_dtype(strategy.outer.init(anchor), strategy, anchor)
    guard = strategy.guard.init() if strategy.guard and strategy.guards else {}
    held = FragmentState(
        fragment, index, anchor, state, feedback, codec, memory, aggregated, policy, filters, filtered, guard
    )
    if strategy.anchors == "disk":
        held.move_to_disk()
    return held
