"""Checkpoints of replicas of unequal speed, and how all resume from checkpoints of different steps.

Each replica saves after its own inner steps, so two checkpoints are not of the same moment. The agreed state is that in the checkpoint
of the syncer's replica. The others load it and keep their own progress: a delta that was counted there is removed from the parameters,
one that was not counted stays in them and is sent with the next delta. So nothing is counted twice. A resumed run is not bit for bit the run that was
never stopped.

After a stop all checkpoints fit. After a kill one may be older than the syncer's: its replica takes the anchors, drops what feedback had held back,
which was in the later deltas, and continues after the last inner step that was counted. If one is newer, the rounds between them are lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.comm.state_transfer import give, take
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.saved_state import restore, tensors_to_save, under
from thinwire.drivers.unequal.syncer import Syncer
from thinwire.errors import CheckpointError
from thinwire.pieces.outer import Outer
from thinwire.types import State


@dataclass(frozen=True)
class Departed:
    """A delta that was sent to the syncer: the inner steps of its departure and of its start, the time of its departure, its tokens."""

    number: int
    delta: Tensor
    step: int
    since: int
    begin: float
    before: State  # the feedback before this delta
    tokens: float


def state_of(
    states: Sequence[FragmentState], flying: Mapping[int, Departed], step: int, numbers: Sequence[int], tokens: Sequence[float],
) -> tuple[dict[str, Tensor], dict[str, Any]]:  # fmt: skip
    """The state of a replica, to be saved. `numbers` are those of its next deltas, `tokens` those since the last ones."""
    tensors = tensors_to_save(states)
    for index, flight in flying.items():
        tensors |= {f"{index}.delta": flight.delta}
        tensors |= {f"{index}.before.{name}": kept for name, kept in flight.before.items()}
    facts = {
        "step": step,
        "rounds": [one.rounds for one in states],
        "since": [one.since for one in states],
        "numbers": list(numbers),
        "tokens": list(tokens),
        "flights": {str(index): [flight.number, flight.since, flight.tokens] for index, flight in flying.items()},
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
        "counted": [[*key, number, syncer.until.get(key, 0)] for key, number in due.items()],
        "weights": [[*key, weight] for key, weight in syncer.weights.items()],
    }


def load_syncer(syncer: Syncer, host: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None) -> None:
    """Load the state from `state_of_syncer`, which was on replica `host`. Raises `CheckpointError`."""
    if facts is None:
        raise CheckpointError(f"the checkpoint of replica {host} has no syncer; resume each replica with its own rank.")
    for index, one in enumerate(syncer.agreed):
        kept = under(f"agreed.{index}.", tensors)
        if kept["anchor"].numel() != one.anchor.numel():
            raise CheckpointError(
                f"fragment {index} has {kept['anchor'].numel()} elements in the checkpoint, {one.anchor.numel()} in this model; resume with the "
                "run's own model."
            )
        one.anchor, one.state, one.version = kept["anchor"], under("state.", kept), facts["versions"][index]
        one.residual = kept.get("residual")
    syncer.counted = {(rank, fragment): number for rank, fragment, number, *_ in facts["counted"]}
    syncer.until = {(rank, fragment): until for rank, fragment, _, until in facts["counted"]}
    syncer.weights = {(fragment, rank): weight for fragment, rank, weight in facts["weights"]}


@dataclass(frozen=True)
class SiteRecord:
    """What the global server's checkpoint says of a site, by fragment: the model as the site knows it, its version, the next update."""

    known: list[Tensor]
    versions: list[int]
    counted: list[int]


@dataclass(frozen=True)
class Resumed:
    """The point at which a replica resumes: its inner step, by fragment the number of its next delta and its tokens; and the lost rounds."""

    step: int
    numbers: list[int]
    tokens: list[float]
    gone: int


@torch.no_grad()
def resume(
    group: Group, host: int, syncer: Syncer | None, states: Sequence[FragmentState],
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], outer: Outer, anew: Collection[int] = (),
) -> Resumed:  # fmt: skip
    """Collective: all replicas take over the agreed state of `syncer`, which is loaded, on `host`. Fragments `anew` begin at the anchor.

    Raises `CheckpointError`, `LinkError`.
    """
    restore(states, tensors, facts, outer)
    if syncer is not None:
        agreed, said = state_of_syncer(syncer)
        said["anew"] = sorted(anew)
        give(group, [rank for rank in range(group.size) if rank != host], agreed, said)
    else:
        most = sum(8 + len(one.state) for one in states) * 4 * max(one.anchor.numel() for one in states) + (1 << 20)
        agreed, said = take(group, host, most)
    due = {fragment: (number, until) for rank, fragment, number, until in said["counted"] if rank == group.rank}
    step, gone, tokens = int(facts["step"]), 0, [float(count) for count in facts["tokens"]]
    dropped = []
    for one in states:
        kept, version = under(f"agreed.{one.index}.", agreed), said["versions"][one.index]
        number, until = due.get(one.index, (0, 0))
        gone += max(0, one.rounds - version)
        departed, back = _before(one, number, tensors, facts)
        tokens[one.index] += back
        one.anchor, one.state, one.rounds = kept["anchor"], under("state.", kept), version
        if number > facts["numbers"][one.index] or one.index in said["anew"]:  # its training is in the anchor
            one.load_into_parameters(one.anchor)
            one.feedback = {name: torch.zeros_like(kept) for name, kept in one.feedback.items()}  # so is this
            dropped.append(one)
            step = max(step, until)
        else:
            one.carry_over(departed)
    for one in dropped:
        one.since, tokens[one.index] = step, 0.0
    return Resumed(step, [due.get(one.index, (0, 0))[0] for one in states], tokens, gone)


def _before(
    one: FragmentState, due: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """The parameters without the training that was not counted. A delta in flight that was not counted is put back: with its tokens."""
    number, since, tokens = facts["flights"].get(str(one.index), (0, 0, 0.0))
    flight = tensors.get(f"{one.index}.delta")
    if flight is None:
        return one.base, 0.0
    if number < due:
        return one.base - flight, 0.0
    one.since, one.feedback = since, under(f"{one.index}.before.", tensors)
    return one.base, tokens
