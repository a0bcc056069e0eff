"""Rounds in flight in a fixed group, seen from the main thread: the common part of their drivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.anchor_digests import AnchorDigests
from thinwire.drivers.base import Driver, Training
from thinwire.drivers.flight import Flight
from thinwire.drivers.fragment import first_state
from thinwire.drivers.handshake import agree_on_start, check_start, introduce
from thinwire.drivers.rounds import RoundPipeline
from thinwire.drivers.saved_state import delta_in_flight, tensors_to_save
from thinwire.drivers.token_weights import FactOfAll, check_weighing
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.partition import Fragment

T = TypeVar("T")
_GROUPS, _LONGEST = 64, 100  # of an optimizer, and characters of a value, that replicas compare
_FIRST_ROUNDS, _ROUNDS_BETWEEN_LOOKS = 3, 32  # of a fragment, in which deltas are compared
_SAME_DATA = (
    "the deltas of all {size} replicas are equal bit for bit: they train on the same data with the same random numbers, or something else averages "
    "their gradients, so more than one replica gains nothing. Give each replica its own share of the data, such as by a sampler with its rank"
)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The class and the numbers of each group of `optimizer`, as text by name. How it computes (`fused`, `foreach`) may differ."""
    parts = getattr(optimizer, "parts", [optimizer])
    facts = {"optimizer": ", ".join(type(part).__name__ for part in parts)}
    for number, group in enumerate(optimizer.param_groups[:_GROUPS]):
        for name, value in group.items():
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(value, int | float | tuple) and name not in ("fused", "foreach", "capturable", "train_mode"):
                facts[f"optimizer, {name} of group {number}"] = repr(value)[:_LONGEST]
    return facts


