"""One round of one fragment: what the fragment may become.

The next anchor, outer state and feedback are written range by range, while a range is in the cache, into spare buffers;
the fragment keeps its own until `commit`. Nothing here touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Outer
from thinwire.pieces.transforms import said, settled
from thinwire.state import State

if TYPE_CHECKING:
    from thinwire.runtime.fragment_state import FragmentState


class RoundUpdate:
    """A round of the fragment `of`, which stays as it is until `commit` or `discard`; then the round is over.

    Which round: `delta` departs after inner step `departed` as round `number`, coded by `codec`, and is to land after step `lands`.

    What it makes, written beside training: `anchor` (next, stepped by `outer`; without, the estimate itself), `outer` and `feedback`
    (their next states), `filtered`, `exchange` and `policy`. Flat and fp32; all but anchor and outer state on the CPU.

    What was said and when, known once `wait` returns: `good` (else it is to be discarded), `refused_by` (replicas whose delta was not
    finite), `stop` (some replica asked to stop), `nbytes` that this replica sends, and times on the replica's clock.

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
        self.anchor = given
        self.outer: State = {}
        self.feedback: State = {}
        self.filtered: tuple[State, ...] = ()
        self.exchange, self.policy = of.exchange, of.policy
        self.good = self.stop = False
        self.refused_by: tuple[int, ...] = ()
        self.nbytes = 0
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
        of.feedback, of.exchange, of.policy, of.filtered = self.feedback, self.exchange, self.policy, self.filtered
        self._over()

    def discard(self) -> None:
        """Leave the fragment as it is: nobody needs what the round made."""
        self._buffers.swap(
            [*self._tensors(self.anchor), *self.outer.values(), *self.feedback.values(), *self.exchange.values()],
            [*self.of.state.values(), *self.of.feedback.values(), *self.of.exchange.values()],
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
