"""Bookkeeping beside rounds in the air: the duration of a step, and what the ranks of a site have seen."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from strategies import METHODS
from torch import nn

import thinwire as tw
from thinwire.comm.group import WrappedGroup
from thinwire.drivers.rounds import ROUNDS, WEIGHTS, StepTimer, or_flags
from thinwire.errors import LinkError
from thinwire.packet import flags_of
from thinwire.strategy import Gradients
from thinwire.testing.toy import adamw, batch, inner_step, toy

# three fragments, whose rounds are in the air at the same time
IN_PARTS = tw.Strategy(schedule=tw.pieces.schedule.Every(2, 1), partition=tw.pieces.partition.Strided(2))

DENSE = tw.Strategy(
    schedule=tw.pieces.schedule.Every(2), codec=tw.codecs.TopK(0.5), feedback=tw.pieces.feedback.Feedback(),
    policy=tw.pieces.policies.DenseLast(),
)  # fmt: skip


def test_seconds_per_step_are_measured_since_the_last_departure() -> None:
    timer = StepTimer()
    told = [timer.departs(step, seconds) for step, seconds in ((2, 5.0), (4, 6.0), (4, 7.0), (3, 9.0), (13, 14.0))]
    assert told == [0.0, 0.5, 0.0, 0.0, 0.5]


def test_a_ranks_finding_counts_for_its_whole_site() -> None:
    flags = [(0, 4, 1), (0, 0, 2), (8, 0, 0)]
    assert tw.run_threads(3, lambda site: or_flags(site, flags[site.rank], WEIGHTS), timeout=600.0) == [(8, 4, 3)] * 3
    assert or_flags(None, (0, 4), WEIGHTS) == (0, 4) and ROUNDS != WEIGHTS


def test_close_does_not_wait_for_a_round_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other replica sends nothing. The rounds behind it are dropped, and its end is not observed: a log would be closed by then."""
    arriving, closed, heard = threading.Event(), threading.Event(), list[str]()
    arrive = tw.exchange.Direct.arrive

    def noted(*arguments: Any) -> Any:
        arriving.set()
        return arrive(*arguments)

    monkeypatch.setattr(tw.exchange.Direct, "arrive", noted)

    def replica(group: tw.Group) -> tuple[list[Future[None]], int]:
        model = toy()
        levels = tw.lab.codecs.Levelled((tw.codecs.Int(8), tw.codecs.Sign()))  # chosen by the rounds that have arrived
        strategy = replace(IN_PARTS, codec=levels)
        attached = tw.Replica(
            strategy, model, adamw(model), group, observer=lambda event, *_, **fields: heard.append(event)
        )
        for step in (1, 2) if group.rank == 0 else ():
            inner_step(model, attached.optimizer, *batch(0, 0, step))
        assert (arriving if group.rank == 0 else closed).wait(600.0)
        arrivals = [fragment.flight.arrival for fragment in attached._driver.training.fragments if fragment.flight]
        attached.close()
        closed.set()
        return arrivals, len(heard)

    ((first, *rest), before), _ = tw.run_threads(2, replica, timeout=600.0)
    assert [arrival.cancelled() for arrival in rest] == [True, True]
    assert isinstance(first.exception(), LinkError) and heard == ["depart"] * before == ["depart"] * 3


def test_time_spent_waiting_does_not_count_as_own_time() -> None:
    """The clock moves only when the training thread reads it."""
    main, ticks = threading.current_thread(), [0.0]

    def clock() -> float:
        ticks[0] += threading.current_thread() is main
        return ticks[0]

    (group,) = tw.ThreadGroup.create(1)
    heard: dict[str, list[dict[str, object]]] = {}
    model = toy()
    with tw.Replica(
        tw.diloco(every=2), model, adamw(model), group, clock=clock,
        observer=lambda event, step, **fields: heard.setdefault(event, []).append(fields),
    ) as replica:  # fmt: skip
        for step in range(1, 7):
            inner_step(model, replica.optimizer, *batch(0, 0, step))
        begun = [event["begin"] for event in heard["flight"]]
        stalls = [event["stall_seconds"] for event in heard["land"]]
        due = [0.0] + [(begun[i + 1] - begun[i] - stalls[i]) / 2 for i in (0, 1)]
        assert [event["own_seconds"] for event in heard["wire"]] == due and min(stalls) > 0


