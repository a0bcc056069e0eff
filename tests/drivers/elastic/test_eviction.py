"""Eviction: rounds continue without a member that most members find slow; which member leaves, what each is told, and when none leaves."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from inline import Inline
from wan_cluster import WanCluster, WanLinks, uniform

import thinwire as tw
from thinwire.app.diagnosis import Record, Rules
from thinwire.codecs import Identity
from thinwire.drivers.elastic.eviction import outvoted
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.round_thread import RoundThread
from thinwire.errors import DisagreementError
from thinwire.membership.timeouts import Timeouts

NAMES = ("amber", "birch", "cedar", "delta")
pytestmark = pytest.mark.usefixtures("inline")


@dataclass
class Told:
    """The events of one replica, and the error that ended it."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ended: BaseException | None = None
    round: int = 0
    state_digest: str = ""

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == kind]


def hold(
    wan: WanLinks,
    slow: dict[tuple[str, str], float],
    evict: Rules | None,
    least: int = 2,
    sleeper: str = "",
    rounds: int = 24,
    seed: int = 1,
) -> dict[str, Told]:
    """Holds rounds of all replicas. After 9 s the links in `slow` get slower, and `sleeper` takes four times as long for a step."""
    cluster, told = WanCluster(wan, seed), {name: Told() for name in NAMES}
    cluster.later(9.0, lambda: wan.slower.update(slow))

    def replica(name: str) -> None:
        own, chance = told[name], random.Random(f"{seed} {name}")
        membership = cluster.membership(name, least=least, timeouts=Timeouts(grace=10.0), evict=evict)
        anchor = torch.zeros(400)
        agreed = GlobalState([anchor], [{}])
        strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(10), outer=tw.pieces.outer.Average())
        held = RoundThread(
            strategy, membership, agreed, [Identity()], [0],
            observe=lambda event, step, **fields: own.events.append((event, fields)), clock=membership.clock, thread=Inline(),
        )  # fmt: skip
        try:
            held.join(0)
            step = own_steps = 0
            while agreed.round < rounds:
                seconds = chance.uniform(1.0, 1.15) * (4 if name == sleeper and cluster.time.now > 9 else 1)
                with cluster.time:
                    cluster.wait(name, lambda: False, seconds)
                step = max(step, held.report.step) + 10
                own_steps += 10
                held.trained(step)
                held.depart(Ready(0, torch.ones(400), 1.0, step, {}), own_steps=own_steps)
                # the replica waited for the round here, which is not its own time, so measure from now
                held.loop._voter.departs(own_steps, membership.clock())
                for _ in held.outcomes(1 << 40):
                    pass
        except BaseException as error:
            own.ended = error
            raise
        finally:
            own.round, own.state_digest = agreed.round, agreed.state_digest
            held.close()

    cluster.play(dict.fromkeys(NAMES, replica))
    return told


@pytest.mark.parametrize("what", ["sender", "receiver", "sleeper"])
def test_an_evicted_member_leaves_and_the_others_go_on(what):
    slow = {"sender": {("cedar", "*"): 20.0}, "receiver": {("*", "cedar"): 20.0}, "sleeper": {}}[what]
    told = hold(uniform(NAMES), slow, Rules(), sleeper="cedar" if what == "sleeper" else "")
    assert isinstance(told["cedar"].ended, DisagreementError)
    assert "'cedar' was evicted by amber, birch, " in str(told["cedar"].ended) and "replica cedar" in str(
        told["cedar"].ended
    )
    for name in set(NAMES) - {"cedar"}:
        (evicted,) = told[name].all("evicted")
        assert evicted["name"] == "cedar" and len(evicted["by"]) >= 3 and "slow" in evicted["reason"]
        assert told[name].ended is None and told[name].round >= 24
        assert told[name].all("round")[-1]["members"] == ["amber", "birch", "delta"]
    assert len({told[name].state_digest for name in set(NAMES) - {"cedar"}}) == 1


def test_eviction_is_off_by_default_and_keeps_the_minimum():
    """Without rules a member that delays the others is left out for a while, and not told to leave."""
    for evict, least, slow in ((None, 2, {}), (Rules(), 4, {("cedar", "*"): 20.0})):
        told = hold(uniform(NAMES), slow, evict, least)
        assert all(not one.all("evicted") and one.ended is None and one.round >= 24 for one in told.values())


def test_nobody_is_evicted_for_a_slow_link_or_without_cause():
    for slow in ({}, {("amber", "birch"): 20.0}):
        told = hold(uniform(NAMES), slow, Rules())
        assert all(not one.all("evicted") and one.ended is None for one in told.values())


def test_eviction_records_survive_serialisation():
    told = hold(uniform(NAMES), {}, Rules(), rounds=4)
    for name, one in told.items():
        for fields in one.all("wire"):
            record = Record.of(json.loads(json.dumps(fields)))
            assert record.name == name and record.over
            assert {flow.peer for flow in record.sent} == {flow.peer for flow in record.received} == set(NAMES) - {name}
            assert all(flow.parts == flow.there == 1 and flow.nbytes > 1600 for flow in record.received + record.sent)


@pytest.mark.parametrize(
    ("said", "least", "out"),
    [
        ({"a": "c", "b": "c", "c": "c"}, 2, "c"),
        ({"a": "c", "b": "c", "c": ""}, 3, None),
        ({"a": "b", "b": "a"}, 1, None),
        ({"a": "b", "b": "b"}, 1, "b"),
        ({"a": "x", "b": "x", "c": "x"}, 1, None),  # no member is called x
        ({"a": "", "b": "", "c": "a"}, 1, None),
        ({}, 1, None),
    ],
)
def test_a_majority_of_records_names_the_evicted_member(said, least, out):
    assert outvoted(said, least) == out
