"""Simulated faults: whatever happens to one of three replicas, at any phase, the others agree and continue."""

from __future__ import annotations

import time

import pytest
from voted_rounds import ROUNDS, RoundLog, check_one_outcome, finished, hold_rounds, hold_rounds_of_all

from thinwire.errors import LinkError
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.cluster import Killed, ThreadRendezvous

PHASES = ["call", "called", "connect", "put", "all", "settle", "wait", "post"]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_others_go_on_when_a_replica_is_killed_at_any_phase(phase, nth):
    """The others continue, and no two members learn different outcomes."""
    cluster = SimulatedCluster()
    cluster.at("b", phase, lambda: cluster.kill("b"), nth)
    results, logs = hold_rounds_of_all(cluster, "abc")
    assert finished(results["a"]) and finished(results["c"])
    if isinstance(results["b"], Killed):
        assert logs["a"].members[-1] == ("a", "c") or logs["b"].round == ROUNDS - 1  # or it died in the last round
    else:  # that phase did not occur so often
        assert phase in ("connect", "settle", "wait") and finished(results["b"])
    assert cluster.time.now < 100


@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_frozen_at_any_phase_learns_the_outcome_when_it_thaws(phase):
    """For the others it is as if killed. After it thaws, it learns the outcome and becomes a member again."""
    cluster = SimulatedCluster()

    def freeze():
        cluster.freeze("b")
        cluster.later(40.0, lambda: cluster.thaw("b"))

    cluster.at("b", phase, freeze, nth=1)
    logs = {name: RoundLog() for name in "abc"}

    def run(name):
        def ready(number):
            """Arranges that b settles, or waits, in the first round."""
            if number == 0 and phase == ("settle" if name == "b" else "wait"):
                ThreadRendezvous(cluster, name).sleep(1.0)
            return True

        membership = cluster.membership(name)
        hold_rounds(membership, ROUNDS, logs[name], ready=ready)
        while cluster.time.now < 100.0:  # until b has thawed and calls
            ThreadRendezvous(cluster, name).sleep(5.0)
        return hold_rounds(membership, 2 * ROUNDS, logs[name])

    results = cluster.play({name: run for name in "abc"})
    check_one_outcome(logs.values())
    assert all(isinstance(log, RoundLog) and log.round == 2 * ROUNDS for log in results.values()), results
    assert logs["a"].members[-1] == ("a", "b", "c")
    assert ("a", "c") in logs["a"].members


@pytest.mark.parametrize("all_ballots", [True, False])
def test_the_ballot_of_a_member_that_dies_counts(all_ballots):
    """All ballots are there, so the others find yes at the deadline, though no member proposed it."""
    cluster = SimulatedCluster()
    cluster.at("b", "all", lambda: cluster.kill("b"))  # it has cast its ballot and reads those of the others

    def run(name):
        view = cluster.membership(name).next_view({})
        if name != "b":
            ThreadRendezvous(cluster, name).sleep(1.0)
        return view.decide("land", all_ballots or name != "c", 20.0)

    results = cluster.play({name: run for name in "abc"})
    assert isinstance(results["b"], Killed) and results["a"] is results["c"] is all_ballots


def test_a_late_ballot_changes_no_outcome():
    cluster = SimulatedCluster()

    def run(name):
        view = cluster.membership(name).next_view({})
        if name == "b":
            ThreadRendezvous(cluster, name).sleep(30.0)
        began = cluster.time.now
        first, seconds = view.decide("land", True, 20.0), cluster.time.now - began
        return first, view.decide("land", False, 20.0), seconds

    results = cluster.play({name: run for name in "abc"})
    assert results == {"a": (False, False, 20.0), "c": (False, False, 20.0), "b": (False, False, 0.0)}


