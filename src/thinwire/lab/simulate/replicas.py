"""The replicas of a run, their rounds and their wires, in virtual time.

The order of events is that of `Replica`. The strategy's own pieces decide: its schedule gives the fragments that depart after each
inner step and their delay, its exchange and codec give the bytes. The simulator adds the times:

- an inner step takes its replica's time;
- a departure goes through the exchange thread, then over the uplink, both first in first out; an exchange of several hops is one
  message of as many bytes, and then takes the time of the other hops;
- a round is complete when the last byte of the last replica has arrived, because a replica waits for its own bytes, too;
- a landing waits for its round, and nothing else waits.

All replicas take the same inner steps, so one event is handled for all of them at once, in arrays [M]. Events follow the order of
steps and not of time. Nothing that happens later to a replica changes what came before, so both orders give the same times. Shared
wires are the exception: they are booked in the order of time (`uplinks.send`). Cost: a few operations on [M] an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from thinwire.codecs import Shapes
from thinwire.comm import Link
from thinwire.errors import ConfigurationError
from thinwire.lab.simulate.layers import Floats
from thinwire.lab.simulate.scenario import Scenario
from thinwire.lab.simulate.uplinks import Flags, Integers, Messages, Uplinks, nbytes_of_each, send
from thinwire.pieces.schedule import Calendar, Rates
from thinwire.rng import derive
from thinwire.strategy import Strategy


@dataclass(eq=False)
class SimulatedRound:
    """One exchange of one fragment among all M replicas.

    Args:
        fragment: number of the fragment, from 0.
        number: number of the fragment's round.
        step: number of the inner step after which it departed.
        departed: seconds at which each replica's packet departed, float64 [M].
        messages: what each replica sends.
        further_seconds: seconds of the exchange beside the largest message and one delay: further hops.
        noticed: time until which the round waited for missing packets, in seconds.
        landed: seconds at which every replica has received and decoded all packets, float64 [M]; None until then.

    >>> now = np.zeros(2)
    >>> SimulatedRound(0, 0, 30, now, Messages.of(now, nbytes=500), 0.0, 0.0).nbytes
    500
    """

    fragment: int
    number: int
    step: int
    departed: Floats
    messages: Messages
    further_seconds: float
    noticed: float  # the time until which it waited for missing packets
    landed: Floats | None = None  # the times at which all packets have arrived and are decoded

    @property
    def nbytes(self) -> int:
        return int(self.messages.nbytes.max())


class SimulationObserver(Protocol):
    """Called with events, as arrays [M]; replicas that are `away` take no part."""

    def stepped(self, first: int, done: Integers, begin: Floats, end: Floats) -> None:
        """Each replica has taken `done` inner steps, starting with step `first`: fewer if it died, none if it is away."""

    def departed(self, round_: SimulatedRound, away: Flags) -> None: ...

    def landed(self, round_: SimulatedRound, step: int, begin: Floats, stall: Floats, away: Flags) -> None: ...

    def changed(self, replicas: Integers, step: int, seconds: Floats, what: str) -> None:
        """Some replicas die, or return, each at its time."""


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The times and counts of a simulated run of M replicas over W wires.

    Args:
        wall_seconds: seconds of each replica, float64 [M].
        compute_seconds: those in inner steps, float64 [M].
        stall_seconds: those in which a landing waited for its round, float64 [M].
        nbytes_sent: bytes that each replica sent, int64 [M].
        steps: inner steps of each replica, int64 [M].
        busy_seconds: seconds in which each wire carried something, float64 [W].
        rounds: number of rounds of all fragments.
        failures: number of deaths of replicas.
        events: number of inner steps, departures, arrivals and landings of all replicas.

    >>> times, counts = np.array([10.0, 10.0]), np.array([100, 100])
    >>> SimulationResult(times, times / 2, times / 2, counts, counts, times, 3, 0, 212).compute_utilization
    0.5
    """

    wall_seconds: Floats
    compute_seconds: Floats
    stall_seconds: Floats
    nbytes_sent: Integers
    steps: Integers
    busy_seconds: Floats
    rounds: int
    failures: int
    events: int

    @property
    def compute_utilization(self) -> float:
        """Seconds in inner steps over seconds, the mean of the replicas."""
        return float(np.mean(self.compute_seconds / self.wall_seconds))


