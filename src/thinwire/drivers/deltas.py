"""The driver for deltas in a fixed group: the order of operations around an inner step.

After inner step t the fragments that are due depart (the delta is computed, and its round begins), and the rounds that departed `delay`
steps before land (the next anchor, then the merge). `drivers/rounds.py` carries the rounds beside training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Identity
from thinwire.comm.group import Group
from thinwire.drivers.base import Training
from thinwire.drivers.flight import Flight
from thinwire.drivers.flights import FixedGroupDriver, Flights
from thinwire.drivers.fragment import DROPPED, FragmentState, stays_on_device
from thinwire.drivers.handshake import agree_on_resume, digest
from thinwire.drivers.module_state import clear
from thinwire.drivers.rounds import WEIGHTS, or_flags
from thinwire.drivers.token_weights import check_saved, check_unchanged, tokens_of_step
from thinwire.exchange import Buffers
from thinwire.pieces.outer import Average, Outer
from thinwire.pieces.partition import Fragment


class DeltaDriver(FixedGroupDriver):
    """Every replica takes the same inner steps and takes part in every round. See `Driver`, `Flights`."""

    def __init__(self, training: Training, fragments: list[Fragment], group: Group, site: Group | None) -> None:
        self.training, self._group, self._site = training, group, site
        self._flights = Flights(training, fragments, group, site)
        if stays_on_device(training.strategy):
            for fragment in training.fragments:
                fragment.device = fragment.anchor.device
                fragment.feedback = {name: kept.to(fragment.device) for name, kept in fragment.feedback.items()}
        self._ended, self._by_tokens = False, training.tokens is not None
        self._window = None
        if training.strategy.anchors == "disk":
            from thinwire.drivers.disk import Window

            self._window = Window(training)
        s = training.strategy
        plain = (s.outer, s.codec, s.feedback, s.filters, s.privacy) == (Average(), Identity(), None, (), None)
        # One replica that averages with itself must equal the inner optimizer alone (law 2); anchor − (anchor − θ) would round.
        self._alone = plain and group.size == 1 and s.schedule.delay == 0 and not s.merge.whole_period

    def after_inner_step(self) -> None:
        training = self.training
        check_unchanged(self._by_tokens, training.tokens)
        if self._by_tokens:
            training.trained += tokens_of_step(training.tokens)
        for index in training.calendar.departs(training.step):
            self._depart(training.fragments[index], training.strategy.outer)
        for fragment in training.fragments:
            if fragment.flight and fragment.flight.round.lands == training.step:
                self._land(fragment, fragment.flight)
        if self._window:
            self._window.slide()

    def finish(self, keep_seconds: float) -> bool:
        """See `Driver`. A fragment that was not trained since its last round has no round, unless the policy has one for the end; all replicas
        know, because they take the same steps."""
        training, strategy = self.training, self.training.strategy
        self._ended = True
        self._flights.finish()
        for fragment in training.fragments:
            trained = fragment.since < training.step
            if fragment.flight and not (trained and strategy.merge.whole_period):  # otherwise its departure lands it
                self._land(fragment, fragment.flight)
        self._flights.agree()
        flying: list[FragmentState] = []
        ends = strategy.policy.last is not strategy.policy and not strategy.merge.whole_period
        for fragment in training.fragments:
            if ends or fragment.since < training.step:
                self._depart(fragment, strategy.outer.last)
                flying.append(fragment)
            if self._window and len(flying) > 1:  # not all of what is on disk is to be in memory
                self._land_last(flying.pop(0))
        for fragment in flying:
            self._land_last(fragment)
        if self._flights.digests:
            self._flights.digests.compare_all(self._flights.gather)
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Driver`. Flights are saved as the deltas that departed; after loading they depart again, with the same bytes."""
        tensors, facts = self.training.state()
        if self._flights.digests:  # a resume takes a step at which these are equal on all replicas
            facts["anchors"] = self._flights.digests.of_all().hex()
        return tensors, facts

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        training = self.training
        check_saved("tokens" in facts, self._by_tokens)
        flights = self._flights.load_state(tensors, facts)
        own = digest(self.anchors())
        self._flights.together(lambda group: agree_on_resume(group, training.step, own), "load_state")
        for step, index, number, delta in flights:
            fragment, outer = training.fragments[index], training.strategy.outer
            tokens = facts["tokens"][2][str(index)] if self._by_tokens else 0.0
            state = fragment.begin_round(training.strategy, delta, step, outer=outer, number=number, tokens=tokens)
            self._flights.depart_again(Flight(state, self._flights.buffers))

    def close(self) -> None:
        super().close()
        if self._window:
            self._window.close()

    @torch.no_grad()
    def _depart(self, fragment: FragmentState, outer: Outer) -> None:
        """Compute the fragment's delta, and begin its round."""
        training, buffers, strategy = self.training, self._flights.buffers, self.training.strategy
        began = training.clock()
        if self._window and not self._ended:
            self._window.departs(fragment.index)
        delta = fragment.delta(buffers.like(fragment.anchor))
        # after a dropped delta the number of its steps is unknown
        if strategy.guard and strategy.guards and not fragment.dropped and not self._alone:
            periods = (training.step - fragment.since) / strategy.schedule.every
            if clipped := fragment.guarded(strategy.guard, delta, periods):
                training.report_clipped(fragment, *clipped)
        given = fragment.snapshot(buffers.like(fragment.anchor)) if self._alone else None
        if fragment.flight:  # it takes a whole period, and lands just before the next one departs
            self._land(fragment, fragment.flight)
        strategy.merge.before_send(fragment, delta, strategy.outer, 1 / self._group.size, buffers)
        if strategy.privacy:
            strategy.privacy.apply(delta, self._group.size)
        codec = fragment.due(strategy.policy.last if self._ended else strategy.policy, fragment.rounds)
        state = fragment.begin_round(
            strategy, delta, training.step, outer=outer, given=given, codec=codec, tokens=training.trained
        )
        self._flights.depart(Flight(state, buffers), began, scheduled=not self._ended)
        fragment.since = training.step

    @torch.no_grad()
    def _land(self, fragment: FragmentState, flight: Flight) -> None:
        """Commit or discard the round. A refused round changes nothing: the delta is still in the parameters. If an aggregate left out this
        replica's delta because it was not finite, the round of the others is still good.
        """
        training, merge = self.training, self.training.strategy.merge
        self._flights.land(flight)
        left_out = self._group.rank in flight.refused_by
        if flight.good:
            if left_out:  # before the merge, which would hide values that are not finite
                self._start_again(flight)
            assert flight.anchor is not None
            flown = flight.round.departed < training.step and not left_out
            counted = (flight.round.delta, flight.feedback.get("residual")) if flown else ()
            merge.on_land(fragment.landing(flight.anchor, *counted))
            flight.commit()
            fragment.counted = max(flight.round.tokens, fragment.counted)
            fragment.since = training.step if merge.forgets else fragment.since
        else:
            flight.discard()
            fragment.since = DROPPED
            if left_out:
                self._start_again(flight)
        self._flights.landed(flight)

    def _start_again(self, left_out: Flight) -> None:
        """Go back to the anchors if the weights are not finite; fragments in flight to their departure, because their deltas still count."""
        training = self.training
        if not start_again(training, self._site, self._flights.buffers) or training.strategy.merge.whole_period:
            return
        for fragment in training.fragments:
            flight = fragment.flight
            if flight and flight is not left_out and bool(torch.isfinite(flight.round.delta).all()):
                fragment.load_into_parameters(fragment.base - flight.round.delta)

    def _land_last(self, fragment: FragmentState) -> None:
        assert fragment.flight is not None
        self._land(fragment, fragment.flight)
        fragment.release()


def start_again(training: Training, site: Group | None = None, buffers: Buffers | None = None) -> bool:
    """Go back to the anchors if this replica's weights are not finite, and clear such values in optimizer and buffers. Returns whether.

    `site` is the group of the ranks of a sharded replica: all go back, or none. Finite weights stay; then the refused delta is older
    than the last restart. What the fragments hold of their own returns to `buffers`; a delta in flight, with its round.
    """
    bad = not all(fragment.finite() for fragment in training.fragments)
    if or_flags(site, (int(bad),), WEIGHTS) == (0,):
        return False
    training.warn("this replica's weights were not finite; it restarts from the anchors")
    for fragment in training.fragments:
        flies = fragment.flight is not None and fragment.flight.round.delta is fragment.own
        if buffers:
            buffers.give(fragment.deviation, *fragment.deviation_state.values(), None if flies else fragment.own)
        fragment.deviation, fragment.own, fragment.deviation_state = None, None, {}
        fragment.counted = training.trained  # what was trained since is in no delta
    training.load_anchors()
    clear(training.model, training.optimizer)
    return True
