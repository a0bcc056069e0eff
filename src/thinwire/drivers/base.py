"""The drivers of a replica: one for each kind of group and signal, chosen once (`replica.choose`).

A driver acts around an inner step. There are four: `DeltaDriver` (deltas in a fixed group), `GradientDriver` (gradients in a fixed
group), `GossipDriver` (weights among neighbours in a fixed group) and `ElasticDriver` (deltas in an elastic run). No driver tests for
another, and none imports another. A new driver is a class with the methods of `Driver` in its own file, and one line in `choose`.
Methods with their own loop (`methods`, `decoupled`) have no driver: they are `Attached` (drivers/attached.py) in place of a `Replica`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from thinwire.comm.group import Group
from thinwire.drivers.fragment import FragmentState
from thinwire.drivers.loop_warnings import silent, warned
from thinwire.drivers.model_buffers import FrozenWeights
from thinwire.drivers.module_state import reshard
from thinwire.drivers.optimizer_copies import WeightCopies
from thinwire.errors import ConfigurationError, ModelError
from thinwire.pieces.guard import Judged
from thinwire.pieces.inner import highest_rate
from thinwire.pieces.partition import Fragment, check_optimizer, check_sharding
from thinwire.pieces.schedule import Adaptive, Calendar
from thinwire.strategy import Strategy
from thinwire.types import Observer

if TYPE_CHECKING:
    from thinwire.data_ledger import LeasedReader


@dataclass
class Training:
    """The training of a replica: its model and its progress. `Replica` and its driver share it; only the main thread changes it.

    strategy, model, optimizer   as the caller gave them
    observe, clock               called with events; seconds, from any origin
    calendar                     the fragments that depart after each inner step
    tokens                       tokens of an inner step, for the weight of a delta; None: all deltas weigh 1
    fragments                    the state of each fragment; the driver fills it in
    step                         inner steps taken
    stopping                     all replicas stop at this step
    reader                       the position of an elastic replica in its data; None: the loop chooses its data itself
    stall_seconds                seconds that the main thread has waited for landings
    trained                      number of tokens so far, if they are counted
    clipped                      whether the guard has clipped a delta
    copies                       of the weights, inside the optimizer
    frozen                       the parameters that are not trained
    validation                   gives the model's losses on a few held-out batches; None: there are none
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
    clipped: bool = False
    reader: LeasedReader | None = None
    trained: float = 0.0
    validation: Callable[[], Sequence[float]] | None = None
    copies: WeightCopies = field(default_factory=lambda: WeightCopies([], []))
    frozen: FrozenWeights = field(default_factory=lambda: FrozenWeights(nn.Module()))

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        observe: Observer,
        clock: Callable[[], float],
        tokens: float | None,
        site: Group | None,
    ) -> tuple[Training, list[Fragment]]:
        """Make a `Training`, and the fragments of the model, whose states the driver makes. Raises `ModelError`, `ConfigurationError`."""
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                f"strategy: a {type(strategy).__name__} was given; a Strategy is needed, such as tw.streaming_sign()."
            )
        from thinwire.drivers.gradient_reducers import check_reducers  # needed once there is a model

        check_optimizer(model, optimizer)
        strategy.check_inner(optimizer, sharded=site is not None)
        check_sharding(model, whole_replica=site is not None)
        check_reducers(model, site)
        fragments = strategy.partition.fragments(model)
        if isinstance(strategy.schedule, Adaptive) and math.isnan(highest_rate(optimizer)):
            raise ConfigurationError(
                f"schedule={strategy.schedule!r} with a {type(optimizer).__name__} whose groups have no learning rate, which it follows; "
                "choose a schedule such as Every(100), or an optimizer with a rate."
            )
        calendar = Calendar(strategy.schedule, len(fragments), lambda _: highest_rate(optimizer))
        calendar.departs(0)  # refuses offsets for another number of fragments
        strategy.warm_up()
        parts = getattr(optimizer, "parts", [optimizer])
        copies = WeightCopies(parts, [p for group in optimizer.param_groups for p in group["params"]])
        frozen = FrozenWeights(model)
        training = cls(strategy, model, optimizer, observe, clock, calendar, tokens, copies=copies, frozen=frozen)
        return training, fragments

    def warn(self, message: str) -> None:
        """Warn by the observer, or by Python's `warnings` if there is none."""
        (warned if self.observe is silent else self.observe)("warning", self.step, message=message)

    def report_clipped(self, fragment: FragmentState, norm: float, judged: Judged) -> None:
        """Report that the guard has clipped a delta of this `norm`: an event, and the first time a warning."""
        if not self.clipped:
            self.warn(
                f"a delta of this replica had the norm {norm:.3g}, where {judged.limit:.3g} was the most to expect from earlier ones: it is "
                "clipped, and so are later ones (events `clipped`). Check batch, learning rate and machine; guard=None (--guard off) does not clip"
            )
        self.clipped = True
        self.observe(
            "clipped", self.step, fragment=fragment.index, round=fragment.rounds, norm=norm, limit=judged.limit
        )

    def weights(self) -> list[Tensor]:
        """This rank's part of each trained parameter, in the order of the fragments."""
        return [part for fragment in self.fragments for part in fragment.parts()]

    @property
    def keeps_own(self) -> bool:
        """Whether this replica holds what no other does: its training since the last rounds, or what it has not sent."""
        kept = (state for one in self.fragments for state in (one.feedback, one.exchange, one.aggregate, *one.filtered))
        return not self.strategy.exchanges_gradients or any(kept)

    def anchor_of_each(self) -> dict[int, Tensor]:
        """The anchors in the shapes of the parameters, by the id of a parameter."""
        return {
            id(parameter): values
            for fragment in self.fragments
            for (_, parameter), (_, values) in zip(fragment.fragment.parameters, fragment.slices(fragment.anchor))
        }

    def load_anchors(self) -> None:
        """Overwrite the model's parameters with the anchors."""
        for fragment in self.fragments:
            fragment.load_into_parameters(fragment.anchor)
            fragment.release()

    def at_anchors(self, holds: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether every parameter holds its anchor, in its own dtype."""
        at = all(holds(part, values) for one in self.fragments for part, values in one.slices(one.anchor))
        for fragment in self.fragments:
            fragment.release()
        return at

    def progress(self) -> tuple[int, ...]:
        """Numbers that change with each inner step, departure and landing."""
        return (self.step, *(2 * fragment.rounds + bool(fragment.flight) for fragment in self.fragments))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state that every driver saves: tensors of all fragments, and values for JSON."""
        from thinwire.drivers.saved_state import names, tensors_to_save

        facts = {
            "step": self.step,
            "rounds": [fragment.rounds for fragment in self.fragments],
            "since": [fragment.since for fragment in self.fragments],
            "parameters": [names(fragment) for fragment in self.fragments],
            "flights": {
                str(f.index): [f.flight.round.number, f.flight.round.departed] for f in self.fragments if f.flight
            },
            "calendar": self.calendar.facts(),
        }
        if self.copies.names:
            facts["copies"] = self.copies.names
        if self.tokens is not None:
            departed = {str(f.index): f.flight.round.tokens for f in self.fragments if f.flight}
            facts["tokens"] = [self.trained, [fragment.counted for fragment in self.fragments], departed]
        return tensors_to_save(self.fragments), facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`, without flights. Flights in the air are discarded when they arrive. Raises `CheckpointError`, `LinkError`."""
        from thinwire.drivers.saved_state import restore

        flights = [fragment.flight for fragment in self.fragments if fragment.flight]
        for flight in flights:
            flight.wait()
        for flight in flights:  # no round is left that could write into a delta among `tensors`
            flight.discard()
        self.step = facts["step"]
        self.calendar.load(facts["calendar"])
        self.copies.load(facts.get("copies", {}))
        restore(self.fragments, tensors, facts, self.strategy.outer)
        self.trained, counted, _ = facts.get("tokens", (0.0, [0.0] * len(self.fragments), {}))
        for fragment, tokens in zip(self.fragments, counted):
            fragment.counted = tokens


class Driver(Protocol):
    """The interface of a driver. `Replica` calls it on the main thread.

    When `join` returns, the driver has met the others, and the model holds the first weights of the training. The driver owns the
    threads and buffers of its rounds, and reads and changes `training`. It is called for an inner step after `training.step` has
    counted it.
    """

    training: Training
    uses_gradients: bool = False  # whether `before_inner_step` exchanges or replaces the gradients

    def join(self, resume: Callable[[], object]) -> None:
        """Called once, before the first inner step. `resume` may load a checkpoint.

        A driver of a fixed group meets the others when it is made, so this only calls `resume`. In an elastic run `resume` comes first:
        then only what has changed since the checkpoint is fetched from the others. Raises `LinkError`, and what `resume` raises; the driver
        is closed then.
        """
        try:
            resume()
        except BaseException:
            self.close()
            raise

    def before_inner_step(self, closure: bool) -> None:
        """Called when the gradients are computed and the optimizer has not stepped, perhaps twice for one step. `closure`: whether the
        optimizer was given one.

        Does nothing, unless the driver exchanges gradients; other drivers use the parameters after the step.
        """
        return

    def after_inner_step(self) -> None:
        """Called when the optimizer has stepped. May move `training.step` ahead, to the step of others."""

    def finish(self, keep_seconds: float) -> bool:
        """Land all flights, and exchange the training since then. `Replica` loads the anchors afterwards.

        Returns False if this replica continues to give the final state to others, for `keep_seconds` at most, until `close`. Raises
        `LinkError`.
        """

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state that is needed, beside model and inner optimizer, to resume bit for bit: tensors, and values for JSON. Does not wait."""

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `state()`. Collective in a fixed group. Raises `CheckpointError`, `DisagreementError`."""

    def anchors(self) -> Sequence[Tensor]:
        """Copies of the agreed weights, flat and in fp32, one for each fragment."""
        copies = []
        for fragment in self.training.fragments:
            copies.append(fragment.anchor.clone())
            fragment.release()
        return copies

    def load_anchors(self) -> None:
        """Overwrite the model's parameters with the agreed weights, if these may differ."""
        self.training.load_anchors()

    def gather(self, payload: bytes, limit: int, purpose: str) -> list[bytes]:
        """Return the `payload` of every replica of a fixed group in rank order; all call it after the same step. A member of an elastic run
        hears itself alone. Raises `DisagreementError` if a replica has left before that step, `LinkError`.
        """
        return [payload]

    def request_stop(self) -> None:
        """Stop all replicas at the same step: `training.stopping` becomes true there."""

    def close(self) -> None:
        """End the driver's threads. Idempotent. A fixed group stays open."""


_SWAPPED = (
    "the model no longer holds the weights that anchored() has put there: {what}. Swaps of weights must nest: what swaps inside anchored() must "
    "swap back before it ends, and what has swapped before it must not swap back inside. {left}"
)


@contextmanager
def anchored(driver: Driver) -> Iterator[None]:
    """A context in which the model holds the agreed weights; afterwards the replica's own again, bit for bit.

    Raises `ModelError` at the end if something else has changed the weights meanwhile: whose weights these are, nobody can know.
    """
    with driver.training.copies.at_one_point() as meet:
        yield from _anchored(driver, meet)


def _anchored(driver: Driver, meet: Callable[[], None]) -> Iterator[None]:
    training = driver.training
    reshard(training.model)
    at = training.at_anchors(same_bits)  # after `finish`; copies of the parameters would be the most memory of the run
    own = [] if at else [part.clone() for part in training.weights()]
    if not at:
        driver.load_anchors()
    meet()
    loaded = at or training.at_anchors(same_bits)  # otherwise this driver's agreed weights are the replica's own
    before, versions = training.progress(), [part._version for part in training.weights()]
    # After a landing the replica's own weights are the anchors. If they are not, something has swapped them before; if it swaps them back in
    # here, it puts the same values there, and only the versions show it.
    swapped = (
        not at
        and not training.copies.active
        and all(f.since == training.step > 0 and not f.flight for f in training.fragments)
    )

    def restore() -> None:
        reshard(training.model)
        if at:
            training.load_anchors()
        for part, values in zip(training.weights(), own):  # which may have been moved or converted
            part.copy_(values)

    try:
        yield
    except BaseException:
        if training.progress() == before:
            restore()
        raise
    if training.progress() != before:  # to restore would undo the training
        what = "the replica has taken inner steps or has finished inside it"
        raise ModelError(_SWAPPED.format(what=what, left="The weights were left as they are."))
    reshard(training.model)
    intact = training.at_anchors(_holds) if loaded else all(map(_holds, training.weights(), own))
    intact &= not (swapped and loaded and [part._version for part in training.weights()] != versions)
    restore()
    if not intact:
        what = "something else has changed them, such as averages (EMA, SWA) that are swapped in and out, or load_state_dict"
        raise ModelError(_SWAPPED.format(what=what, left="The model holds what it held before anchored()."))


def _holds(part: Tensor, values: Tensor) -> bool:
    """Whether `part` has the bits of `values` in its dtype, perhaps after a way through a half precision, as in `model.half()` for an evaluation."""
    ways = (values, values.to(torch.bfloat16), values.to(torch.float16))
    return any(same_bits(part, way) for way in ways)


def same_bits(part: Tensor, values: Tensor) -> bool:
    """Whether `part` has the bits of `values` in its dtype."""
    pair = (part, values.to(part))
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in pair))
