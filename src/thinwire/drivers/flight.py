"""A round in flight: from what departs of a fragment to what the fragment becomes.

A flight writes the next anchor, outer state and feedback into spare buffers, range by range, while a range is in the cache. The
fragment's own buffers stay until `commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.drivers.fragment import RoundState
from thinwire.drivers.monitor import Operation
from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.filters import said, settled
from thinwire.pieces.outer import Outer
from thinwire.types import State

if TYPE_CHECKING:
    from thinwire.drivers.token_weights import TokenCount

LEAST_EVIDENCE = 16  # values that are not zero: fewer may be equal by chance, as signs


class Flight:
    """A round in flight: what it sends, what arrives, and what the fragment becomes if all goes well.

    It does not change the fragment before `commit`; `commit` or `discard` ends the round.

    round                        what departs
    anchor                       the next one: `outer` of the estimate, or the estimate itself if there is no outer step
    outer, feedback, filtered,   the next states, flat and in fp32; all except those of outer step and feedback are on the CPU
    exchange, aggregate, policy
    share, counts                the factor of the delta; counts the tokens of all replicas, which tell it
    arrival                      done when all results are known
    good                         if it is false, the round must be discarded
    refused_by                   replicas whose delta was not finite
    stop, partial                whether a replica asked to stop; whether on some replica a parameter had no gradient
    unlike                       whether frozen parameters of another replica differ
    nbytes, nbytes_sent          the bytes that this replica expects to send, and those that it sent
    begin, end                   seconds at its departure and at its arrival; queued_seconds, transfer_seconds: see `Round.times`
    landing, stall_seconds       when training began to wait for it, and for how long
    on_stream                    a context in which work on the delta's device follows what this thread has queued there
    """

    good: bool
    stop: bool
    partial: bool
    refused_by: tuple[int, ...]
    nbytes: int
    nbytes_sent: int
    begin: float
    end: float
    queued_seconds: float
    transfer_seconds: float
    landing: float
    stall_seconds: float

    def __init__(
        self, round_: RoundState, buffers: Buffers, share: float = 1.0, counts: TokenCount | None = None
    ) -> None:
        fragment, delta = round_.fragment, round_.delta
        self.round, self.fragment, self.codec, self.anchor = round_, fragment, round_.codec, round_.given
        self.share, self.counts = share, counts
        self.outer: State = {}
        self.feedback: State = {}
        self.filtered: tuple[State, ...] = ()
        self.exchange, self.aggregate, self.policy = fragment.exchange, fragment.aggregate, fragment.policy
        self.arrival: Future[None] = Future()
        self.operation = Operation(0, round_.departed, "")  # of this replica, by the number of its departure
        self.on_stream = stream_of(delta)
        self._buffers = buffers
        remembers = round_.feedback is not None or bool(fragment.filters)  # these keep state on the fragment's device
        self._inputs = [delta.to(fragment.device) if remembers else delta]  # of each filter, and last of the codec
        self._signal: Tensor | None = None
        self._whole: Tensor | None = None  # the whole estimate, for filters or an outer step that need it
        self._sent: Tensor | None = None  # the decoded own packet, for filters
        self._finite = True
        self.compares, self._evidence = False, 0  # see `alike`
        self.unlike = False
        fragment.flight, fragment.rounds = self, max(fragment.rounds, round_.number + 1)

    @property
    def decodes_own(self) -> bool:
        """Whether `settle` needs this replica's own values."""
        return self.round.feedback is not None or bool(self.fragment.filters) or self.compares

    @property
    def alike(self) -> bool:
        """Whether the round has `compares` set and every replica's decoded delta equals this one's, which needs the same data on all."""
        return self.compares and self._evidence >= LEAST_EVIDENCE

    def _compare(self, mean: Tensor, own: Tensor) -> None:
        self._evidence += int(own.count_nonzero())
        self.compares = bool(((mean - own).abs() <= 1e-6 * own.abs()).all())  # a mean of three equal values may round

    def signal(self, begin: int, end: int) -> Tensor:
        """The values to encode for a range: the filtered delta with what feedback kept, times the share; valid until the next call."""
        if self.counts is not None:  # waits for the others' counts
            self.share, self.counts = self.counts.share(), None
        coded = self._coded()[begin:end]
        if self.round.feedback is not None:
            coded = self._with_feedback(self.round.feedback, begin, end, coded)
        return coded if self.share in (0.0, 1.0) else coded * self.share

    def _with_feedback(self, feedback: Feedback, begin: int, end: int, coded: Tensor) -> Tensor:
        if self._signal is None or self._signal.numel() < end - begin:
            self._buffers.give(self._signal)
            self._signal = self._buffers.floats(end - begin, coded.device)
        return feedback.signal(coded, part_in_fp32(self.fragment.feedback, begin, end), self._signal[: end - begin])

    def settle(self, begin: int, mean: Tensor, own: Tensor | None) -> None:
        """Take the mean of a range, and what this replica's own packet holds there, and compute the range's results."""
        end, filters, feedback, outer = (
            begin + mean.numel(),
            self.fragment.filters,
            self.round.feedback,
            self.round.outer,
        )
        if own is not None and self.share not in (0.0, 1.0):
            own = own / self.share
        if self.compares and own is not None:
            self._compare(mean, own.to(mean.device))
        if filters:
            assert own is not None, "the round decodes_own"
            self._sent = self._room(self._sent, mean.device)
            self._sent[begin:end] = own
        if feedback:
            assert own is not None, "the round decodes_own"
            if not self.feedback:
                self.feedback = self._like(self.fragment.feedback)
            before, after = part_in_fp32(self.fragment.feedback, begin, end), part_in_fp32(self.feedback, begin, end)
            here = self.fragment.device
            mean = feedback.settle(self._coded()[begin:end], own.to(here), mean.to(here), before, after)
            store(after, self.feedback, begin, end)
        if self.round.given is not None:
            return
        together = mean.device == self.fragment.anchor.device
        if outer is not None and outer.elementwise and together and not filters:
            self._stepped(outer, begin, end, mean)
        else:
            self._whole = self._room(self._whole, mean.device)
            self._whole[begin:end].copy_(mean)

    def finish(self) -> bool:
        """Called after the last range. Returns whether the anchor is finite."""
        if self._whole is not None:
            estimate, fragment, outer = self._whole, self.fragment, self.round.outer
            if self._sent is not None:
                states, inputs = fragment.filtered, self._inputs
                estimate, self.filtered = settled(fragment.filters, states, inputs, self._sent, estimate, self.feedback)
            if outer is None:
                self.anchor = estimate
                self._whole = None if estimate is self._whole else self._whole
            else:
                here = estimate.to(fragment.anchor.device)
                self.anchor, after = outer.step(fragment.anchor, here, in_fp32(fragment.state))
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
        if self.round.outer is None:
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
        if self.round.delta is not self.fragment.own:  # if a round takes a whole period, the delta is needed longer
            self._buffers.give(self.round.delta)
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


def stream_of(values: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which other threads' work on the device of `values` follows what this thread has queued there."""
    return partial(torch.cuda.stream, torch.cuda.current_stream(values.device)) if values.is_cuda else nullcontext
