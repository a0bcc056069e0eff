"""Saves and restores the states of all fragments: names of tensors, and checks of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from thinwire.drivers.fragment import FragmentState
from thinwire.errors import CheckpointError
from thinwire.pieces.outer import Outer
from thinwire.types import State

_OUTER, _DEVIATION_OUTER, _FEEDBACK, _EXCHANGE = "outer.", "deviation_outer.", "feedback.", "exchange."
_AGGREGATE, _FILTER, _POLICY, _GUARD = "aggregate.", "filter.", "policy.", "guard."  # a filter's index follows

_PASSING = ("delta", "own", "deviation", _DEVIATION_OUTER.rstrip("."), _GUARD.rstrip("."))


def tensors_to_save(fragments: Sequence[FragmentState]) -> dict[str, Tensor]:
    """The tensors of all fragments to save."""
    return {f"{one.index}.{name}": value for one in fragments for name, value in _tensors(one).items()}


def names(one: FragmentState) -> list[str]:
    """The names of its parameters, in the order in which its tensors hold their values."""
    return [name.replace("_orig_mod.", "") for name, _ in one.fragment.parameters]


def restore(
    fragments: Sequence[FragmentState], tensors: Mapping[str, Tensor], facts: Mapping[str, Any], outer: Outer
) -> None:
    """Restore the `saved` tensors, the number of rounds of each fragment, and the step of its last departure. Raises `CheckpointError`."""
    rounds = facts["rounds"]
    if len(rounds) != len(fragments):
        raise CheckpointError(
            f"the checkpoint has {len(rounds)} fragments, this strategy makes {len(fragments)}; resume with the run's own strategy."
        )
    # drivers of unequal speed compare the strategy, and save no names
    parameters = facts.get("parameters", [names(one) for one in fragments])
    for one, there, number, since in zip(fragments, parameters, rounds, facts["since"]):
        _load(one, under(f"{one.index}.", tensors), there, outer)
        one.rounds, one.since = number, since


def delta_in_flight(fragment: FragmentState, tensors: Mapping[str, Tensor]) -> Tensor:
    """A copy of the `saved` delta of a fragment's flight; `own` if a round takes a whole period. Raises `CheckpointError`."""
    name = f"{fragment.index}.delta"
    delta = tensors[name].to(fragment.anchor.device, copy=True) if name in tensors else fragment.own
    saved = 0 if delta is None else delta.numel()
    if delta is None or saved != fragment.anchor.numel():
        raise CheckpointError(
            f"fragment {fragment.fragment.name!r} has a round in flight in the checkpoint, whose delta has {saved} elements there and "
            f"{fragment.anchor.numel()} in this model; save all tensors of `state()`, and load them all."
        )
    return delta


def _tensors(fragment: FragmentState) -> dict[str, Tensor]:
    """The tensors of a fragment to save. A flight is saved as the delta that departed."""
    named = {"anchor": fragment.anchor, "deviation": fragment.deviation, "own": fragment.own}
    named |= {_OUTER + name: value for name, value in fragment.state.items()}
    named |= {_DEVIATION_OUTER + name: value for name, value in fragment.deviation_state.items()}
    named |= {_FEEDBACK + name: value for name, value in fragment.feedback.items()}
    named |= {_EXCHANGE + name: value for name, value in fragment.exchange.items()}
    named |= {_AGGREGATE + name: value for name, value in fragment.aggregate.items()}
    for number, state in enumerate(fragment.filtered):
        named |= {f"{_FILTER}{number}.{name}": value for name, value in state.items()}
    named |= {_POLICY + name: value for name, value in fragment.policy.items()}
    named |= {_GUARD + name: value for name, value in fragment.guard.items()}
    if (
        fragment.flight and fragment.flight.round.delta is not fragment.own
    ):  # the same tensor is saved only once, as `own`
        named |= {"delta": fragment.flight.round.delta}
    return {name: value for name, value in named.items() if value is not None}


def _load(fragment: FragmentState, named: Mapping[str, Tensor], parameters: Sequence[str], outer: Outer) -> None:
    """Restore a fragment, without its flight. Raises `CheckpointError` if the state belongs to another model or `outer`."""
    saved = named["anchor"].numel() if "anchor" in named else 0
    if saved != fragment.anchor.numel():
        raise CheckpointError(
            f"fragment {fragment.fragment.name!r} has {saved} elements in the checkpoint, {fragment.anchor.numel()} in "
            "this model; resume with the run's own model."
        )
    for there, own in zip_longest(parameters, names(fragment)):
        if there != own:
            raise CheckpointError(
                f"fragment {fragment.fragment.name!r} has the parameter {there} in the checkpoint where this model has {own}; resume with the "
                "run's own model."
            )
    here = {name: tensor.to(fragment.anchor.device) for name, tensor in named.items()}
    state = under(_OUTER, here)
    _check(fragment, "outer state", outer, state, outer.init(here["anchor"]))
    prefixes = (_FEEDBACK, _EXCHANGE, _AGGREGATE, _POLICY)
    feedback, exchange, aggregate, policy = (under(prefix, named) for prefix in prefixes)
    _check(fragment, "feedback", "this strategy", feedback, fragment.feedback)
    _check(fragment, "memory of the exchange", "this strategy", exchange, fragment.exchange)
    _check(fragment, "memory of the aggregate", "this strategy", aggregate, fragment.aggregate)
    filtered = [under(f"{_FILTER}{number}.", named) for number in range(len(fragment.filters))]
    for one, saved_state, due in zip(fragment.filters, filtered, fragment.filtered):
        _check(fragment, "memory of a filter", one, saved_state, due)
    _check(fragment, "choices of the policy", "this strategy", policy, fragment.policy)
    guard = under(_GUARD, named)
    if guard:  # older checkpoints have no guard; then it starts without norms
        _check(fragment, "norms of the guard", "this strategy", guard, fragment.guard)
        fragment.guard = {name: value.cpu() for name, value in guard.items()}
    fragment.feedback = {name: value.to(fragment.device) for name, value in feedback.items()}
    fragment.exchange, fragment.aggregate, fragment.policy, *filtered = (
        {name: value.cpu() for name, value in kept.items()} for kept in (exchange, aggregate, policy, *filtered)
    )
    fragment.filtered = tuple(filtered)
    fragment.anchor, fragment.state = here["anchor"], state
    fragment.deviation = here.get("deviation")
    fragment.own = here["own"].clone() if "own" in here else None  # eager updates change it in place
    fragment.deviation_state = under(_DEVIATION_OUTER, here)
    if fragment.disk:
        fragment.move_to_disk()


def _check(fragment: FragmentState, what: str, whose: object, saved: State, due: State) -> None:
    """Compare names and sizes. Raises `CheckpointError`."""
    if {n: t.numel() for n, t in saved.items()} != {n: t.numel() for n, t in due.items()}:
        raise CheckpointError(
            f"fragment {fragment.fragment.name!r} has the {what} {_sizes(saved)} in the checkpoint, {whose} keeps "
            f"{_sizes(due)}; resume with the run's own strategy, and each replica with its own checkpoint."
        )


def passing(name: str) -> bool:
    """Whether a tensor of this name in `saved` exists only at times."""
    return name.split(".")[1] in _PASSING


def under(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def _sizes(state: State) -> str:
    return ", ".join(f"{name} of {value.numel()}" for name, value in sorted(state.items())) or "nothing"