def test_a_cut_link_excludes_the_younger_member_until_it_heals():
    cluster = SimulatedCluster()

    def ready(number):
        if number == 2:
            cluster.cut("a", "b")
        return True

    logs = {name: RoundLog() for name in "abc"}

    def run(name):
        membership = cluster.membership(name)
        hold_rounds(membership, 4, logs[name], seconds=30.0, ready=ready if name == "a" else lambda number: True)
        cluster.heal("a", "b")
        return hold_rounds(membership, 8, logs[name], seconds=300.0)

    def patient(name):
        while True:
            try:
                return run(name)
            except LinkError as error:  # left out in the meantime
                logs[name].failed.append(str(error))

    results = cluster.play({"a": run, "b": patient, "c": run})
    check_one_outcome(logs.values())
    assert ("a", "c") in logs["a"].members and logs["a"].members[-1] == ("a", "b", "c"), results
    assert any("b: no link between it and a" in text for text in logs["c"].left_out)


@pytest.mark.parametrize("seconds", [2.0, 8.0])
def test_a_slow_link_excludes_nobody(seconds):
    cluster = SimulatedCluster()
    cluster.slow("a", "b", seconds)
    results, logs = hold_rounds_of_all(cluster, "abc")
    assert all(finished(log) for log in results.values()) and not logs["a"].failed
    assert cluster.time.now >= 2 * ROUNDS * seconds  # lengths, then bodies


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_damaged_message_fails_one_round_for_all(nth):
    """The damage is in the greeting, or in a round, in lengths or bodies. No member accepts the message."""
    cluster = SimulatedCluster()
    cluster.damage("b", "a", nth)
    retries = []
    results, logs = hold_rounds_of_all(
        cluster, "abc", observe=lambda kind, _: retries.append(kind) if kind == "retry" else None
    )
    assert all(finished(log) for log in results.values()), results
    if nth == 1:
        assert retries and all(logs["a"].decided.values())
    else:
        assert list(logs["a"].decided.values()).count(False) == 1


def test_a_restarted_replica_becomes_a_member_again():
    cluster = SimulatedCluster()
    cluster.at("b", "put", lambda: cluster.kill("b"), nth=2)
    logs = {name: RoundLog() for name in ("a", "b", "c", "again")}

    def again(name):
        try:
            hold_rounds(cluster.membership(name), 40, logs[name])
        except Killed:
            cluster.revive(name)
        return hold_rounds(cluster.membership(name), 40, logs["again"])

    def run(name):
        return hold_rounds(cluster.membership(name), 40, logs[name])

    results = cluster.play({"a": run, "b": again, "c": run})
    check_one_outcome(logs.values())
    assert all(isinstance(log, RoundLog) and log.round == 40 for log in results.values()), results
    assert logs["again"].members[-1] == ("a", "b", "c") and logs["a"].rebuilt <= 4


def test_a_killed_replica_returns_in_the_same_virtual_instant():
    """However late its thread is scheduled; otherwise the others would be done before it returns."""
    cluster = SimulatedCluster()
    cluster.at("b", "put", lambda: cluster.kill("b"))

    def run(name):
        try:
            cluster.membership(name).next_view({}).decide("land", True, 20.0)
        except Killed:
            before = cluster.time.now
            time.sleep(0.05)
            assert cluster.time.now == before
            cluster.revive(name)
        return "told"

    assert cluster.play({name: run for name in "abc"}) == {name: "told" for name in "abc"}


def test_the_same_faults_give_the_same_result():
    def once():
        cluster = SimulatedCluster()
        cluster.at("b", "put", lambda: cluster.kill("b"), nth=2)
        cluster.damage("c", "a", 7)
        cluster.slow("a", "c", 0.5)
        _, logs = hold_rounds_of_all(cluster, "abc")
        return cluster.time.now, [(log.members, list(log.decided.values()), log.rebuilt) for log in logs.values()]

    assert once() == once()


def test_a_deadlock_of_all_replicas_is_an_error():
    cluster = SimulatedCluster()

    def run(name):
        with cluster.time:
            cluster.time.wait_for(name, lambda: False)

    assert isinstance(cluster.play({"a": run})["a"], RuntimeError)
