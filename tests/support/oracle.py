"""A slow simulator, the oracle for the fast one: it processes one event and one message at a time, in order of time.

A heap holds (time, number, generator). Every replica is a generator that yields until when it computes, or what it
waits for. It shares only the scenario with thinwire.lab.simulate: no stragglers, failures, outages or jitter.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

from thinwire.exchange import Direct
from thinwire.lab.simulate.scenario import Scenario
from thinwire.pieces.schedule import Calendar
from thinwire.strategy import Gradients, Strategy


class Oracle:
    """After `run`, `wall[r]` and `landings[r]` are times. `messages=True`: every peer gets its own message, in rank order, and a
    replica lands when its messages have arrived and all others' have arrived here. False: a round completes for all at once.
    """

    def __init__(self, strategy: Strategy, numels: Sequence[int], scenario: Scenario, messages: bool = False) -> None:
        assert isinstance(strategy.exchange, Direct)
        self.strategy, self.numels, self.scenario, self.messages = strategy, numels, scenario, messages
        self.size = scenario.replicas
        self.heap: list[tuple[float, int, Any]] = []
        self.count = 0
        self.free: dict[int, float] = defaultdict(float)
        self.arrived: dict[tuple[int, int, int], int] = defaultdict(int)  # (fragment, round, replica) -> messages
        self.wall = [0.0] * self.size
        self.compute = [0.0] * self.size
        self.landings: list[list[float]] = [[] for _ in range(self.size)]
        self.asleep: dict[tuple[int, int, int], Any] = {}

    def run(self, steps: int) -> None:
        for rank in range(self.size):
            replica = self.replica(rank, steps)
            next(replica)  # to its first yield
            self.later(0.0, replica)
        while self.heap:
            now, _, what = heapq.heappop(self.heap)
            if callable(what):
                what(now)
            else:
                self.go_on(what, now)

    def later(self, when: float, what: Any) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, what))

    def go_on(self, replica: Generator, now: float) -> None:
        try:
            kind, value = replica.send(now)
        except StopIteration:
            return
        if kind == "until":
            self.later(value, replica)
        elif self.complete(value):
            self.later(now, replica)
        else:
            self.asleep[value] = replica

    def complete(self, key: tuple[int, int, int]) -> bool:
        fragment, number, _ = key
        if self.messages:
            return self.arrived[key] == max(1, 2 * (self.size - 1))
        return all(self.arrived[fragment, number, r] == 1 for r in range(self.size))

    def arrive(self, fragment: int, number: int, ranks: Sequence[int], now: float) -> None:
        for rank in ranks:
            self.arrived[fragment, number, rank] += 1
        for rank in range(self.size):
            key = (fragment, number, rank)
            if key in self.asleep and self.complete(key):
                self.later(now, self.asleep.pop(key))

    def depart(self, rank: int, fragment: int, number: int, now: float, last: bool) -> None:
        """Books the uplink at `now`. Events come in order of time, so the first to ask is served first."""
        wire = self.scenario.shares[rank] if self.scenario.shares else rank
        link = self.scenario.wires[wire].link
        coded = self.strategy.coded(((self.numels[fragment],),), number, last)
        nbytes = self.strategy.exchange.nbytes_sent(*coded, self.size)
        if self.size == 1:
            return self.arrive(fragment, number, (rank,), now)
        peers = [peer for peer in range(self.size) if peer != rank] if self.messages else [rank]
        for peer in peers:
            self.free[wire] = max(now, self.free[wire]) + 8 * nbytes / len(peers) / link.bits_per_second
            ranks = (rank, peer) if self.messages else (rank,)
            self.later(
                self.free[wire] + link.delay_seconds,
                lambda at, ranks=ranks: self.arrive(fragment, number, ranks, at),
            )

    def replica(self, rank: int, steps: int) -> Generator:
        """The order of events of `Replica`, written a second time."""
        schedule, fragments = self.strategy.schedule, range(len(self.numels))
        eager = self.strategy.merge.whole_period
        flying: dict[int, tuple[int, int]] = {}
        rounds, counted = [0] * len(self.numels), [0] * len(self.numels)
        throws_away = not eager and self.strategy.merge.forgets  # the training during the flight
        now = yield ("until", 0.0)

        ends = not eager and self.strategy.policy.last is not self.strategy.policy  # every fragment has a last round

        def depart(p: int, step: int, last: bool = False) -> None:
            self.depart(rank, p, rounds[p], now, last)
            flying[p] = (rounds[p], step)
            rounds[p] += 1
            counted[p] = step

        def land(p: int) -> Generator:
            number, _ = flying.pop(p)
            now = yield ("landing", (p, number, rank))
            self.landings[rank].append(now)
            return now

        calendar = Calendar(schedule, len(self.numels), lambda step: 1.0)
        for step in range(1, steps + 1):
            self.compute[rank] += self.scenario.step_seconds[rank]
            now = yield ("until", now + self.scenario.step_seconds[rank])
            for p in calendar.departs(step):
                if eager and p in flying:
                    now = yield from land(p)
                depart(p, step)
            for p in fragments:
                if not eager and p in flying and flying[p][1] + schedule.delay == step:
                    now = yield from land(p)
                    counted[p] = step if throws_away else counted[p]
        if not isinstance(self.strategy.signal, Gradients):
            for p in fragments:
                if p in flying and (not eager or counted[p] == steps):
                    now = yield from land(p)
                    counted[p] = steps if throws_away else counted[p]
            for p in fragments:
                if ends or counted[p] < steps:  # otherwise nothing was trained since
                    if p in flying:
                        now = yield from land(p)
                    depart(p, steps, last=True)
            for p in fragments:
                if p in flying:
                    now = yield from land(p)
        self.wall[rank] = now
