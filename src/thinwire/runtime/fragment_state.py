"""What a replica holds for one fragment: its anchor, its outer state, its round in the air; and how that is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, in_full
from thinwire.errors import CheckpointError
from thinwire.exchange import Buffers
from thinwire.pieces.outer import Outer
from thinwire.pieces.partition import Fragment, local
from thinwire.pieces.policy import Policy
from thinwire.pieces.transforms import Filter
from thinwire.runtime.update import RoundUpdate
from thinwire.state import State
from thinwire.strategy import Strategy

_OUTER, _DEVIATION_OUTER, _FEEDBACK, _EXCHANGE = "outer.", "deviation_outer.", "feedback.", "exchange."
_FILTER, _POLICY = "filter.", "policy."  # the former with its place

_PASSING = ("delta", "own", "deviation", _DEVIATION_OUTER.rstrip("."))

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
    policy: State = field(default_factory=dict)  # what the strategy's policy knows of this fragment; on the CPU
    filters: tuple[Filter, ...] = ()  # as well
    filtered: tuple[State, ...] = ()  # what each remembers; on the CPU
    rounds: int = 0
    since: int = 0  # the inner step after which nothing trained has departed; DROPPED if what departed was dropped
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
        """Each parameter's local part with its slice of `flat`, in the same shape."""
        begin = 0
        for _, parameter in self.fragment.parameters:
            part = local(parameter.detach())
            yield part, flat[begin : begin + part.numel()].view(part.shape)
            begin += part.numel()

    @torch.no_grad()
    def snapshot(self, into: Tensor) -> Tensor:
        """The replica's own parameters, flat, in fp32, where the anchor lives."""
        for part, slice_ in self.slices(into):
            slice_.copy_(part)
        return into

    @torch.no_grad()
    def delta(self, into: Tensor) -> Tensor:
        """base − parameters, in one pass."""
        for (part, slice_), (_, base) in zip(self.slices(into), self.slices(self.base)):
            torch.sub(base, part.to(base.device), out=slice_)
        return into

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

    @torch.no_grad()
    def load_into_parameters(self, flat: Tensor) -> None:
        """Overwrite the replica's own parameters."""
        for part, values in self.slices(flat):
            part.copy_(values)

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

    def tensors(self) -> dict[str, Tensor]:
        """What to save. A flight is kept as the delta that departed."""
        named = {"anchor": self.anchor, "deviation": self.deviation, "own": self.own}
        named |= {_OUTER + name: value for name, value in self.state.items()}
        named |= {_DEVIATION_OUTER + name: value for name, value in self.deviation_state.items()}
        named |= {_FEEDBACK + name: value for name, value in self.feedback.items()}
        named |= {_EXCHANGE + name: value for name, value in self.exchange.items()}
        for number, state in enumerate(self.filtered):
            named |= {f"{_FILTER}{number}.{name}": value for name, value in state.items()}
        named |= {_POLICY + name: value for name, value in self.policy.items()}
        if self.flight and self.flight.delta is not self.own:  # one tensor is saved once, as `own`
            named |= {"delta": self.flight.delta}
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
        state = _under(_OUTER, here)
        self._check("outer state", outer, state, outer.init(here["anchor"]))
        feedback, exchange, policy = (_under(prefix, named) for prefix in (_FEEDBACK, _EXCHANGE, _POLICY))
        self._check("feedback", "this strategy", feedback, self.feedback)
        self._check("memory of the exchange", "this strategy", exchange, self.exchange)
        filtered = [_under(f"{_FILTER}{number}.", named) for number in range(len(self.filters))]
        for one, saved_state, due in zip(self.filters, filtered, self.filtered):
            self._check("memory of a filter", one, saved_state, due)
        self._check("choices of the policy", "this strategy", policy, self.policy)
        self.feedback, self.exchange, self.policy, *filtered = (
            {name: value.cpu() for name, value in kept.items()} for kept in (feedback, exchange, policy, *filtered)
        )
        self.filtered = tuple(filtered)
        self.anchor, self.state = here["anchor"], state
        self.deviation, self.own = here.get("deviation"), here.get("own")
        self.deviation_state = _under(_DEVIATION_OUTER, here)

    def _check(self, what: str, whose: object, saved: State, due: State) -> None:
        """Names and sizes. Raises `CheckpointError`."""
        if {n: t.numel() for n, t in saved.items()} != {n: t.numel() for n, t in due.items()}:
            raise CheckpointError(
                f"fragment {self.fragment.name!r} has the {what} {_sizes(saved)} in the checkpoint, {whose} keeps "
                f"{_sizes(due)}; resume with the run's own strategy, and each replica with its own checkpoint."
            )


def hold(strategy: Strategy, fragment: Fragment, index: int, rank: int, size: int) -> FragmentState:
    """What a replica holds for `fragment` at first."""
    parts = [local(p.detach()) for _, p in fragment.parameters]
    device = torch.device("cpu") if strategy.anchors == "host" else parts[0].device
    anchor = torch.cat([part.reshape(-1).to(device, torch.float32) for part in parts])
    feedback = strategy.feedback.init(anchor.numel()) if strategy.feedback else {}
    codec = strategy.codec.fitted(fragment.shapes)
    memory = strategy.exchange.init(codec, anchor.numel(), rank, size)
    filters = tuple(one.fitted(codec, anchor.numel(), size) for one in strategy.filters)
    filtered = tuple(one.init(anchor.numel()) for one in filters)
    policy, state = strategy.policy.init(codec), strategy.outer.init(anchor)
    return FragmentState(fragment, index, anchor, state, feedback, codec, memory, policy, filters, filtered)


def saved(pieces: Sequence[FragmentState]) -> dict[str, Tensor]:
    """What to save of all fragments."""
    return {f"{piece.index}.{name}": value for piece in pieces for name, value in piece.tensors().items()}


def restore(
    pieces: Sequence[FragmentState], tensors: Mapping[str, Tensor], facts: Mapping[str, Any], outer: Outer
) -> None:
    """Take over what was `saved`, how many rounds each fragment has seen, and since when it was trained. Raises `CheckpointError`."""
    rounds = facts["rounds"]
    if len(rounds) != len(pieces):
        raise CheckpointError(
            f"the checkpoint has {len(rounds)} fragments, this strategy makes {len(pieces)}; resume with the run's own strategy."
        )
    for piece, number, since in zip(pieces, rounds, facts.get("since", [0] * len(pieces))):
        piece.load(_under(f"{piece.index}.", tensors), outer)
        piece.rounds, piece.since = number, since


def _under(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def _sizes(state: State) -> str:
    return ", ".join(f"{name} of {value.numel()}" for name, value in sorted(state.items())) or "nothing"


def passing(name: str) -> bool:
    """Whether a tensor of this name in `saved` is there at times only."""
    return name.split(".")[1] in _PASSING
