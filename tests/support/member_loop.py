"""A member with its own loop beside the member of a trainer: it trains some steps alone, and continues when the trainer has joined.

It may stop a second time, while the trainer is away, until this has returned. `given` are the bytes of each state that it gave.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.integrations.members import MemberSampler
from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership, Timeouts

LIMIT = 600.0  # only ends a hang


def membership(address: str, name: str) -> Membership:
    return Membership(
        LighthouseRendezvous(address), name, least=1, timeouts=Timeouts(heartbeat_interval=0.05, view=LIMIT)
    )


@dataclass
class Other:
    """Trains `module` on samples from a ledger of `samples`, or without one: `alone` steps, more to the step `away` once `go` is set, and
    the rest once `back` is set.
    """

    address: str
    strategy: tw.Strategy
    module: nn.Module
    facts: dict[str, str]
    steps: int
    alone: int
    samples: int = 0
    away: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    ahead: threading.Event = field(default_factory=threading.Event)
    back: threading.Event = field(default_factory=threading.Event)
    moved: threading.Event = field(default_factory=threading.Event)
    seen: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    departed: int = 0
    counted: int = 0

    def hear(self, event: str, step: int, **fields: Any) -> None:
        if event == "given":
            self.given.append(fields["nbytes"])
        self.departed += event == "depart"
        self.counted += event == "round" and bool(fields["committed"]) and "loop" in fields["counted"]

    def pause(self, replica: tw.Replica, here: threading.Event, go: threading.Event) -> None:
        """Hold rounds without a delta of this member, in which another may join, until `go` is set."""
        rounds = replica._driver.rounds  # type: ignore[attr-defined]
        while not go.is_set():
            rounds.ask(replica.step)
            rounds.wait(lambda: rounds.idle)
            if self.counted == self.departed:  # its own deltas have travelled
                here.set()

    def train(self) -> nn.Module:
        try:
            member = membership(self.address, "loop")
            sampler = MemberSampler(self.samples, 0, member, lambda: None) if self.samples else None
            member.require(self.facts | (sampler.facts(2) if sampler else {}))
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
            reader = sampler.open(2) if sampler else None
            with tw.Replica(
                self.strategy, self.module, optimizer, member, reader=reader, observer=self.hear
            ) as replica:
                indices: Iterator[int] = iter(sampler or ())
                while replica.step < self.steps:
                    drawn = [next(indices), next(indices)] if sampler else []
                    if sampler is None or sampler.trains(2):
                        self.seen += drawn
                        for parameter in self.module.parameters():
                            parameter.grad = torch.full_like(parameter, 0.01)
                    optimizer.step()
                    optimizer.zero_grad()
                    if replica.step == self.alone:
                        self.pause(replica, self.ahead, self.go)
                    if replica.step == self.away:
                        self.pause(replica, self.moved, self.back)
        finally:
            self.ahead.set()
            self.moved.set()
        return self.module


@contextmanager
def beside(strategy: tw.Strategy, module: nn.Module, **about: Any) -> Iterator[tuple[Other, Future[nn.Module]]]:
    """Yields a member that has trained alone. Inside the context, join it by its address and set `go`."""
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"", lambda _: None)
    other = Other(lighthouse.address, strategy, module, **about)
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(other.train)
        try:
            assert other.ahead.wait(LIMIT)
            yield other, trained
        finally:
            other.go.set()
            other.back.set()
    lighthouse.close()
