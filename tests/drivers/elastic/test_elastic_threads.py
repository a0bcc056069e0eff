"""No thread outlives its run: the threads before and after a run with a real lighthouse and real sockets are the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import LinkError
from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership, Timeouts

LIMIT = 600.0  # only ends a hang
TIMES = Timeouts(heartbeat_interval=0.05, view=LIMIT)


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, b"", lambda _: None)
    yield lighthouse
    lighthouse.close()


def here() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("thinwire")}


def attach(membership: Membership) -> tw.Replica:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(2), outer=tw.pieces.outer.Average())
    return tw.Replica(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), membership)


def step(replica: tw.Replica) -> None:
    for parameter in replica.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    replica.optimizer.step()


def test_an_elastic_run_of_two_leaves_no_thread(lighthouse: Lighthouse) -> None:
    before = here()

    def run(name: str) -> bool:
        membership = Membership(LighthouseRendezvous(lighthouse.address), name, timeouts=TIMES)
        with attach(membership) as replica:
            while replica.step < 6:
                step(replica)
        return f"thinwire-rounds-{name}_0" in {thread.name for thread in threading.enumerate()}

    with ThreadPoolExecutor(2) as pool:
        assert not any(pool.map(run, "ab"))
    assert here() == before


def test_close_ends_a_wait_for_other_members(lighthouse: Lighthouse) -> None:
    """From its second view on, the replica needs two members, but no other comes; so it waits at the lighthouse."""
    before, waits, views = here(), threading.Event(), []

    def observe(kind: str, fields: Mapping[str, Any]) -> None:
        views.extend([kind] * (kind == "view"))
        if kind == "call" and views:
            waits.set()

    membership = Membership(LighthouseRendezvous(lighthouse.address), "a", least=1, timeouts=TIMES, observe=observe)
    replica = attach(membership)
    membership.least = 2
    for _ in range(2):
        step(replica)
    assert waits.wait(LIMIT)
    assert {"thinwire-rounds-a_0", "thinwire-beat", "thinwire-answer"} <= {t.name for t in here() - before}
    replica.close()
    assert here() == before


def test_a_replica_that_could_not_join_leaves_no_thread(lighthouse: Lighthouse) -> None:
    before, came = here(), threading.Event()
    membership = Membership(
        LighthouseRendezvous(lighthouse.address), "a", timeouts=TIMES, observe=lambda kind, _: came.set()
    )
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(attach, membership)
        assert came.wait(LIMIT)
        membership.close()
        with pytest.raises(LinkError, match="could not join"):
            attempt.result(LIMIT)
    assert here() == before
