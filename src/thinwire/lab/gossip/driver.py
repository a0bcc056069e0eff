"""The gossip driver: weights among neighbours in a fixed group. Each replica keeps its own weights, mixed with its neighbours'.

The order around an inner step is that of `drivers/deltas.py`, with three differences: a round lands on this replica's own
anchor, by the rule of the `Gossip` exchange; a request to stop spreads from neighbour to neighbour, and all stop after the same round;
and at the end all replicas take the mean of their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.base import Training
from thinwire.drivers.deltas import start_again
from thinwire.drivers.flight import Flight
from thinwire.drivers.flights import FixedGroupDriver, Flights
from thinwire.drivers.fragment import FragmentState, RoundState
from thinwire.drivers.handshake import agree_on_resume
from thinwire.drivers.module_state import evaluating, gradient, separate_gradients
from thinwire.errors import ConfigurationError, ModelError, NonFiniteError
from thinwire.exchange import Buffers
from thinwire.lab.gossip.consensus import mean_of_all
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.gossip.judged_update import JudgedUpdate
from thinwire.lab.gossip.rules import GossipRule
from thinwire.lab.topology import spread
from thinwire.pieces.partition import Fragment
from thinwire.rng import Key
from thinwire.types import State


class GossipUpdate(Flight):
    """A gossip round. Its delta are the parameters at its departure, which a checkpoint saves for it."""

    decodes_own = True

    def __init__(self, round_: RoundState, rule: GossipRule, buffers: Buffers) -> None:
        super().__init__(round_, buffers)
        self._rule = rule
        self._says: Tensor | None = None  # all vectors, one after another
        numels = [numel for _, numel in rule.vectors(round_.fragment.codec, round_.delta.numel())]
        self._spans = [(sum(numels[:place]), sum(numels[: place + 1])) for place in range(len(numels))]
        self._heard, self._sent_own = (buffers.floats(sum(numels)) for _ in range(2))
        self._after: State = {}

    def signal(self, begin: int, end: int) -> Tensor:
        if self._says is None:
            said = self._rule.says(self.fragment.anchor, self.round.delta, self.fragment.exchange)
            self._says = torch.cat(said) if len(said) > 1 else said[0]
        return self._says[begin:end]

    def settle(self, begin: int, mean: Tensor, own: Tensor | None) -> None:
        assert own is not None, "the round decodes_own"
        self._heard[begin : begin + mean.numel()] = mean
        self._sent_own[begin : begin + mean.numel()] = own

    def finish(self) -> bool:
        """Raises `NonFiniteError`, because the others continue with this replica's packet."""
        heard, said = ([flat[begin:end] for begin, end in self._spans] for flat in (self._heard, self._sent_own))
        self.anchor, self._after = self._rule.hears(
            self.fragment.anchor, self.round.delta, self.fragment.exchange, heard, said
        )
        if not all(bool(torch.isfinite(one).all()) for one in (self.anchor, *self._after.values())):
            raise NonFiniteError(
                f"round {self.round.number} of fragment {self.fragment.fragment.name!r} gives NaN or infinity in {self._rule}: training diverges. "
                "Resume from the last checkpoint with a smaller learning rate, or a smaller momentum or step of the rule."
            )
        return True

    def close(self) -> None:
        self._buffers.give(self._heard, self._sent_own)
        self._says = None

    def commit(self) -> None:
        assert self.anchor is not None
        self.fragment.anchor, self.fragment.exchange = self.anchor, self._after
        self._over()


