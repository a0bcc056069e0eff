"""Checkpoints of replicas of unequal speed, and how all resume from checkpoints of different steps.

Each replica saves after its own inner steps, so two checkpoints are not of the same moment. The agreed state is that in the checkpoint
of the syncer's replica. The others load it and keep their own progress: a delta that was counted there is removed from the parameters,
one that was not counted stays in them and is sent with the next delta. So nothing is counted twice. A resumed run is not bit for bit the run that was
never stopped. If the syncer's checkpoint is older than another replica's, the rounds between them are lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group, gather
from thinwire.comm.state_transfer import give, take
from thinwire.decoupled.syncer import Syncer
from thinwire.errors import CheckpointError
from thinwire.pieces.outer import Outer
from thinwire.runtime.fragment_state import FragmentState
from thinwire.runtime.saved_state import restore, saved
from thinwire.types import State


@dataclass(frozen=True)
class Departed:
    """A delta that was sent to the syncer: the inner steps of its departure and of its start, and the time of its departure."""

    number: int
    delta: Tensor
    step: int
    since: int
    begin: float
    before: State  # the feedback before this delta


def state_of(
    states: Sequence[FragmentState], flying: Mapping[int, Departed], step: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a replica, to be saved."""
    tensors = saved(states)
    for index, flight in flying.items():
        tensors |= {f"{index}.delta": flight.delta}
        tensors |= {f"{index}.before.{name}": kept for name, kept in flight.before.items()}
    facts = {
        "step": step,
        "rounds": [one.rounds for one in states],
        "since": [one.since for one in states],
        "flights": {str(index): [flight.number, flight.since] for index, flight in flying.items()},
    }
    return tensors, facts


def state_of_syncer(syncer: Syncer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The agreed state, to be saved. Deltas that wait for a round are no part of it; they depart again after a resume."""
    tensors: dict[str, Tensor] = {}
    for index, one in enumerate(syncer.agreed):
        kept = {"anchor": one.anchor} | {f"state.{name}": value for name, value in one.state.items()}
        kept |= {} if one.residual is None else {"residual": one.residual}
        tensors |= {f"agreed.{index}.{name}": value.clone() for name, value in kept.items()}
    due = dict(syncer.counted)
    for _, fragment, rank in syncer.given:
        due[rank, fragment] -= 1
    return tensors, {
        "versions": [one.version for one in syncer.agreed],
        "counted": [[rank, fragment, number] for (rank, fragment), number in due.items()],
    }


def load_syncer(syncer: Syncer, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Load the state from `state_of_syncer`. Raises `CheckpointError`."""
    for index, one in enumerate(syncer.agreed):
        kept = _under(f"agreed.{index}.", tensors)
        if kept["anchor"].numel() != one.anchor.numel():
            raise CheckpointError(
                f"fragment {index} has {kept['anchor'].numel()} elements in the checkpoint, {one.anchor.numel()} in this model; resume with the "
                "run's own model."
            )
        one.anchor, one.state, one.version = kept["anchor"], _under("state.", kept), facts["versions"][index]
        one.residual = kept.get("residual")
    syncer.counted = {(rank, fragment): number for rank, fragment, number in facts["counted"]}


@dataclass(frozen=True)
class Resumed:
    """The point at which a replica resumes: the number of its next delta, by fragment; all replicas' inner steps; and the lost rounds."""

    numbers: list[int]
    taken: list[int]
    gone: int


@torch.no_grad()
def resume(
    group: Group, host: int, syncer: Syncer | None, states: Sequence[FragmentState],
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], outer: Outer,
) -> Resumed:  # fmt: skip
    """Collective: all replicas take over the agreed state of the syncer's checkpoint. Raises `CheckpointError`, `LinkError`."""
    restore(states, tensors, facts, outer)
    if syncer is not None:
        if "agreed" not in facts:
            raise CheckpointError(
                f"the checkpoint of replica {host} has no syncer; resume each replica with its own rank."
            )
        load_syncer(syncer, tensors, facts["agreed"])
        agreed, said = state_of_syncer(syncer)
        give(group, [rank for rank in range(group.size) if rank != host], agreed, said)
    else:
        most = sum(8 + len(one.state) for one in states) * 4 * max(one.anchor.numel() for one in states) + (1 << 20)
        agreed, said = take(group, host, most)
    due = {(rank, fragment): number for rank, fragment, number in said["counted"]}
    gone = 0
    for one in states:
        kept = _under(f"agreed.{one.index}.", agreed)
        number, since = facts["flights"].get(str(one.index), (0, 0))
        flight = tensors.get(f"{one.index}.delta")
        counted = flight is not None and number < due.get((group.rank, one.index), 0)
        departed = one.anchor - flight if flight is not None and counted else one.anchor
        if flight is not None and not counted:
            one.since, one.feedback = since, _under(f"{one.index}.before.", tensors)
        gone += max(0, one.rounds - said["versions"][one.index])
        one.anchor, one.state, one.rounds = kept["anchor"], _under("state.", kept), said["versions"][one.index]
        one.carry_over(departed)
    taken = [int(json.loads(told)) for told in gather(group, json.dumps(facts["step"]).encode(), 32, "resume")]
    return Resumed([due.get((group.rank, one.index), 0) for one in states], taken, gone)


def _under(prefix: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
