"""Replicas whose training is arithmetic, in virtual time, for tests of elastic rounds.

An inner step adds integers that depend on the replica to its parameters, so the sum of everything that it trained is known.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from inline import Inline
from torch import Tensor, nn

import thinwire as tw
from thinwire.data_ledger import LeasedReader
from thinwire.drivers.base import Training
from thinwire.drivers.elastic.driver import ElasticDriver
from thinwire.drivers.elastic.messages import Outcome, Ready
from thinwire.drivers.elastic.plan import RoundPlan
from thinwire.drivers.fragment import FragmentState, first_state
from thinwire.exchange import send_queue
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import View
from thinwire.pieces.schedule import Calendar
from thinwire.types import Observer

SIZES = (5, 3)
START = [torch.arange(5.0), torch.full((3,), 7.0)]
PHASES = ["call", "called", "connect", "put", "all", "settle", "wait", "post"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the send queue run its calls at once in the same thread."""
    monkeypatch.setattr(send_queue, "JobThread", Inline)
    monkeypatch.setattr(send_queue.threading, "Lock", threading.RLock)


def freeze_a(cluster: SimulatedCluster, doubts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezes the member a for some rounds; if it `doubts`, during the vote on its delta, whose result is lost with the lighthouse."""

    def freeze() -> None:
        cluster.freeze("a")
        if doubts:
            cluster.later(1.0, cluster.lighthouse.stop)
            cluster.later(2.0, cluster.lighthouse.start)
        cluster.later(20.0, lambda: cluster.thaw("a"))

    decide = View.decide

    def decided(view: View, question: str, yes: bool, seconds: float, *what: str) -> bool:
        own = view.members[view.group.rank].name
        if own != "a":  # a votes first and waits, so the others have the result without it
            ThreadRendezvous(cluster, own).sleep(0.5)
        return decide(view, question, yes, seconds, *what)

    monkeypatch.setattr(View, "decide", decided)
    cluster.at("a", "wait" if doubts else "call", freeze, 4)


def increment(name: str, step: int, fragment: int) -> Tensor:
    """Returns what one inner step of `name` adds to a fragment."""
    return torch.arange(1.0, SIZES[fragment] + 1) * (1 + sum(map(ord, name)) % 5) + step % 3


def packet(ready: Ready, after: Mapping[str, Tensor]) -> Tensor:
    """Returns what was sent of a delta: all of it, or with feedback what its state says, which is the one `after` now."""
    return ready.delta + ready.feedback["residual"] - after["residual"] if after else ready.delta.clone()


class Committed(NamedTuple):
    before: str  # the state_digest of the state to which it was added
    fragment: int
    deltas: list[Tensor]
    weights: list[float]
    names: list[str]
    whole: float


@dataclass
class RecordedRun:
    """What all replicas did, for the checks at the end."""

    deltas: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # what each replica sent, by view and name
    commits: dict[str, Committed] = field(default_factory=dict)  # by state_digest
    disk: dict[str, tuple[int, Any, Any]] = field(default_factory=dict)  # the last checkpoint, by name
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    start: list[Tensor] = field(default_factory=lambda: START)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.trained = [torch.zeros_like(start) for start in self.start]  # by all replicas, over all restarts

    def hear(self, name: str) -> Callable[..., None]:
        def observe(event: str, step: int, **fields: Any) -> None:
            with self.lock:
                self.events.append((name, event, fields))

        return observe

    def history(self, state_digest: str) -> list[Committed]:
        """Returns all rounds that led to `state_digest`."""
        rounds: list[Committed] = []
        while state_digest in self.commits:
            rounds.append(self.commits[state_digest])
            state_digest = rounds[-1].before
        return rounds[::-1]

    def anchors(self, state_digest: str) -> list[Tensor]:
        """Returns the anchors that these rounds give: the start minus the weighted mean of the deltas of each round."""
        anchors = [start.clone() for start in self.start]
        for _, fragment, deltas, weights, _, whole in self.history(state_digest):
            if deltas:
                anchors[fragment] -= sum((w * d for w, d in zip(weights, deltas)), torch.zeros(())) / whole
        return anchors


def training(
    strategy: tw.Strategy,
    parameters: list[nn.Parameter],
    pieces: list[FragmentState],
    observe: Observer,
    tokens: float | None = None,
) -> Training:
    """Returns the arguments of a driver for a model that is only `parameters`."""
    calendar = Calendar(strategy.schedule, len(pieces), lambda _: 0.0)
    model, optimizer = nn.ParameterList(parameters), torch.optim.SGD(parameters)
    return Training(strategy, model, optimizer, observe, time.monotonic, calendar, tokens, pieces)


class Toy:
    """One replica with two parameters, each of which is a fragment."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        name: str,
        record: RecordedRun,
        step_seconds: float = 1.0,
        least: int = 1,
        grace: float = 10.0,
        save_every: int = 0,
        keep: float = 0.0,
        tokens: float | None = None,
        inner: Callable[[Toy, int], Tensor] | None = None,
        most_steps: int | None = None,
        reader: LeasedReader | None = None,
        facts: dict[str, str] | None = None,
        **pieces: Any,  # of the strategy
    ) -> None:
        self.inner = inner or (lambda toy, fragment: increment(toy.name, toy.step, fragment))
        self.keep = keep
        self.cluster, self.step_seconds, self.save_every, self.restored = cluster, step_seconds, save_every, False
        self.name, self.record, self.trained = name, record, [torch.zeros_like(start) for start in record.start]
        pieces = {"outer": tw.pieces.outer.Average()} | pieces
        strategy = tw.Strategy(schedule=tw.pieces.schedule.Staggered(every=4, delay=0), **pieces)
        self.parameters = [nn.Parameter(start.clone()) for start in record.start]
        fragments = [
            tw.pieces.partition.Fragment(f"part {i}", [(f"part {i}", p)]) for i, p in enumerate(self.parameters)
        ]
        self.pieces = [first_state(strategy, fragment, index, 0, 1) for index, fragment in enumerate(fragments)]
        times = Timeouts(grace=grace)
        membership = cluster.membership(name, least=least, timeouts=times, most_steps=most_steps, facts=facts)
        self.training = training(strategy, self.parameters, self.pieces, record.hear(name), tokens)
        self.training.reader = self.reader = reader
        self.elastic = ElasticDriver(self.training, membership, thread=Inline())
        # Its deltas that were counted, and what of them was sent.
        self.sent: list[list[tuple[Ready, Tensor]]] = [[], []]
        loop = self.elastic.rounds.loop
        fly, believe, take_over = loop._fly, loop._believe, self.elastic._take_over

        def flown(view: View, plan: RoundPlan, ready: Ready) -> Any:
            moved = fly(view, plan, ready)
            with record.lock:
                record.deltas[view.id, name] = packet(ready, moved.feedback)
            return moved

        def believed(view: View, plan: RoundPlan, ready: Ready, moved: Any, granted: bool = False, *reads: Any) -> None:
            before = loop.agreed.state_digest
            believe(view, plan, ready, moved, granted, *reads)
            if before != loop.agreed.state_digest:
                with record.lock:
                    deltas = [record.deltas[view.id, view.members[rank].name] for rank in plan.counted]
                    weights = [plan.weights[rank] for rank in plan.counted]
                    names = [view.members[rank].name for rank in plan.counted]
                    record.commits.setdefault(
                        loop.agreed.state_digest, Committed(before, plan.fragment, deltas, weights, names, plan.whole)
                    )

        def taken_over(outcome: Outcome, anchor: Tensor, step: int) -> None:
            self.restored = self.restored or outcome.dropped
            if outcome.counted is not None:
                self.sent[outcome.fragment].append((outcome.counted, packet(outcome.counted, outcome.feedback)))
            if outcome.returned is not None:
                mine = self.sent[outcome.fragment]
                self.sent[outcome.fragment] = [one for one in mine if one[0] is not outcome.returned]
                assert len(self.sent[outcome.fragment]) == len(mine) - 1
            take_over(outcome, anchor, step)

        loop._fly, loop._believe = flown, believed  # type: ignore[method-assign]
        self.elastic._take_over = taken_over  # type: ignore[method-assign]

    @property
    def step(self) -> int:
        return self.training.step

    @step.setter
    def step(self, step: int) -> None:
        self.training.step = step

    def train(self, steps: int) -> Toy:
        self.begin().train_until(steps)
        self.elastic.finish(self.keep)
        self.elastic.close()
        return self

    def begin(self) -> Toy:
        self.restore()
        self.elastic.join()
        return self

    @torch.no_grad()
    def train_until(self, steps: int) -> None:
        while self.step < steps:
            with self.cluster.time:
                self.cluster.wait(self.name, lambda: False, self.step_seconds)
            self.step += 1
            for fragment, parameter in enumerate(self.parameters):
                more = self.inner(self, fragment)
                parameter += more
                self.trained[fragment] += more
                with self.record.lock:
                    self.record.trained[fragment] += more
            self.elastic.after_inner_step()
            if self.save_every and self.step % self.save_every == 0:
                self.save()

    def save(self) -> None:
        tensors = [
            (piece.anchor.clone(), parameter.detach().clone(), piece.feedback)
            for piece, parameter in zip(self.pieces, self.parameters)
        ]
        self.record.disk[self.name] = self.step, tensors, json.loads(json.dumps(self.elastic.facts()))

    @torch.no_grad()
    def restore(self) -> None:
        if self.name in self.record.disk:
            self.step, tensors, facts = self.record.disk[self.name]
            for piece, parameter, (anchor, values, feedback) in zip(self.pieces, self.parameters, tensors):
                piece.anchor, piece.feedback = anchor.clone(), dict(feedback)
                parameter.copy_(values)
            self.elastic.load(facts)
            self.restored = True

    def check_nothing_lost(self) -> None:
        """Checks that everything it trained is in a counted delta or still in the parameters, and that the anchors hold each delta once."""
        if self.restored:
            return  # its steps between checkpoint and death are lost, or others have trained them again
        history = self.record.history(self.elastic.rounds.loop.agreed.state_digest)
        for index, piece in enumerate(self.pieces):
            left = piece.anchor - self.parameters[index].detach()
            left += piece.feedback.get("residual", 0)
            sent = sum((values for _, values in self.sent[index]), torch.zeros_like(left))
            torch.testing.assert_close(sent + left, -self.trained[index], rtol=1e-5, atol=1e-4)
            mine = [delta for one in history for name, delta in zip(one.names, one.deltas)
                    if one.fragment == index and name == self.name]  # fmt: skip
            there = sum(mine[len(mine) - len(self.sent[index]) :], torch.zeros_like(left))  # since the last restart
            torch.testing.assert_close(sent, there, rtol=1e-5, atol=1e-4)