class GossipFlights(Flights):
    """Like `Flights`, but a request to stop takes some rounds to reach all replicas.

    The rounds of the first fragment are divided into windows; in the rounds of one window a message reaches all replicas. A replica that
    wants to stop sends the request from the beginning of a window; a replica that receives it passes it on; all stop at the window's
    end.
    """

    window = (0, 0)  # the first round, and the first of the next window

    def __init__(self, training: Training, fragments: list[Fragment], group: Group, gossip: Gossip) -> None:
        super().__init__(training, fragments, group, None)
        self._gossip, self._asked = gossip, False

    def request_stop(self) -> None:
        self._asked = True

    def begins(self, number: int) -> None:
        """Called before round `number` of the first fragment departs."""
        if number >= self.window[1]:
            rounds = spread(self._gossip.of_rounds, self.group.size, number, 0, self.training.strategy.seed)
            self.window = number, number + max(1, rounds)
        if self._asked and number == self.window[0]:
            self.pipeline.stop_requested = True

    def heard(self, flight: Flight) -> None:
        if flight.fragment.index == 0:
            self.pipeline.stop_requested |= flight.stop
            self.training.stopping |= self.pipeline.stop_requested and flight.round.number == self.window[1] - 1


class GossipDriver(FixedGroupDriver):
    """Every replica takes the same inner steps, and exchanges only with its neighbours. See `Driver`, `GossipFlights`."""

    _flights: GossipFlights

    def __init__(self, training: Training, fragments: list[Fragment], group: Group, site: Group | None) -> None:
        gossip = training.strategy.exchange
        if not isinstance(gossip, Gossip):
            raise ConfigurationError(
                f"{gossip} declares that replicas do not agree, and is no Gossip(topology, rule), which knows how they mix: write your own "
                "rule for Gossip, or leave agrees as it is."
            )
        if site is not None:
            raise ConfigurationError(
                f"{gossip} on replicas of {site.size} ranks: its weights must be whole; start one process for each replica."
            )
        self.training, self._group, self._gossip, self._rule = training, group, gossip, gossip.rule
        if gossip.judging is not None and gossip.judging.needs_losses and training.validation is None:
            raise ConfigurationError(
                f"{self._rule} without validation: it weighs neighbours by the losses of their weights; give Replica(validation=...), a function "
                "without arguments that returns the model's losses on a few held-out batches."
            )
        self._flights = GossipFlights(training, fragments, group, gossip)
        for fragment in training.fragments:
            key = Key(training.strategy.seed, fragment.index, sender=group.rank)
            fragment.exchange = gossip.begins(fragment.anchor, key, group.size)
        self.uses_gradients = self._rule.tracks
        self._tracked = False  # whether the gradients of the next step are replaced
        self._met = False  # whether the anchors are the mean over all replicas

    @torch.no_grad()
    def before_inner_step(self, closure: bool) -> None:
        """Replace each gradient if the rule tracks gradients. Raises `ModelError` if the optimizer was given a closure then."""
        if not self._rule.tracks or self._tracked:
            return
        if closure:
            raise ModelError(
                f"step(closure) with {self._rule}: it replaces gradients before the step; call the closure first."
            )
        self._tracked = True
        separate_gradients(parameter for one in self.training.fragments for _, parameter in one.fragment.parameters)
        for fragment in self.training.fragments:
            flat = torch.empty_like(fragment.anchor)
            parts = [gradient(parameter) for _, parameter in fragment.fragment.parameters]
            for part, (_, into) in zip(parts, fragment.slices(flat)):
                into.copy_(part)
            followed, fragment.exchange = self._rule.tracked(flat, fragment.exchange)
            for part, (_, values) in zip(parts, fragment.slices(followed)):
                part.copy_(values)

    def after_inner_step(self) -> None:
        self._tracked = False
        training = self.training
        for index in training.calendar.departs(training.step):
            self._depart(training.fragments[index])
        for fragment in training.fragments:
            if fragment.flight and fragment.flight.round.lands == training.step:
                self._land(fragment, fragment.flight)

    def finish(self, keep_seconds: float) -> bool:
        """Land all flights; then take the mean of all replicas' weights, in fp32: 8·(M−1)/M bytes per parameter, once."""
        self._flights.finish()
        for fragment in self.training.fragments:
            if fragment.flight:
                self._land(fragment, fragment.flight)
        self._flights.agree()
        for fragment in self.training.fragments:
            self._meet(fragment)
        self._met = True
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `Driver`. Flights are saved as the weights that departed; after loading they depart again, with the same bytes."""
        tensors, facts = self.training.state()
        return tensors, facts | {"window": list(self._flights.window)}

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        training = self.training
        flights = self._flights.load_state(tensors, facts)
        self._flights.together(lambda group: agree_on_resume(group, training.step, bytes(16)), "load_state")
        self._flights.window = (int(facts["window"][0]), int(facts["window"][1]))
        for step, index, number, theta in flights:
            self._flights.depart_again(self._begin_round(training.fragments[index], theta, step, number))

    def anchors(self) -> Sequence[Tensor]:
        """This replica's own weights; after `finish`, the mean over all."""
        if self._met:
            return [fragment.anchor.clone() for fragment in self.training.fragments]
        return [one.snapshot(torch.empty_like(one.anchor)) for one in self.training.fragments]

    def load_anchors(self) -> None:
        """Does nothing before `finish`, because the model holds this replica's own weights."""
        if self._met:
            self.training.load_anchors()

    @torch.no_grad()
    def _depart(self, fragment: FragmentState) -> None:
        training, began = self.training, self.training.clock()
        if not fragment.finite() and start_again(training):  # such weights must not be sent
            for one in training.fragments:
                if one.flight:  # its landing counts on the weights that departed
                    one.load_into_parameters(one.flight.round.delta)
        if fragment.index == 0:
            self._flights.begins(fragment.rounds)
        theta = fragment.snapshot(self._flights.buffers.like(fragment.anchor))
        self._flights.depart(self._begin_round(fragment, theta, training.step, fragment.rounds), began)
        fragment.since = training.step

    def _key(self, fragment: FragmentState, number: int) -> Key:
        return Key(self.training.strategy.seed, fragment.index, number, self._group.rank)

    def _begin_round(self, fragment: FragmentState, theta: Tensor, departed: int, number: int) -> Flight:
        """A flight of `theta`, the parameters at the departure."""
        strategy, buffers, judging = self.training.strategy, self._flights.buffers, self._gossip.judging
        state = RoundState(
            fragment, theta, None, None, number, departed, departed + strategy.schedule.delay, fragment.codec
        )
        if judging is None:
            return GossipUpdate(state, self._rule, buffers)
        key, size = self._key(fragment, number), self._group.size
        return JudgedUpdate(state, judging, buffers, self._gossip.sources(key, size), size, key)

    @torch.no_grad()
    def _land(self, fragment: FragmentState, flight: Flight) -> None:
        merge = self.training.strategy.merge
        self._flights.land(flight)
        departed = (
            flight.round.delta.clone() if merge.keeps_flight and flight.round.departed < self.training.step else None
        )
        if isinstance(flight, JudgedUpdate):
            weights = flight.judge(partial(self._losses, fragment))
            fields = {"fragment": fragment.index, "round": flight.round.number}
            self.training.observe(
                "weighed", self.training.step, **fields, weights={str(r): w for r, w in weights.items()}
            )
        flight.commit()
        if departed is not None:
            fragment.carry_over(departed)
        else:
            merge.on_land(fragment.landing(fragment.anchor))
        self._flights.landed(flight)

    def _losses(self, fragment: FragmentState, theta: Tensor) -> list[float]:
        """The losses of the model on the validation batches with `theta` in place of the replica's own parameters of `fragment`."""
        training = self.training
        assert training.validation is not None
        own = fragment.snapshot(torch.empty_like(theta))
        fragment.load_into_parameters(theta)
        try:
            with evaluating(training.model):
                return [float(loss) for loss in training.validation()]
        finally:
            fragment.load_into_parameters(own)

    @torch.no_grad()
    def _meet(self, fragment: FragmentState) -> None:
        """Take the mean of all replicas' weights, or what the rule `meets` at, with the same bits on all."""
        own = self._rule.conserved(fragment.snapshot(torch.empty_like(fragment.anchor)), fragment.exchange)
        key, meets = self._key(fragment, fragment.rounds), self._rule.meets
        what = f"the mean of fragment {fragment.index}"
        fragment.anchor = self._flights.together(lambda group: mean_of_all(group, own, key, meets), what)
