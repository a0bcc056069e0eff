"""A fragment: its present state (`FragmentState`), and what departs of it in a round (`RoundState`).

Only methods of `FragmentState` touch the model. What a round makes of it is in drivers/flight.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, in_full
from thinwire.codecs.base import whole_anywhere
from thinwire.exchange import Direct
from thinwire.exchange.buffers import CPU
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import Filter
from thinwire.pieces.guard import Guard, Judged, norm_of
from thinwire.pieces.merge import Landing
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, held_by, local
from thinwire.pieces.policy import Deciding, Policy
from thinwire.strategy import Strategy
from thinwire.types import State

DROPPED = -1


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
    flight: Any | None = None  # the `Flight` of its present round (drivers/flight.py)
    own: Tensor | None = None  # if a round takes a whole period: the own delta in flight
    disk: Any | None = None  # DiskTensors, which hold anchor, outer state and feedback; None: they are in memory
    deviation: Tensor | None = None  # eager updates only: the difference between this replica and the anchor
    deviation_state: State = field(default_factory=dict)
    touched: Callable[[], None] = field(default=lambda: None, repr=False)  # called before parameters are used

    @property
    def dropped(self) -> bool:
        """Whether its last delta was dropped."""
        return self.since == DROPPED

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
        self, strategy: Strategy, delta: Tensor, step: int, *, outer: Outer | None = None, given: Tensor | None = None,
        number: int | None = None, codec: Codec | None = None, tokens: float = 0.0, partial: bool = False,
    ) -> RoundState:  # fmt: skip
        """The round in which `delta` departs after inner step `step`. Its number is the next one or `number`, and its codec the one that is
        due or `codec`. See `RoundState`.
        """
        number = self.rounds if number is None else number
        return RoundState(
            self, delta, outer, strategy.feedback, number, step, step + strategy.schedule.delay,
            codec or self.due(strategy.policy, number), tokens, partial, given,
        )  # fmt: skip

    def load_into_parameters(self, flat: Tensor) -> None:
        """Overwrite the replica's own parameters."""
        for part, values in self.slices(flat):
            part.copy_(values)

    def landing(self, anchor: Tensor, delta: Tensor | None = None, residual: Tensor | None = None) -> list[Landing]:
        """Its parameters, for `Merge.on_land`."""
        flats = (flat for flat in (self.anchor, anchor, delta, residual) if flat is not None)
        return [Landing(*values) for values in self.aligned(*flats)]

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


@dataclass(frozen=True, eq=False)
class RoundState:
    """What departs of a fragment. It is made once, at the departure, and no later step changes it.

    Args:
        fragment: the fragment, as it is until the round is committed.
        delta: anchor − parameters, flat and in fp32; for gossip the parameters.
        outer: the outer step; None: the estimate itself is the result.
        feedback: keeps what the codec loses; None: it is lost.
        number: of the fragment's round.
        departed, lands: the inner steps after which it departs, and after which it must land.
        codec: of the packets, the same on all replicas.
        tokens: trained until the departure, if they are counted.
        partial: whether a parameter of this replica had no gradient.
        given: the next anchor, if it is known beforehand (one replica alone).
    """

    fragment: FragmentState
    delta: Tensor
    outer: Outer | None
    feedback: Feedback | None
    number: int
    departed: int
    lands: int
    codec: Codec
    tokens: float = 0.0
    partial: bool = False
    given: Tensor | None = None


def in_state_dtype(state: State, strategy: Strategy, anchor: Tensor) -> State:
    """`state` with those tensors in the strategy's `state_dtype` that have a value for each parameter of `anchor`."""
    if strategy.state_dtype == "fp32":
        return state
    return {name: kept.to(torch.bfloat16) if kept.numel() == anchor.numel() else kept for name, kept in state.items()}


def stays_on_device(strategy: Strategy) -> bool:
    """Whether the rounds of `strategy` stay on the device of the model.

    >>> from thinwire import streaming_diloco, streaming_sign
    >>> stays_on_device(streaming_sign(anchors="device")), stays_on_device(streaming_diloco(anchors="device"))
    (True, False)
    """
    plain = isinstance(strategy.exchange, Direct) and isinstance(strategy.aggregate, Mean) and not strategy.filters
    decides = isinstance(strategy.policy, Deciding)  # it measures values on the host
    return strategy.anchors == "device" and plain and not decides and whole_anywhere(strategy.codec)


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
