"""What drives a replica: one driver a kind of group and signal, chosen once (`replica.choose`).

A driver decides what happens around an inner step. There are four: `DeltaDriver` (deltas in a fixed group), `GradientDriver`
(gradients in a fixed group), `GossipDriver` (weights among neighbours in a fixed group) and `ElasticDriver` (deltas among replicas that
come and go). No driver tests for another, and none imports another.
A new one (asynchronous) is a class with the methods of `Driver` in a file of its own, and one line in `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.data_ledger import LeasedReader
from thinwire.pieces.partition import Fragment, check_optimizer, check_sharding
from thinwire.pieces.schedule import Calendar
from thinwire.runtime.fragment_state import FragmentState
from thinwire.runtime.loop_warnings import silent, warned
from thinwire.runtime.module_state import reshard
from thinwire.runtime.saved_state import restore, saved
from thinwire.strategy import Strategy
from thinwire.types import Observer


@dataclass
class Training:
    """What a replica trains and how far it is. `Replica` and its driver share it; only the main thread changes it.

    strategy, model, optimizer   as the caller gave them
    observe, clock               who hears events; seconds, from any beginning
    calendar                     which fragments depart after which inner step
    tokens                       of an inner step, for a delta's weight; None: all deltas count alike
    fragments                    what the replica holds for each fragment; filled in by the driver
    step                         inner steps taken
    stopping                     all replicas stop at this step
    reader                       where an elastic replica is in its data; None: it sees to its data itself
    stall_seconds                how long the main thread has waited for landings
    trained                      tokens in all, if they are counted
    clipped                      deltas that the guard has clipped
    """

    strategy: Strategy
    model: nn.Module
    optimizer: torch.optim.Optimizer
    observe: Observer
    clock: Callable[[], float]
    calendar: Calendar
    tokens: float | None = None
    fragments: list[FragmentState] = field(default_factory=list)
    step: int = 0
    stopping: bool = False
    stall_seconds: float = 0.0
    clipped: int = 0
    reader: LeasedReader | None = None
    trained: float = 0.0

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        observe: Observer,
        clock: Callable[[], float],
        tokens: float | None,
        sharded: bool,
    ) -> tuple[Training, list[Fragment]]:
        """With the fragments that the strategy makes of the model, for the driver to hold. Raises `ModelError`, `ConfigurationError`."""
        check_optimizer(model, optimizer)
        strategy.check_inner(optimizer, sharded=sharded)
        check_sharding(model, whole_replica=sharded)
        fragments = strategy.partition.fragments(model)
        calendar = Calendar(
            strategy.schedule, len(fragments), lambda _: float(max(group["lr"] for group in optimizer.param_groups))
        )
        calendar.departs(0)  # offsets for another number of fragments are refused here
        strategy.warm_up()
        return cls(strategy, model, optimizer, observe, clock, calendar, tokens), fragments

    def warn(self, message: str) -> None:
        self.observe("warning", self.step, message=message)

    def guard(self, fragment: FragmentState, delta: Tensor, steps: float) -> None:
        """Clip `delta`, which is about to depart with what so many inner steps have trained, if the strategy's guard finds it out of all
        proportion; the first time this is said, and every time it is counted.
        """
        guard = self.strategy.guard
        clipped = fragment.guarded(guard, delta, steps / self.strategy.schedule.every) if guard else None
        if clipped is None:
            return
        norm, judged = clipped
        if not self.clipped:
            message = (
                f"a delta of this replica had the norm {norm:.3g}, where {judged.limit:.3g} was the most to expect after those before: it is "
                "clipped, as others like it will be (events `clipped`). Look at batch, learning rate and machine; guard=None does not clip"
            )
            (warned if self.observe is silent else self.observe)("warning", self.step, message=message)
        self.clipped += 1
        self.observe(
            "clipped", self.step, fragment=fragment.index, round=fragment.rounds, norm=norm, limit=judged.limit
        )

    def weights(self) -> list[Tensor]:
        """Each trained parameter, this rank's part of it, in the order of the fragments."""
        return [part for fragment in self.fragments for part, _ in fragment.slices(fragment.anchor)]

    def load_anchors(self) -> None:
        """Overwrite the model's parameters with the anchors."""
        for fragment in self.fragments:
            fragment.load_into_parameters(fragment.anchor)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What every driver saves: tensors of all fragments, and facts for JSON."""
        facts = {
            "step": self.step,
            "rounds": [fragment.rounds for fragment in self.fragments],
            "since": [fragment.since for fragment in self.fragments],
            "flights": {str(f.index): [f.flight.number, f.flight.departed] for f in self.fragments if f.flight},
            "calendar": self.calendar.facts(),
        }
        if self.tokens is not None:
            departed = {str(f.index): f.flight.trained for f in self.fragments if f.flight}
            facts["tokens"] = [self.trained, [fragment.counted for fragment in self.fragments], departed]
        return saved(self.fragments), facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`, but for flights. Raises `CheckpointError`."""
        self.step = facts["step"]
        self.calendar.load(facts["calendar"])
        restore(self.fragments, tensors, facts, self.strategy.outer)
        self.trained, counted, _ = facts.get("tokens", (0.0, [0.0] * len(self.fragments), {}))
        for fragment, tokens in zip(self.fragments, counted):
            fragment.counted = tokens


class Driver(Protocol):
    """What `Replica` asks of its driver, all on the main thread.

    A driver that has been made has met the others, and the model holds the weights that training starts from. It owns whatever threads and
    buffers its rounds need, and reads and changes `training`. It hears of an inner step after `training.step` has counted it.
    """

    training: Training

    def before_inner_step(self, closure: bool) -> None:
        """The gradients are there and the optimizer has not stepped; `closure`: it was given one. May be called twice before one step.

        Does nothing, unless a driver exchanges gradients: what counts is the parameters after the step.
        """
        return

    def after_inner_step(self) -> None:
        """The optimizer has stepped. May set `training.step` ahead, where others are."""

    def finish(self, keep_seconds: float) -> bool:
        """Land what is in the air, and exchange what was trained since. The face loads the anchors after it.

        False: this replica goes on giving the final state to others, `keep_seconds` at most, until `close`. Raises `LinkError`.
        """

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that is needed beside model and inner optimizer to go on bit for bit: tensors, and facts for JSON. Does not wait."""

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from `state()`. Collective in a fixed group. Raises `CheckpointError`, `DisagreementError`."""

    def anchors(self) -> Sequence[Tensor]:
        """The agreed weights, flat and in fp32, a copy for each fragment."""
        return [fragment.anchor.clone() for fragment in self.training.fragments]

    def load_anchors(self) -> None:
        """Overwrite the model's parameters with the agreed weights, where these may differ."""
        self.training.load_anchors()

    def request_stop(self) -> None:
        """Have all replicas stop at one step: `training.stopping` becomes true then."""

    def close(self) -> None:
        """End the driver's threads. Idempotent. A fixed group stays open."""


@contextmanager
def anchored(driver: Driver) -> Iterator[None]:
    """Within: the model holds the agreed weights. After: the replica's own again, bit for bit."""
    training = driver.training
    own = [(part, part.clone()) for part in training.weights()]
    reshard(training.model)
    driver.load_anchors()
    try:
        yield
    finally:
        reshard(training.model)
        for part, kept in own:
            part.copy_(kept)
