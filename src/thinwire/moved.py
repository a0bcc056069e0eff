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
from thinwire.feedback import Feedback
from thinwire.outer import Elementwise, Outer, State


@dataclass(frozen=True)
class Present:
    """A fragment as it is when a round departs: what the round may read."""

    delta: Tensor  # flat fp32, as all of them
    anchor: Tensor
    outer: State
    feedback: State  # on the CPU


class Moved:
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
        self._step, self._feedback, self._buffers, self._given = outer, feedback, buffers, given
        self._delta = present.delta.cpu() if feedback else present.delta  # what is held back lies in host memory
        self._signal: Tensor | None = None
        self._whole: Tensor | None = None  # the estimate, for an outer step that needs all of it
        self._finite = True

    def signal(self, begin: int, end: int) -> Tensor:
        """What to encode for a range; lent until the next call."""
        delta = self._delta[begin:end]
        if self._feedback is None:
            return delta
        if self._signal is None or self._signal.numel() < end - begin:
            self._buffers.give(*self._tensors(self._signal))
            self._signal = self._buffers.floats(end - begin)
        return self._feedback.signal(delta, _range(self.present.feedback, begin, end), self._signal[: end - begin])

    def settle(self, begin: int, mean: Tensor, sent: Callable[[], Tensor]) -> None:
        """Take the mean of a range."""
        end = begin + mean.numel()
        if self._feedback:
            if not self.feedback:
                self.feedback = self._like(self.present.feedback)
            before, after = _range(self.present.feedback, begin, end), _range(self.feedback, begin, end)
            mean = self._feedback.settle(self._delta[begin:end], sent(), mean, before, after)
        if self._given is not None:
            return
        if isinstance(self._step, Elementwise) and self.present.anchor.device.type == "cpu":
            self._stepped(self._step, begin, end, mean)
        elif self._step is None:
            self.anchor = self._buffers.floats(self._delta.numel()) if self.anchor is None else self.anchor
            self._check(self.anchor[begin:end].copy_(mean))
        else:
            self._whole = self._buffers.floats(self._delta.numel()) if self._whole is None else self._whole
            self._whole[begin:end].copy_(mean)

    def finish(self) -> bool:
        """After the last range: whether the anchor is finite."""
        if self._whole is not None and self._step is not None:
            anchor = self.present.anchor
            self.anchor, self.outer = self._step.step(anchor, self._whole.to(anchor.device), self.present.outer)
            self._check(self.anchor)
        return self._finite and self.anchor is not None

    def close(self) -> None:
        """Give back what was for the way only."""
        self._buffers.give(*self._tensors(self._signal), *self._tensors(self._whole))
        self._signal = self._whole = None

    def give_back(self) -> None:
        """Of a round that is dropped: nobody needs what it made."""
        self._buffers.swap(
            [*self._tensors(self.anchor), *self.outer.values(), *self.feedback.values()],
            [*self.present.outer.values(), *self.present.feedback.values()],
        )
        self.anchor, self.outer, self.feedback = None, {}, {}

    def _stepped(self, outer: Elementwise, begin: int, end: int, mean: Tensor) -> None:
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
