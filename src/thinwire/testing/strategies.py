"""Tests laws 1, 3, 5, 6 and 7 of a whole strategy, on a toy model in threads."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from thinwire.comm import CountedGroup, Group, Ledger, run_threads
from thinwire.replica import Replica
from thinwire.strategy import Strategy
from thinwire.testing.codecs import law
from thinwire.testing.toy import (
    Journey,
    Shuffled,
    agreed,
    batch,
    inner_step,
    journey,
    own,
    same_bits,
    still,
    toy,
    validation,
    weighs,
    weights,
)  # fmt: skip

Saved = dict[str, Any]
Seen = tuple[list[Tensor], str]
REPLICAS = 3


def all_agree(journeys: Sequence[Journey]) -> None:
    """Law 1: anchors and outer state have the same bits on all replicas, after every step and at the end."""
    first = journeys[0]
    for other in journeys[1:]:
        for step, (a, b) in enumerate(zip(first.agreed, other.agreed, strict=True), 1):
            different = [
                name
                for name in a.keys() | b.keys()
                if name not in a or name not in b or not same_bits(a[name], b[name])
            ]
            law(not different, f"step {step}: {different} differ between replicas")
        alike = all(same_bits(first.final_agreed[name], other.final_agreed[name]) for name in first.final_agreed)
        law(alike and same_bits(first.final, other.final), "after finishing replicas differ")


def replicas_agree(strategy: Strategy, replicas: int = REPLICAS) -> None:
    """Law 1; and training moves the anchors and keeps them finite."""
    journeys = journey(strategy, replicas, steps=8)
    all_agree(journeys)
    law(all(torch.isfinite(one.final).all() for one in journeys), "training ends in values that are not finite")
    law(not same_bits(journeys[0].final, weights(toy())), "training changes nothing")


def a_refused_round_changes_nothing(strategy: Strategy, replicas: int = REPLICAS) -> None:
    """Law 3: after a gradient that is not finite, all replicas drop the round, stay finite, and agree. An aggregate that tolerates one such
    replica continues without it.
    """

    def poison(replica: Replica, step: int) -> None:
        if step == 4 and cast(Group, replica.group).rank == replicas - 1:
            next(p for p in replica.model.parameters() if p.grad is not None).grad.fill_(math.nan)  # type: ignore[union-attr]

    journeys = journey(strategy, replicas, steps=14, before_step=poison)
    refused = all(one.heard("refused") for one in journeys) or strategy.aggregate.tolerates(replicas)
    law(refused, "a value that is not finite is not refused on all replicas")
    all_agree(journeys)
    law(all(torch.isfinite(one.final).all() for one in journeys), "what was refused is in the weights")


def predicted_is_counted(strategy: Strategy, replicas: int = REPLICAS) -> None:
    """Law 5: predicted, reported and counted bytes are equal; if they are a `bound`, no more are counted than predicted."""
    counted_as_predicted(strategy, *counted(strategy, replicas, steps=8))


def counted(strategy: Strategy, replicas: int, **plan: Any) -> tuple[list[Journey], list[Ledger]]:
    """A run with its bytes counted."""
    ledgers = [Ledger() for _ in range(replicas)]
    return journey(strategy, replicas, wrap=lambda group: CountedGroup(group, ledgers[group.rank]), **plan), ledgers


def counted_as_predicted(strategy: Strategy, journeys: Sequence[Journey], ledgers: Sequence[Ledger]) -> None:
    """Law 5 for a run that is over."""
    replicas, fragments = len(journeys), strategy.partition.fragments(toy())
    for rank, (one, ledger) in enumerate(zip(journeys, ledgers)):
        departures = one.heard("depart")
        predicted = sum(weighs(strategy, e, fragments[e["fragment"]], replicas, rank) for e in departures)
        sent = ledger.sent("packet")
        law(
            sent == predicted or (bool(strategy.bound) and sent <= predicted),
            f"replica {rank}: {predicted} bytes predicted, {sent} sent",
        )


def resumed_is_never_stopped(
    strategy: Strategy, replicas: int = 2, steps: int = 9, saved_at: Iterable[int] | None = None
) -> None:
    """Law 6: a run that is saved after any step (or the steps `saved_at`), with rounds in flight, and loaded has the same bits up to its end."""
    whole = run_threads(replicas, lambda group: whole_run(strategy, group, steps), timeout=600.0)
    for at in range(steps + 1) if saved_at is None else saved_at:

        def replica(group: Group, at: int = at) -> list[Seen]:
            return resumed_run(strategy, group, whole[group.rank][0][at], steps, steps)

        for rank, again in enumerate(run_threads(replicas, replica, timeout=600.0)):
            for later, ((tensors, facts), (due, said)) in enumerate(zip(again, whole[rank][1][at:], strict=True), at):
                same = facts == said and all(same_bits(a, b) for a, b in zip(tensors, due, strict=True))
                law(same, f"saved at step {at} and resumed, replica {rank} differs at step {later}")


def any_order_of_arrival(strategy: Strategy, replicas: int = REPLICAS, calm: Sequence[Journey] | None = None) -> None:
    """Law 7: a second run has the same bits, and so has a run with late messages in any order. `calm` is an earlier run, under a clock that
    stands still.
    """
    calm = calm or journey(strategy, replicas, steps=8, clock=still)
    steps = len(calm[0].weights)
    for a, b in zip(calm, journey(strategy, replicas, steps=steps, clock=still, wrap=lambda group: Shuffled(group, 0))):
        alike = all(same_bits(left, right) for left, right in zip(a.weights, b.weights, strict=True))
        law(alike and same_bits(a.final, b.final), "the order of arrival changes the weights")


LAWS = (
    replicas_agree, a_refused_round_changes_nothing, predicted_is_counted, resumed_is_never_stopped, any_order_of_arrival,
)  # fmt: skip


# ---- save and resume


def frozen(value: Any) -> Any:
    """A deep copy of `value`."""
    return copy.deepcopy(value)


def save(replica: Replica) -> Saved:
    tensors, facts = replica.state()
    return {
        "model": frozen(replica.model.state_dict()),
        "optimizer": frozen(replica.optimizer.state_dict()),
        "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
        "facts": json.loads(json.dumps(facts)),
    }


def load(replica: Replica, saved: Saved) -> None:
    replica.model.load_state_dict(saved["model"])  # it copies the values
    replica.optimizer.load_state_dict(frozen(saved["optimizer"]))
    replica.load_state({name: tensor.clone() for name, tensor in saved["tensors"].items()}, saved["facts"])


def fingerprint(replica: Replica) -> tuple[list[Tensor], str]:
    """Weights, anchors, outer state and feedback; and the facts (step, rounds, flights) as JSON."""
    return [weights(replica.model), *(t for _, t in sorted(agreed(replica).items())), *held_back(replica)], json.dumps(
        replica.state()[1]
    )


def held_back(replica: Replica) -> list[Tensor]:
    return [
        t.clone()
        for name, t in sorted(replica.state()[0].items())
        if {"feedback", "exchange", "filter"} & set(name.split("."))
    ]


def whole_run(strategy: Strategy, group: Group, steps: int) -> tuple[list[Saved], list[Seen], int]:
    """The checkpoints and fingerprints after every step, 0 included, and the largest number of fragments in flight at once."""
    model = toy()
    optimizer = own(strategy, model)
    saved, seen, most = list[Saved](), list[Seen](), 0
    with Replica(strategy, model, optimizer, group, validation=validation(model), clock=still) as replica:
        saved.append(save(replica))
        seen.append(fingerprint(replica))
        for step in range(1, steps + 1):
            inner_step(model, optimizer, *batch(0, group.rank, step))
            saved.append(save(replica))
            seen.append(fingerprint(replica))
            most = max(most, len(replica.in_flight))
    return saved, [*seen, fingerprint(replica)], most


def resumed_run(strategy: Strategy, group: Group, saved: Saved, until: int, steps: int) -> list[Seen]:
    """Load `saved` into new objects, and train up to step `until`. Returns the fingerprints after each step, and after the run's end."""
    model = toy(seed=99)
    optimizer = own(strategy, model)
    seen = list[Seen]()
    with Replica(strategy, model, optimizer, group, validation=validation(model), clock=still) as replica:
        load(replica, saved)
        seen.append(fingerprint(replica))
        for step in range(replica.step + 1, until + 1):
            inner_step(model, optimizer, *batch(0, group.rank, step))
            seen.append(fingerprint(replica))
    return [*seen, fingerprint(replica)] if until == steps else seen
