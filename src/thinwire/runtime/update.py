"""What a round makes of a fragment, beside what is.

The next anchor, outer state and feedback are written range by range, while a range is in the cache, into spare buffers;
the present ones stay until the round has proved good. Nothing here touches the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.exchange import Buffers
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.outer import Outer
from thinwire.pieces.transforms import Filter, said, settled
from thinwire.state import State


@dataclass(frozen=True)
class Present:
    """A fragment as it is when a round departs: what the round may read."""

    delta: Tensor  # flat fp32, as all of them
    anchor: Tensor
    outer: State
    feedback: State  # on the CPU, as all that follows
    filters: tuple[Filter, ...] = ()
    filtered: tuple[State, ...] = ()  # of each filter


class RoundUpdate:
    """The fragment after a round of `present`, stepped by `outer`; without, `anchor` is the estimate itself.

    `given` is the next anchor where that is known beforehand (one replica alone).
    """

    def __init__(
        self,
        present: Present,
        outer: Outer | None,
        feedback: Feedback | None,
        buffers: Buffers,
        given: Tensor | None = None,
    ) -> None:
        self.present, self.anchor = present, given
        self.outer: State = {}
        self.feedback: State = {}
        self.filtered: tuple[State, ...] = ()
        self._step, self._feedback, self._buffers, self._given = outer, feedback, buffers, given
        remembers = feedback is not None or bool(present.filters)  # and that in host memory
        self._inputs = [
            present.delta.cpu() if remembers else present.delta
        ]  # what each filter gets; last what is coded
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
        return self._feedback.signal(coded, _range(self.present.feedback, begin, end), self._signal[: end - begin])

    def settle(self, begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
        """Take the mean of a range."""
        end, filters = begin + mean.numel(), self.present.filters
        if filters:
            self._sent = self._room(self._sent)
            self._sent[begin:end] = sent()
        if self._feedback:
            if not self.feedback:
                self.feedback = self._like(self.present.feedback)
            before, after = _range(self.present.feedback, begin, end), _range(self.feedback, begin, end)
            mean = self._feedback.settle(self._coded()[begin:end], sent(), mean, before, after)
        if self._given is not None:
            return
        if (
            self._step is not None
            and self._step.elementwise
            and self.present.anchor.device.type == "cpu"
            and not filters
        ):
            self._stepped(self._step, begin, end, mean)
        else:
            self._whole = self._room(self._whole)
            self._whole[begin:end].copy_(mean)

    def finish(self) -> bool:
        """After the last range: whether the anchor is finite."""
        if self._whole is not None:
            estimate, present = self._whole, self.present
            if self._sent is not None:
                states, inputs = present.filtered, self._inputs
                estimate, self.filtered = settled(present.filters, states, inputs, self._sent, estimate, self.feedback)
            if self._step is None:
                self.anchor = estimate
                self._whole = None if estimate is self._whole else self._whole
            else:
                here = estimate.to(present.anchor.device)
                self.anchor, self.outer = self._step.step(present.anchor, here, present.outer)
            self._check(self.anchor)
        return self._finite and self.anchor is not None

    def close(self) -> None:
        """Give back what was for the way only."""
        for room in (self._signal, self._whole, self._sent):
            self._buffers.give(*self._tensors(room))
        self._signal = self._whole = self._sent = None

    def give_back(self) -> None:
        """Of a round that is dropped: nobody needs what it made."""
        self._buffers.swap(
            [*self._tensors(self.anchor), *self.outer.values(), *self.feedback.values()],
            [*self.present.outer.values(), *self.present.feedback.values()],
        )
        self.anchor, self.outer, self.feedback, self.filtered = None, {}, {}, ()

    def _coded(self) -> Tensor:
        """What is to be coded, before feedback: the delta, or what the filters make of it, once."""
        if len(self._inputs) == 1 and self.present.filters:
            self._inputs = said(self.present.filters, self.present.filtered, self._inputs[0])
        return self._inputs[-1]

    def _room(self, room: Tensor | None) -> Tensor:
        return self._buffers.floats(self._inputs[0].numel()) if room is None else room

    def _stepped(self, outer: Outer, begin: int, end: int, mean: Tensor) -> None:
        if self.anchor is None:
            self.anchor, self.outer = self._buffers.like(self.present.anchor), self._like(self.present.outer)
        moved = self.anchor[begin:end]
        before, after = _range(self.present.outer, begin, end), _range(self.outer, begin, end)
        outer.step_into(self.present.anchor[begin:end], mean, before, moved, after)
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
