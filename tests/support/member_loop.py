"""A member with its own loop beside the member of a trainer: it trains some steps alone, and continues when the trainer has joined."""

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
    """Trains `module` on samples from a ledger of `samples`: `alone` steps, and the rest once `go` is set."""

    address: str
    strategy: tw.Strategy
    module: nn.Module
    facts: dict[str, str]
    steps: int
    alone: int
    samples: int
    go: threading.Event = field(default_factory=threading.Event)
    seen: list[int] = field(default_factory=list)
    ahead: threading.Event = field(default_factory=threading.Event)

    def train(self) -> nn.Module:
        try:
            member = membership(self.address, "loop")
            sampler = MemberSampler(self.samples, 0, member, lambda: None)
            member.require(self.facts | sampler.facts(2))
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
            with tw.Replica(self.strategy, self.module, optimizer, member, reader=sampler.open(2)) as replica:
                indices: Iterator[int] = iter(sampler)
                while replica.step < self.steps:
                    drawn = [next(indices), next(indices)]
                    if sampler.trains(2):
                        self.seen += drawn
                        for parameter in self.module.parameters():
                            parameter.grad = torch.full_like(parameter, 0.01)
                    optimizer.step()
                    optimizer.zero_grad()
                    if replica.step == self.alone:
                        self.ahead.set()
                        rounds = replica._driver.rounds
                        while not self.go.is_set():  # rounds without a delta of this member, in which another may join
                            rounds.ask(replica.step)
                            rounds.wait(lambda rounds=rounds: rounds.idle)
        finally:
            self.ahead.set()
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
            other.ahead.set()
    lighthouse.close()