def simulate(
    strategy: Strategy,
    fragments: Sequence[int | Shapes],
    scenario: Scenario,
    steps: int,
    observer: SimulationObserver | None = None,
    rates: Rates = lambda step: 1.0,
) -> SimulationResult:
    """Train in virtual time, and finish like `Replica.finish`.

    Args:
        strategy: the composition; its schedule, exchange and codec give departures and bytes.
        fragments: number of elements of each fragment, or the shapes of its tensors, as for `Strategy.nbytes_per_period`.
        scenario: the replicas, their wires, and failures.
        steps: inner steps of the run.
        observer: called with every departure and landing.
        rates: the learning rate of an inner step, for a schedule that follows it.

    Raises:
        ConfigurationError: no step or no fragment was given.

    >>> from thinwire import diloco
    >>> result = simulate(diloco(every=10), [100_000], Scenario.alike(2, 0.1, Link(1e6)), steps=100)
    >>> result.rounds, bool(result.compute_utilization < 0.5)
    (10, True)
    """
    if steps < 1 or not fragments:
        raise ConfigurationError(f"steps={steps}, {len(fragments)} fragments: at least 1 of each is needed.")
    fleet = _Fleet(strategy, fragments, scenario, observer)
    fleet.run(steps, Calendar(strategy.schedule, len(fragments), rates))
    return fleet.outcome()