class Returner(Toy):
    """It meets the others before it loads its checkpoint, as a loop does that calls `load_state` after it has made its `Replica`."""

    def begin(self) -> Toy:
        self.elastic.join()
        there = self.step
        self.restore()
        self.step = max(self.step, there)
        return self


def train(cluster: SimulatedCluster, record: RecordedRun, steps: int = 24, **settings: Any) -> Callable[[str], Toy]:
    """Returns a replica that trains, and restarts without a checkpoint after it is killed."""

    def run(name: str) -> Toy:
        while True:
            try:
                return Toy(cluster, name, record, **settings).train(steps)
            except Killed:
                cluster.revive(name)

    return run


def train_all(
    cluster: SimulatedCluster, record: RecordedRun, names: str = "abc", steps: int = 24, **later: Callable[[str], Any]
) -> dict[str, Any]:
    return cluster.play({name: lambda name: Toy(cluster, name, record).train(steps) for name in names} | later)


def agree(results: dict[str, Any], record: RecordedRun) -> None:
    """Checks that all remaining replicas hold the same bits, and that these are the sum of the committed rounds."""
    toys = [toy for toy in results.values() if isinstance(toy, Toy)]
    assert toys, results
    for toy in toys[1:]:
        assert toy.elastic.rounds.loop.agreed.state_digest == toys[0].elastic.rounds.loop.agreed.state_digest, [
            e for e in record.events
        ]
        for mine, other in zip(toy.pieces, toys[0].pieces):
            assert torch.equal(mine.anchor, other.anchor)
    for toy in toys:
        toy.check_nothing_lost()
    for piece, due in zip(toys[0].pieces, record.anchors(toys[0].elastic.rounds.loop.agreed.state_digest)):
        torch.testing.assert_close(piece.anchor, due, rtol=1e-5, atol=1e-4)


