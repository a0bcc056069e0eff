"""What members say of themselves has bounds: beyond them a status or a round is refused by name, and the others go on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from elastic_toy import Inline, RecordedRun, Toy, agree, one_thread

import thinwire as tw
from thinwire.codecs import Identity
from thinwire.data_ledger import Claim, LeasedReader
from thinwire.drivers.elastic.global_state import GlobalState
from thinwire.drivers.elastic.messages import Ready
from thinwire.drivers.elastic.plan import MemberStatus
from thinwire.drivers.elastic.round_thread import RoundThread
from thinwire.errors import LinkError
from thinwire.membership.testing.cluster import SimulatedCluster, ThreadRendezvous

__all__ = ["one_thread"]  # a fixture


@pytest.mark.parametrize(
    "lie",
    [
        {"round": 1 << 40}, {"round": 10**400}, {"step": 1 << 50}, {"step": 41}, {"brings": {"9": 1.0}}, {"brings": {"0": 2.0}}, 
        {"brings": {"00": 1.0}}, {"state_digest": "a" * 100}, {"more": 1}, {"reads": [0, 0, 10**6]},
        {"brings": {"0": 1.0}, "claims": {"0": [0, 0, 0, 10**6]}},
    ],
)  # fmt: skip
def test_a_status_out_of_bounds_is_refused_by_name(lie: dict[str, Any]) -> None:
    """The others continue without it, from the first round or a later one, and end as if it had not existed."""
    cluster, record = SimulatedCluster(), RecordedRun()
    told: list[str] = []

    def broken(name: str) -> None:
        membership = cluster.membership(name, facts=facts)
        ThreadRendezvous(cluster, name).sleep(15.0)
        for _ in range(5):
            with suppress(LinkError):
                membership.next_view(MemberStatus(round=3, state_digest="x").facts() | lie, 5.0).close()

    def one(name: str) -> Toy:
        reader = LeasedReader(seed=0, replicas=2, step=2, samples=100) if {"reads", "claims"} & lie.keys() else None
        toy = Toy(cluster, name, record, least=2, most_steps=40, reader=reader)
        membership = toy.elastic.rounds.membership
        facts.update(membership.facts)
        membership._observe = lambda kind, fields: told.append(fields["reason"]) if kind == "retry" else None
        return toy.train(40)

    facts: dict[str, str] = {}
    results = cluster.play({"a": one, "b": one, "zz": broken})
    agree(results, record)
    assert all(isinstance(results[name], Toy) for name in "ab"), results
    assert not any("zz" in fields["members"] for _, event, fields in record.events if event == "round")
    assert len([text for text in told if text.startswith("zz sent a status")]) == 2  # each of the two reports it once


def test_a_round_number_beyond_its_bound_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of a packet has 32 bits for the round; the bounds of statuses are far lower."""
    monkeypatch.setattr("thinwire.drivers.elastic.plan.MOST_REPORTED", 1 << 40)
    cluster, record = SimulatedCluster(), RecordedRun()

    def one(name: str) -> str:
        toy = Toy(cluster, name, record, least=2)
        agreed = toy.elastic.rounds.loop.agreed
        agreed.round = 1 << 32
        toy.elastic.rounds.load(agreed, {})
        toy.elastic.join()
        toy.elastic._trained = 4.0
        toy.elastic.rounds.depart(toy.elastic._bring(0, 4), own_steps=4)
        toy.elastic.close()
        return name

    cluster.play({"a": one, "b": one})
    reasons = [fields["reason"] for _, event, fields in record.events if event == "round" and fields["counted"]]
    assert reasons and all(text.startswith("PacketError: a packet cannot be written") for text in reasons), reasons


def test_a_status_with_many_ready_deltas_is_short_enough_to_be_sent() -> None:
    """At the end of a run the deltas of all fragments are ready. A status names the next ones, and the others follow."""
    anchors = [torch.zeros(1) for _ in range(400)]
    strategy = tw.Strategy(schedule=tw.pieces.schedule.Every(4), outer=tw.pieces.outer.Average())
    agreed = GlobalState([anchor.clone() for anchor in anchors], [{} for _ in anchors], state_digest="d")
    rounds = RoundThread(
        strategy, SimulatedCluster().membership("a", least=1), agreed, [Identity()] * 400, range(400),
        observe=lambda event, step, **fields: None, thread=Inline(),
    )  # fmt: skip
    claim = Claim(serial=0, version=0, segments=((10**9, 10**9 + 64),))
    rounds.join(0)
    rounds.finish(keep_seconds=0.0)
    rounds.meet(*(Ready(i, torch.ones(1), 123456.5, 4, {}, claim, 1) for i in range(400)))
    while not rounds.over:
        assert rounds.report.failure is None, rounds.report.failure
        rounds.meet()
    assert agreed.round == 400 and all(float(anchor) == -1 for anchor in agreed.anchors)