class _Fleet:
    def __init__(
        self,
        strategy: Strategy,
        fragments: Sequence[int | Shapes],
        scenario: Scenario,
        observer: SimulationObserver | None,
    ) -> None:
        self.strategy, self.scenario, self.observer = strategy, scenario, observer
        shaped: list[Shapes] = [((given,),) if isinstance(given, int) else given for given in fragments]
        self.numels = [sum(map(prod, shapes)) for shapes in shaped]
        self.shapes = shaped
        count = scenario.replicas
        self.step_seconds = np.array(scenario.step_seconds)
        self.pace = np.cumsum(self.step_seconds)  # pauses hit replicas in proportion to the time of a step
        self.random = np.random.default_rng(derive(scenario.seed, "simulate"))
        self.uplinks = Uplinks(scenario.wires)
        self.shares = np.array(range(count) if scenario.shares is None else scenario.shares)
        self.shared = len(np.unique(self.shares)) < count
        self.clock, self.outbound, self.inbound = np.zeros(count), np.zeros(count), np.zeros(count)
        self.compute, self.stall = np.zeros(count), np.zeros(count)
        self.sent, self.steps = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.flying: dict[int, SimulatedRound] = {}  # rounds in flight by fragment
        self.waiting: list[SimulatedRound] = []  # unsettled rounds in order of departure
        self.rounds = [0] * len(fragments)
        # the inner step of the last departure, as in `FragmentState`
        self.since = [0] * len(fragments)
        self.events = self.failed = 0
        self.away = np.zeros(count, dtype=bool)
        self.fails_at, self.returns_at = np.full(count, np.inf), np.full(count, np.inf)
        self.noticed = 0.0  # the time at which the others knew of the last failure
        if scenario.failures:
            self.fails_at = self._next_failures(np.zeros(count))

    # ---- the order of operations, as in Replica

    def run(self, steps: int, calendar: Calendar) -> None:
        schedule, fragments = self.strategy.schedule, len(self.numels)
        eager = self.strategy.merge.whole_period
        done = 0
        for step in range(1, steps + 1):
            departing = calendar.departs(step)
            due = [p for p, flight in self.flying.items() if flight.step + schedule.delay == step]
            if not departing and not due:
                continue
            self._compute(step, step - done)
            done = step
            for p in departing:
                if eager and p in self.flying:
                    self._land(p, step)
                self._depart(p, step)
            for p in range(fragments):
                if not eager and p in self.flying and self.flying[p].step + schedule.delay == step:
                    self._land(p, step)
        self._compute(steps, steps - done)
        if not self.strategy.exchanges_gradients:
            self._finish(steps, eager)

    def _finish(self, step: int, eager: bool) -> None:
        fragments = range(len(self.numels))
        for p in fragments:
            if p in self.flying and not (eager and self.since[p] < step):
                self._land(p, step)
        ends = self.strategy.policy.last is not self.strategy.policy and not eager
        for p in fragments:
            if ends or self.since[p] < step:
                if p in self.flying:
                    self._land(p, step)
                self._depart(p, step, last=True)
        for p in fragments:
            if p in self.flying:
                self._land(p, step)

    def _compute(self, step: int, steps: int) -> None:
        """Do `steps` inner steps on every present replica, up to `step`."""
        if not steps:
            return
        begin, there = self.clock, ~self.away
        seconds = np.where(there, self._seconds(steps), 0.0)
        self.clock = begin + seconds
        self.compute += seconds
        undone = self._fail(step, steps, begin) if self.scenario.failures else 0
        self._count(step - steps + 1, np.where(there, steps - undone, 0), begin)
        if self.away.all():
            self._go_on_alone(step, np.where(there, undone, steps))

    def _count(self, first: int, done: Integers, begin: Floats) -> None:
        """Count `done` inner steps [M] from `first` on."""
        self.steps += done
        self.events += int(done.sum())
        if self.observer:
            self.observer.stepped(first, done, begin, self.clock)

    def _seconds(self, steps: int) -> Floats:
        """Seconds of `steps` inner steps: sums of independent random times; the pauses of all replicas are drawn together."""
        seconds, scenario = steps * self.step_seconds, self.scenario
        variance = scenario.jitter**2
        if variance > 1e-12:  # with less, a gamma draw is the mean, or overflows
            seconds = self.step_seconds * variance * self.random.standard_gamma(steps / variance, len(seconds))
        if scenario.stragglers:
            pauses = self.random.poisson(steps * self.pace[-1] / scenario.stragglers.every_seconds)
            who = np.searchsorted(self.pace, self.random.random(pauses) * self.pace[-1], side="right")
            lengths = self.random.exponential(scenario.stragglers.seconds, pauses)
            seconds = seconds + np.bincount(who, lengths, minlength=len(seconds))
        return seconds

    def _depart(self, p: int, step: int, last: bool = False) -> None:
        there, exchange = ~self.away, self.strategy.exchange
        codec, numel = self.strategy.coded(self.shapes[p], self.rounds[p], last)
        present = int(there.sum())
        nbytes = nbytes_of_each(exchange, codec, numel, there)
        ready = np.maximum(self.clock, self.outbound) + self.scenario.encode_seconds * numel
        self.outbound = np.where(there, ready, self.outbound)
        messages = Messages.of(np.where(there, ready, np.inf), nbytes)
        link = self._slowest(there)
        further = max(0.0, exchange.seconds(codec, numel, present, link) - link.seconds(int(nbytes.max())))
        flight = SimulatedRound(p, self.rounds[p], step, self.clock, messages, further, self.noticed)
        self.rounds[p] += 1
        self.since[p] = step
        self.flying[p] = flight
        self.waiting.append(flight)
        self.sent += nbytes
        self.events += 2 * present
        if not self.shared and flight.nbytes:
            own = np.flatnonzero(there)
            begin, arrival = self.uplinks.book(self.shares[own], ready[own], nbytes[own].astype(np.float64))
            messages.begin[own], messages.arrival[own] = begin, arrival
        if self.observer:
            self.observer.departed(flight, self.away)

    def _slowest(self, there: Flags) -> Link:
        """A link with the least rate and the longest delay among those of the replicas that take part."""
        own = self.shares[there]
        return Link(8 / float(self.uplinks.seconds_per_byte[own].max()), float(self.uplinks.delay_seconds[own].max()))

    def _land(self, p: int, step: int) -> None:
        """Wait for the flight; then all returned replicas take the anchors."""
        flight = self.flying.pop(p)
        self.since[p] = step if self.strategy.merge.forgets else self.since[p]
        while flight.landed is None:
            self._settle(self.waiting.pop(0))
        assert flight.landed is not None
        there = ~self.away
        stall = np.where(there, np.maximum(flight.landed - self.clock, 0.0), 0.0)
        begin, self.clock = self.clock, self.clock + stall
        self.stall += stall
        self.events += int(there.sum())
        if self.observer:
            self.observer.landed(flight, step, begin, stall, self.away)
        self._return(step, float((begin + stall)[there].max()))

    def _settle(self, flight: SimulatedRound) -> None:
        """Set the times at which the round is complete and decoded on each replica; rounds settle in order of departure."""
        messages, there = flight.messages, ~self.away
        if not flight.nbytes:
            messages.begin, messages.arrival = messages.asked, messages.asked
        elif self.shared:
            send(self.uplinks, self.shares, [messages, *(other.messages for other in self.waiting)], messages)
        taking_part = np.isfinite(messages.asked)
        complete = max(messages.arrival[taking_part].max(initial=0.0) + flight.further_seconds, flight.noticed)
        decode = self.scenario.decode_seconds * self.numels[flight.fragment] * int(taking_part.sum())
        flight.landed = np.maximum(complete, self.inbound) + decode
        self.inbound = np.where(there, flight.landed, self.inbound)

    # ---- failures and returns

    def _next_failures(self, now: Floats) -> Floats:
        assert self.scenario.failures
        return now + self.random.exponential(self.scenario.failures.every_seconds, len(now))

    def _fail(self, step: int, steps: int, begin: Floats) -> Integers:
        """Remove the replicas that fail before these `steps` are done; return the unfinished steps of each [M]."""
        assert self.scenario.failures
        undone = np.zeros(len(begin), dtype=np.int64)
        failed = np.flatnonzero(~self.away & (self.clock >= self.fails_at))
        if len(failed):
            at, seconds = self.fails_at[failed], (self.clock - begin)[failed]
            late = self.clock[failed] - at
            lost = np.minimum(late, seconds)
            # a random time of steps can be nearly 0
            undone[failed] = np.ceil(steps * lost / np.maximum(seconds, 1e-12))
            self.compute[failed] -= lost
            self.stall[failed] -= late - lost  # these died while they waited
            self.clock[failed] = at
            self._leave(step, failed)
            self.noticed = max(self.noticed, float(at.max()) + self.scenario.failures.detect_seconds)
        return undone

    def _leave(self, step: int, failed: Integers) -> None:
        assert self.scenario.failures
        self.away[failed] = True
        self.returns_at[failed] = self.fails_at[failed] + self.scenario.failures.repair_seconds
        self.failed += len(failed)
        if self.observer:
            self.observer.changed(failed, step, self.fails_at[failed], "this replica dies")

    def _go_on_alone(self, step: int, undone: Integers) -> None:
        """If all replicas have died, the first that returns continues from its own checkpoint with the unfinished steps."""
        while self.away.all():
            first = int(self.returns_at.argmin())
            now = float(self.returns_at[first])
            self._return(step, now)
            begin = self.clock.copy()
            each = self.step_seconds[first]
            done = min(int(undone[first]), int((self.fails_at[first] - now) // each))
            self.clock[first] += done * each
            self.compute[first] += done * each
            self._count(step - int(undone[first]) + 1, np.where(np.arange(len(undone)) == first, done, 0), begin)
            undone[first] -= done
            if undone[first]:
                self.clock[first] = self.fails_at[first]
                self._leave(step, np.array([first]))

    def _return(self, step: int, now: float) -> None:
        """Bring back the replicas that are repaired by `now`."""
        back = np.flatnonzero(self.away & (self.returns_at <= now))
        if len(back):
            self.away[back] = False
            self.clock[back] = self.outbound[back] = self.inbound[back] = now
            self.fails_at[back] = self._next_failures(self.clock[back])
            if self.observer:
                self.observer.changed(back, step, self.clock[back], "this replica is back, with the anchors")

    def outcome(self) -> SimulationResult:
        wall = np.where(self.away, self.clock.max(), self.clock)
        return SimulationResult(
            wall, self.compute, self.stall, self.sent, self.steps, self.uplinks.busy_seconds,
            sum(self.rounds), self.failed, self.events,
        )  # fmt: skip
