"""What a replica holds for one fragment: its anchor, its outer state, its round in the air; and how that is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import CheckpointError
from thinwire.flight import Flight
from thinwire.outer import Outer, State
from thinwire.partition import Fragment, local

_OUTER, _DEVIATION_OUTER, _FEEDBACK = "outer.", "deviation_outer.", "feedback."


@dataclass
class Held:
    """A fragment and what this replica remembers of it."""

    fragment: Fragment
    index: int
    anchor: Tensor  # flat fp32; replaced, never changed in place
    state: State
    feedback: State  # what the codec held back; on the CPU
    codec: Codec  # the strategy's, fitted to this fragment
    rounds: int = 0
    flight: Flight | None = None
    # eager updates only: what this replica is ahead of the anchor
    deviation: Tensor | None = None
    deviation_state: State = field(default_factory=dict)
    own: Tensor | None = None  # the own delta that is in the air

    @property
    def base(self) -> Tensor:
        """Where the fragment's inner steps started."""
        return self.anchor if self.deviation is None else self.anchor + self.deviation

    def slices(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter's local part with its slice of `flat`, in the same shape."""
        begin = 0
        for _, parameter in self.fragment.parameters:
            part = local(parameter.detach())
            yield part, flat[begin : begin + part.numel()].view(part.shape)
            begin += part.numel()

    @torch.no_grad()
    def snapshot(self) -> Tensor:
        """The replica's own parameters, flat, in fp32, where the anchor lives."""
        flat = torch.empty_like(self.anchor)
        for part, into in self.slices(flat):
            into.copy_(part)
        return flat

    @torch.no_grad()
    def load_into_parameters(self, flat: Tensor) -> None:
        """Overwrite the replica's own parameters."""
        for part, values in self.slices(flat):
            part.copy_(values)

    def tensors(self) -> dict[str, Tensor]:
        """What to save. A flight is kept as the delta that departed."""
        named = {"anchor": self.anchor, "deviation": self.deviation, "own": self.own}
        named |= {_OUTER + name: value for name, value in self.state.items()}
        named |= {_DEVIATION_OUTER + name: value for name, value in self.deviation_state.items()}
        named |= {_FEEDBACK + name: value for name, value in self.feedback.items()}
        named |= {"delta": self.flight.delta if self.flight else None}
        return {name: value for name, value in named.items() if value is not None}

    def load(self, named: Mapping[str, Tensor], outer: Outer) -> None:
        """Take over what was saved, but for the flight. Raises `CheckpointError` if it is for another model or `outer`."""
        saved = named["anchor"].numel() if "anchor" in named else 0
        if saved != self.anchor.numel():
            raise CheckpointError(
                f"fragment {self.fragment.name!r} has {saved} elements in the checkpoint, {self.anchor.numel()} in "
                "this model; resume with the run's own model."
            )
        here = {name: tensor.to(self.anchor.device) for name, tensor in named.items()}
        state = {name.removeprefix(_OUTER): value for name, value in here.items() if name.startswith(_OUTER)}
        due = outer.init(here["anchor"])
        if state.keys() != due.keys():
            raise CheckpointError(
                f"fragment {self.fragment.name!r} has the outer state {sorted(state)} in the checkpoint, {outer} "
                f"keeps {sorted(due)}; resume with the run's own strategy."
            )
        feedback = {
            name.removeprefix(_FEEDBACK): value.cpu() for name, value in named.items() if name.startswith(_FEEDBACK)
        }
        if feedback.keys() != self.feedback.keys():
            raise CheckpointError(
                f"fragment {self.fragment.name!r} has the feedback {sorted(feedback)} in the checkpoint, this strategy "
                f"keeps {sorted(self.feedback)}; resume with the run's own strategy."
            )
        self.feedback = feedback
        self.anchor, self.state = here["anchor"], state
        self.deviation, self.own = here.get("deviation"), here.get("own")
        self.deviation_state = {
            name.removeprefix(_DEVIATION_OUTER): value
            for name, value in here.items()
            if name.startswith(_DEVIATION_OUTER)
        }