def test_rounds_are_decoded_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second round in the air waits for the thread that decodes the first."""
    decode, launched, threads = tw.exchange.Direct.arrive, threading.Event(), set[str]()

    def held(*args):
        assert launched.wait(600.0)
        threads.update(thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire-inbound"))
        return decode(*args)

    monkeypatch.setattr(tw.exchange.Direct, "arrive", held)
    (group,), model = tw.ThreadGroup.create(1), toy()
    with tw.Replica(IN_PARTS, model, adamw(model), group) as replica:
        for step in (1, 2):
            inner_step(model, replica.optimizer, *batch(0, 0, step))
        flying = len(replica.in_flight)
        launched.set()
    assert flying == 3 and len(threads) == 1


def test_token_counts_and_policy_messages_have_stages_of_their_own() -> None:
    """Their numbers count from the end, so that no exchange has them."""
    posted, flags = set(), set[int]()

    class Noting(WrappedGroup):
        def post(self, tag, send, recv, purpose="packet", sized=None):
            posted.add((purpose, tag >> 9 & 31, tag & 0x1FF))
            if purpose == "policy":
                flags.update(flags_of(packet) for packet in send.values())
            return self.group.post(tag, send, recv, purpose, sized)

    def replica(group: tw.Group) -> None:
        model = toy()
        with tw.Replica(METHODS["l_greco"], model, adamw(model), Noting(group), tokens=5.0) as attached:
            for step in range(1, 10):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))

    tw.run_threads(2, replica, timeout=600.0)
    assert {("packet", 0, 0), ("tokens", 30, 0), ("policy", 31, 0), ("frozen parameters", 31, 1)} <= posted
    of_stages = {purpose: (stage, index) for purpose, stage, index in posted if stage >= 30}
    assert set(of_stages) == {"tokens", "policy", "frozen parameters"} and flags == {0}
    assert len(set(of_stages.values())) == 3, "each has a tag of its own"


def test_a_round_replaces_the_memory_of_its_aggregate() -> None:
    def replica(group: tw.Group) -> bool:
        model = toy()
        with tw.Replica(METHODS["with histories, in shards"], model, adamw(model), group) as attached:
            for step in range(1, 5):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))
            return bool(attached.state()[0]["0.aggregate.history0"].any())

    assert tw.run_threads(2, replica, timeout=600.0) == [True, True]


@pytest.mark.parametrize(
    ("strategy", "tokens", "first", "rounds"),
    [(tw.local_sgd(every=2), None, 0, [True, False]), (tw.local_sgd(every=2), None, 1025, [False]),
     (tw.local_sgd(every=2), 5.0, 0, [True, False]), (tw.data_parallel(), None, 0, [True, True, False])],
)  # fmt: skip
def test_a_round_without_a_replica_that_has_finished_names_it(strategy, tokens, first, rounds) -> None:
    """The records say which rounds are over. A round that fails always has one; of late ones that succeed, not all have."""
    over = []

    def replica(group: tw.Group) -> None:
        def observer(event: str, step: int, **fields: object) -> None:
            if event == "wire" and group.rank == 0:
                over.append(fields["over"])

        model = toy()
        with tw.Replica(strategy, model, adamw(model), group, tokens=tokens, observer=observer) as attached:
            attached._driver.training.fragments[0].rounds = first
            for step in range(1, 3 if group.rank else 5):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))

    def told(group: tw.Group) -> str:
        with pytest.raises(tw.DisagreementError) as caught:
            replica(group)
        return str(caught.value)

    more = 3 if isinstance(strategy.signal, Gradients) else 4
    said = tw.run_threads(2, told, timeout=600.0)
    assert f"replica 1 has finished after 2 inner steps, this replica has counted {more}" in said[0]
    assert f"replica 0 has counted {more} inner steps, this replica has counted 2" in said[1]
    assert over == rounds


@pytest.mark.parametrize("strategy", [tw.diloco(every=2), tw.data_parallel(), tw.lab.recipes.d_psgd(), DENSE])
def test_replicas_with_unequal_numbers_of_steps_are_told_at_once(strategy) -> None:
    """Both groups stay open, and each replica has something to exchange at the end, for which it would wait until the time-out."""

    def replica(group: tw.Group) -> str:
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with pytest.raises(tw.DisagreementError) as caught:
            with tw.Replica(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1), group) as attached:
                for _ in range(6 + 2 * group.rank):
                    model(torch.ones(2, 2)).sum().backward()
                    attached.optimizer.step()
        return str(caught.value)

    said = tw.run_threads(2, replica, timeout=600.0)
    assert "replica 0 has finished after 6 inner steps, this replica has counted " in said[1]
    assert re.search("replica 1 has (counted|finished after) [78] inner steps, this replica has counted 6", said[0])


def test_a_replica_whose_loop_fails_is_named_at_once() -> None:
    """Its process may live on, as in a notebook, so that its group stays open."""
    heard = threading.Event()

    def replica(group: tw.Group) -> None:
        model = toy()
        with pytest.raises((tw.LinkError, ZeroDivisionError)) as caught:
            with tw.Replica(tw.local_sgd(every=2), model, adamw(model), group) as attached:
                for step in range(1, 5):
                    inner_step(model, attached.optimizer, *batch(0, group.rank, step))
                    _ = 1 // (3 - step) if group.rank else 0
        if group.rank:
            heard.wait()
            return
        heard.set()
        assert "replica 1 closed its Replica after 3 inner steps, before it had finished" in str(caught.value)

    tw.run_threads(2, replica, timeout=600.0)