class Flights:
    """The rounds of a `training`: departures and landings.

    Making it is collective: the replicas compare code, strategy and model, and all start from replica 0's weights. `site` is the group
    of the ranks of one sharded replica. Raises `ConfigurationError`, `DisagreementError`, `ModelError`, `LinkError`.
    """

    _alike_said = False  # whether the warning about equal deltas was given

    def __init__(self, training: Training, fragments: list[Fragment], group: Group, site: Group | None) -> None:
        if training.tokens is not None:
            check_weighing(training.strategy)
        self.training, self.group = training, group
        weights = {} if training.tokens is None else {"weights": "by tokens"}
        notes = settings_of(training.optimizer)
        if unlike := introduce(group, training.strategy, fragments, weights | training.frozen.facts(), notes):
            training.warn(unlike)
        training.fragments += [
            first_state(training.strategy, fragment, index, group.rank, group.size)
            for index, fragment in enumerate(fragments)
        ]
        anchors = [fragment.anchor for fragment in training.fragments]
        agree_on_start(group, anchors, training.observe)  # nothing to do: not by Python's `warnings`
        check_start(fragments, anchors)
        training.load_anchors()
        self.pipeline = RoundPipeline(training.strategy, group, site, training.clock, training.observe)
        self.pipeline.monitor.own_step = lambda: training.step
        self.buffers = self.pipeline.context.buffers
        agreed = training.strategy.exchange.traits.agrees and not training.strategy.exchanges_gradients
        self.digests = AnchorDigests(training, group) if agreed and group.size > 1 else None

    def depart(self, flight: Flight, began: float, scheduled: bool = True) -> None:
        """Begin the round of `flight`. `began` is the time at which work for this departure began; for `scheduled` see
        `RoundPipeline.launch`."""
        training, state, checks = self.training, flight.round, list[Callable[[], None]]()
        # Unlike data show in the first values, so this costs little; only the first rounds and some later ones look. Frozen parameters also.
        looks = state.number < _FIRST_ROUNDS or state.number % _ROUNDS_BETWEEN_LOOKS == 0
        looks &= self.group.size > 1
        flight.compares = looks and not self._alike_said and type(training.strategy.aggregate) is Mean
        if looks and flight.fragment.index == 0 and training.strategy.exchange.traits.agrees:
            sample = training.frozen.sample()
            if sample:
                told = self.pipeline.facts(flight, 1, sample, "frozen parameters")
                checks.append(partial(_compare_frozen, flight, sample, told))
        if self.digests and (compare := self.digests.departs(flight, self.pipeline.facts)):
            checks.append(compare)
        self.pipeline.launch(flight, training.stall_seconds, scheduled, checks=checks)
        fields = {"fragment": flight.fragment.index, "round": state.number, "nbytes": flight.nbytes}
        training.observe("depart", training.step, **fields, seconds_spent=training.clock() - began)

    def depart_again(self, flight: Flight) -> None:
        """Begin the round of `flight`, which was in flight when the checkpoint was saved."""
        self.pipeline.launch(flight, self.training.stall_seconds, scheduled=False, resumed=True)

    def land(self, flight: Flight) -> None:
        """Wait for `flight`, and report its arrival. Call `landed` after commit or discard."""
        training = self.training
        flight.landing = training.clock()
        self.pipeline.wait(flight)
        flight.stall_seconds = training.clock() - flight.landing
        training.stall_seconds += flight.stall_seconds
        self.heard(flight)
        fields = {"fragment": flight.fragment.index, "round": flight.round.number}
        training.observe(
            "flight", training.step, **fields, nbytes=flight.nbytes_sent, begin=flight.begin, end=flight.end,
            queued_seconds=flight.queued_seconds, transfer_seconds=flight.transfer_seconds,
        )  # fmt: skip
        if not self._alike_said and flight.good and flight.alike:
            self._alike_said = True
            training.warn(_SAME_DATA.format(size=self.group.size))
        if flight.unlike:
            training.frozen.warn(training.frozen.changed(), training.warn)
        if not flight.good:
            reason = "NaN or infinity in the delta" if flight.refused_by else "the anchor would not be finite"
            training.observe("refused", training.step, **fields, by=list(flight.refused_by), reason=reason)

    def landed(self, flight: Flight) -> None:
        """Report that `flight` has landed."""
        if self.digests:
            self.digests.landed(flight.fragment)
        training, fields = self.training, {"fragment": flight.fragment.index, "round": flight.round.number}
        began, stall = flight.landing, flight.stall_seconds
        spent = training.clock() - began - stall
        training.observe("land", training.step, **fields, begin=began, stall_seconds=stall, seconds_spent=spent)

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> list[tuple[int, int, int, Tensor]]:
        """As `Training.load_state`. Returns the flights in the order of departure: its step, the fragment, the number of the round, and a copy
        of the delta. Buffers that no fragment holds any longer may be used again.
        """
        fragments = self.training.fragments
        before = tensors_to_save(fragments)
        self.training.load_state(tensors, facts)
        self.buffers.swap(before.values(), tensors_to_save(fragments).values())
        flights = sorted((departed, int(index), number) for index, (number, departed) in facts["flights"].items())
        if self.digests:
            self.digests.begin()
        return [(step, index, number, delta_in_flight(fragments[index], tensors)) for step, index, number in flights]

    def heard(self, flight: Flight) -> None:
        """Take over the request to stop; all replicas learn of it in the same round."""
        self.training.stopping |= flight.stop

    def request_stop(self) -> None:
        """Ask all replicas to stop, with the next round that departs."""
        self.pipeline.stop_requested = True

    def gather(self, payload: bytes, limit: int, purpose: str) -> list[bytes]:
        """See `Driver.gather`."""
        return self.pipeline.gather(payload, limit, purpose, self.training.step)

    def together(self, task: Callable[[Group], T], what: str) -> T:
        """What the collective `task` returns, given the group; see `Monitor.run`."""
        pipeline = self.pipeline

        def on_thread() -> T:
            with torch.no_grad():  # which is a thread's own
                return task(pipeline.context.group)

        return pipeline.monitor.run(on_thread, what, self.training.step)

    def finish(self) -> None:
        """Tell the others after how many steps this replica has finished. Does not wait."""
        self.pipeline.monitor.tell(self.training.step)

    def agree(self) -> None:
        """Wait until all have finished, after as many steps. Raises `DisagreementError`, `LinkError`."""
        self.pipeline.monitor.agree(self.training.step)

    def close(self) -> None:
        """End the exchange threads. What has not landed may never be sent."""
        flights = [one.flight.operation.number for one in self.training.fragments if one.flight]
        self.pipeline.monitor.tell(self.training.step, finished=False, first=min(flights, default=None))
        self.pipeline.close()
        if self.digests:
            self.digests.close()


def _compare_frozen(flight: Flight, sample: bytes, told: FactOfAll) -> None:
    """Find out whether the frozen parameters of another replica have another `sample`. Raises `LinkError`."""
    flight.unlike = set(told.wait().values()) != {sample}


class FixedGroupDriver(Driver):
    """A driver of a fixed group, whose rounds are `Flights`."""

    _flights: Flights

    def gather(self, payload: bytes, limit: int, purpose: str) -> list[bytes]:
        return self._flights.gather(payload, limit, purpose)

    def request_stop(self) -> None:
        self._flights.request_stop()

    def close(self) -> None:
        self._flights.close()
