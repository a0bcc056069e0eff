"""Replicas that do unlike things are told where each one is, and a replica that lives is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire import checkpoint
from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup
from thinwire.drivers.monitor import _LAYOUT, PATIENCE, Monitor
from thinwire.testing.toy import adamw, batch, inner_step, toy

Does = Callable[[tw.Replica], object]


@pytest.fixture
def made() -> Iterator[Callable[..., Monitor]]:
    """Makes monitors, and closes them at the end."""
    with ExitStack() as stack:
        yield lambda *args: stack.enter_context(closing(Monitor(*args)))


def _resume(replica: tw.Replica) -> None:
    replica.load_state(*replica.state())


def _looks_for_a_checkpoint(replica: tw.Replica) -> None:
    checkpoint.newest_common(Path("none"), replica.group)


@pytest.mark.parametrize("strategy", [tw.diloco(every=4), tw.data_parallel(), tw.lab.recipes.d_psgd()], ids=repr)
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (lambda replica: replica.mean(1.0), None, "the gather of metric after 2 inner steps"),
        (None, lambda replica: replica.mean(1.0), "the gather of metric after 2 inner steps"),
        (lambda replica: [replica.mean(1.0), replica.mean(2.0)], lambda replica: replica.mean(1.0), "gather of metric"),
        (_resume, None, "load_state after 2 inner steps"),
        (_resume, lambda replica: replica.mean(1.0), "load_state after 2 inner steps"),
        (lambda replica: replica.finish(), lambda replica: replica.mean(1.0), "after 2 inner steps"),
        (None, _looks_for_a_checkpoint, "the gather of resume after 2 inner steps"),
    ],
    ids=["mean", "mean on the other", "two and one", "load_state", "unlike", "finish", "newest_common"],
)
def test_a_collective_of_some_replicas_names_both_sides(strategy, first: Does, second: Does, words: str) -> None:
    """No link is at fault, and no time-out ends the wait."""

    def replica(group: tw.ThreadGroup) -> str:
        model = toy()
        attached = tw.Replica(strategy, model, adamw(model), group)
        with closing(attached), pytest.raises(tw.DisagreementError) as caught:
            for step in range(1, 10):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))
                if step == 2 and (does := second if group.rank else first):
                    does(attached)
            attached.finish()
        return str(caught.value)

    for said in tw.run_threads(2, replica, timeout=600.0):
        assert words in said and "replica 0" in said and "replica 1" in said


def test_schedules_that_follow_unlike_learning_rates_name_the_learning_rate() -> None:
    def replica(group: tw.ThreadGroup) -> str:
        model = toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(tw.DisagreementError) as caught, tw.Replica(tw.recipes.qsr(), model, optimizer, group):
            for step in range(1, 60):
                inner_step(model, optimizer, *batch(0, group.rank, step))
                optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step * group.rank)
        return str(caught.value)

    said = tw.run_threads(2, replica, timeout=600.0)
    assert all("learning rate" in text for text in said)


@pytest.mark.parametrize("raised", [RuntimeError("out of memory"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_replica_that_fails_in_its_loop_ends_the_waits_of_the_others(raised: BaseException) -> None:
    """Its group stays open, as in a program that goes on."""
    failed = threading.Event()

    def replica(group: tw.ThreadGroup) -> str:
        model = toy()
        try:
            with tw.Replica(tw.diloco(every=4), model, adamw(model), group) as attached:
                for step in range(1, 10):
                    inner_step(model, attached.optimizer, *batch(0, group.rank, step))
                    if group.rank and step == 5:
                        raise raised
        except BaseException as error:
            if group.rank == 0:
                failed.set()
            failed.wait()
            return f"{type(error).__name__}: {error}"
        raise AssertionError

    first, _ = tw.run_threads(2, replica, timeout=600.0)
    assert first.startswith("LinkError: replica 1 closed its Replica after 5 inner steps")


def test_a_replica_that_answers_is_not_lost_however_late_it_is(made, monkeypatch) -> None:
    """Replica 0 waits for three times the group's time-out. The clock goes on only when replica 1 has answered."""
    now, over = [0.0], threading.Event()
    monkeypatch.setattr("thinwire.drivers.monitor.time", SimpleNamespace(monotonic=lambda: now[0]))
    warnings = []

    def replica(group: tw.ThreadGroup) -> None:
        ledger = Ledger()
        monitor = made(CountedGroup(group, ledger), lambda step, text: warnings.append(text))
        if group.rank:
            monitor.own_step = lambda: 3
            over.wait()
            return
        answers = 0

        def round_is_over(seconds: float) -> bool:
            nonlocal answers
            if ledger.received("monitor") > answers * _LAYOUT.size:
                answers += 1
                now[0] += 30.0  # any patience is over
            elif answers == 0:
                now[0] = min(10.0, now[0] + PATIENCE / 2)  # the first question is due by then
            return over.wait(0.001) or answers == 12

        try:
            monitor.wait(round_is_over, monitor.begin("round 0 of fragment 0", 5))
        finally:
            over.set()

    tw.run_threads(2, replica, timeout=90.0)
    assert now[0] >= 300.0
    assert "in round 0 of fragment 0 after 5 inner steps: replica 1 lives and was last seen after 3" in warnings[0]