def order_faults(
    cluster: SimulatedCluster, chance: random.Random, faults: int, names: str, done: Counter[str] | None = None
) -> list[str]:
    """Schedules faults at random points of the run and counts them in `done`. Every fault ends before the run does."""
    said, done = [], Counter() if done is None else done
    for _ in range(faults):
        name, other = chance.sample(names, 2)
        kind = chance.choice(["kill", "freeze", "cut", "damage", "slow", "lighthouse"])
        seconds, phase, nth = chance.uniform(1, 25), chance.choice(PHASES), chance.randint(1, 60)
        faults_of: dict[str, Callable[[], None]] = {
            "kill": lambda name=name: cluster.kill(name),
            "freeze": lambda name=name, s=seconds: (cluster.freeze(name), cluster.later(s, lambda: cluster.thaw(name)))[0],
            "cut": lambda a=name, b=other, s=seconds: (cluster.cut(a, b), cluster.later(s, lambda: cluster.heal(a, b)))[0],
            "damage": lambda a=name, b=other: cluster.damage(a, b, 1),
            "slow": lambda a=name, b=other, s=seconds: (cluster.slow(a, b, 2.0), cluster.later(s, lambda: cluster.slow(a, b, 0.0)))[0],
            "lighthouse": lambda s=seconds: (cluster.lighthouse.stop(), cluster.later(s, cluster.lighthouse.start))[0],
        }  # fmt: skip

        def happen(kind: str = kind, fault: Callable[[], None] = faults_of[kind]) -> None:
            done[kind] += 1
            fault()

        cluster.at(name, phase, happen, nth)
        said.append(f"{kind} {name}{other} at {phase} {nth} for {seconds:.0f} s")
    return said
