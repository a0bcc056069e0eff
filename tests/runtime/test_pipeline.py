"""Bookkeeping beside rounds in the air: the duration of a step, and what the ranks of a site have seen."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from strategies import METHODS

import thinwire as tw
from thinwire.comm.group import WrappedGroup
from thinwire.errors import LinkError
from thinwire.packet import flags_of
from thinwire.runtime.pipeline import ROUNDS, WEIGHTS, StepTimer, or_flags
from thinwire.testing.toy import adamw, batch, inner_step, toy

# three fragments, whose rounds are in the air at the same time
IN_PARTS = tw.Strategy(schedule=tw.pieces.schedule.Every(2, 1), partition=tw.pieces.partition.Strided(2))


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
        levels = tw.codecs.Levelled((tw.codecs.Int(8), tw.codecs.Sign()))  # chosen by the rounds that have arrived
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
            posted.add((purpose, tag >> 9 & 31))
            if purpose == "policy":
                flags.update(flags_of(packet) for packet in send.values())
            return self.group.post(tag, send, recv, purpose, sized)

    def replica(group: tw.Group) -> None:
        model = toy()
        with tw.Replica(METHODS["l_greco"], model, adamw(model), Noting(group), tokens=5.0) as attached:
            for step in range(1, 10):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))

    tw.run_threads(2, replica, timeout=600.0)
    assert {("packet", 0), ("tokens", 30), ("policy", 31)} <= posted
    assert {purpose for purpose, stage in posted if stage >= 30} == {"tokens", "policy"} and flags == {0}


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
     (tw.local_sgd(every=2), 5.0, 0, [True]), (tw.data_parallel(), None, 0, [True, True, False])],
)  # fmt: skip
def test_a_round_without_a_replica_that_has_finished_names_it(strategy, tokens, first, rounds) -> None:
    """The records say which rounds are over. A round whose delta has not departed has none, nor has every later one that succeeds."""
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

    with pytest.raises(tw.DisagreementError, match="replica 1 has finished after 2"):
        tw.run_threads(2, replica, timeout=600.0)
    assert over == rounds