def test_a_replica_that_gives_no_sign_of_life_is_lost_after_the_time_out() -> None:
    over = threading.Event()

    def replica(group: tw.ThreadGroup) -> None:
        model = toy()
        attached = tw.Replica(tw.diloco(every=1), model, adamw(model), group)
        if group.rank:
            attached._driver._flights.pipeline.monitor.close()  # as if its machine stood still
            over.wait()
            attached.close()
            return
        with pytest.raises(tw.LinkError, match=r"replica 1 has given no sign of life for 1 s.*round 0 of fragment 0"):
            inner_step(model, attached.optimizer, *batch(0, 0, 1))
        attached.close()
        over.set()

    tw.run_threads(2, replica, timeout=1.0)


def test_nothing_is_sent_while_nobody_waits_for_long() -> None:
    ledgers = [Ledger() for _ in range(2)]

    def replica(group: tw.ThreadGroup) -> None:
        model = toy()
        counted = CountedGroup(group, ledgers[group.rank])
        with tw.Replica(tw.diloco(every=2), model, adamw(model), counted) as attached:
            for step in range(1, 9):
                inner_step(model, attached.optimizer, *batch(0, group.rank, step))
            attached.mean(1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.drivers.monitor.PATIENCE", 600.0)  # of a machine under any load
        tw.run_threads(2, replica, timeout=6000.0)
    assert [ledger.sent("monitor") for ledger in ledgers] == [_LAYOUT.size] * 2  # that it has finished


def test_a_peer_that_left_early_is_named_with_its_step(made):
    """Replica 1 finishes after 300 steps, and replica 2 closes its Replica after as many; replica 0 needed them until then."""

    def replica(group: tw.ThreadGroup) -> None:
        monitor = made(group)
        if group.rank:
            monitor.tell(300, finished=group.rank == 1)
            monitor.tell(301)  # only the first counts
            return
        with pytest.raises(tw.DisagreementError, match=r"replica 1 has finished after 300.* has counted 301"):
            monitor.wait(lambda seconds: False, monitor.begin("round 0 of fragment 0", 301))

    tw.run_threads(3, replica)


def test_a_replica_that_finishes_says_that_it_waits_for_all(made):
    def replica(group: tw.ThreadGroup) -> None:
        monitor = made(group)
        if group.rank:
            monitor.tell(5, finished=False)
            return
        with pytest.raises(tw.LinkError, match=r"replica 1 closed .* has finished after 5 inner steps and waits for"):
            monitor.agree(5)

    tw.run_threads(2, replica)


def test_a_replica_that_closes_its_group_at_the_end_has_sent_its_number(made):
    """What is still on the uplink then would never arrive."""
    told = threading.Event()

    def replica(group: tw.ThreadGroup) -> None:
        linked = LinkedGroup(group, Link(1e9, delay_seconds=0.0 if group.rank else 0.3))
        monitor = made(linked)
        if group.rank == 0:
            told.wait()
        monitor.tell(5)
        told.set()
        monitor.agree(5)
        linked.close()

    tw.run_threads(2, replica)
