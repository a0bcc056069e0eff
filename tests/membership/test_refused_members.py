"""Replicas that a group refuses: one name twice, another run or version, an unacceptable status."""

from __future__ import annotations

from contextlib import suppress

import pytest
from voted_rounds import ROUNDS, RoundLog, finished, hold_rounds

from thinwire.errors import DisagreementError, LinkError, PeerError
from thinwire.membership import Membership
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.cluster import ThreadRendezvous
from thinwire.membership.view import Presence
from thinwire.version import PROTOCOLS


def two_names(cluster):
    """Starts two threads, `b` and `b2`, that both use the name `b`."""

    def run(name):
        membership = Membership(ThreadRendezvous(cluster, name), name[0])
        return hold_rounds(membership, ROUNDS, RoundLog(), seconds=60.0)

    return cluster.play({name: run for name in ("a", "b", "b2", "c")})


def test_two_replicas_with_one_name_are_refused():
    results = two_names(SimulatedCluster())
    refused = [error for error in results.values() if isinstance(error, DisagreementError)]
    assert len(refused) == 1 and "has the name 'b'" in str(refused[0]) and "its own name" in str(refused[0])
    assert sum(finished(log) for log in results.values()) == 3


@pytest.mark.parametrize("what", ["protocols", "run", "model"])
def test_another_run_or_version_is_refused_by_name(what):
    cluster = SimulatedCluster()

    def run(name):
        other = {what: "that"} if name == "b" else {}
        membership = cluster.membership(name, facts={"run": "this", "model": "this"} | other)
        return hold_rounds(membership, ROUNDS, RoundLog())

    results = cluster.play({name: run for name in "abc"})
    assert finished(results["a"]) and finished(results["c"])
    assert isinstance(results["b"], DisagreementError) and f"{what}: that there" in str(results["b"])


def test_two_unlike_newcomers_warn_at_once_and_neither_is_refused():
    """No other member exists, so it is open which of them is wrong; the next one decides."""
    cluster, told, ended = SimulatedCluster(), {}, {}

    def run(name):
        def observe(kind, fields):
            if kind == "retry" and "left out" in fields["reason"]:
                told.setdefault(name, (cluster.time.now, fields["reason"]))

        run_of = {"a": "that", "b": "this", "c": "this"}[name]
        membership = cluster.membership(name, facts={"run": run_of}, observe=observe)
        if name == "c":
            membership.sleep(30.0)
        try:
            return hold_rounds(membership, ROUNDS, RoundLog())
        except DisagreementError as error:
            ended[name] = cluster.time.now
            return error

    results = cluster.play({name: run for name in "abc"})
    assert told["a"][0] < 10 and "b was left out: run: this there, that here" in told["a"][1]
    assert told["b"][0] < 10 and "a was left out: run: that there, this here" in told["b"][1]
    assert isinstance(results["a"], DisagreementError) and ended["a"] >= 30.0
    assert finished(results["b"]) and finished(results["c"])


def test_a_newcomer_that_differs_from_a_majority_is_refused_before_a_group_exists():
    """Two equal members outvote one, but not two."""
    runs = {"a": "that", "b": "this", "c": "this", "d": "that"}

    def run(name):
        try:
            return cluster.membership(name, facts={"run": runs[name]}, least=4).next_view({}, 20.0)
        except (DisagreementError, LinkError) as error:
            return type(error)

    for names, ended in (("abc", "a"), ("abcd", "")):
        cluster = SimulatedCluster()
        results = cluster.play({name: run for name in names})
        assert results == {name: DisagreementError if name in ended else LinkError for name in names}


@pytest.mark.parametrize("secret", [b"", bytes(32)], ids=["open", "secret"])
def test_a_group_refuses_an_unlike_newcomer_only_where_all_hold_the_secret(secret):
    cluster = SimulatedCluster()

    def run(name):
        membership = cluster.membership(name, facts={"run": name}, least=1 if name == "a" else 2, secret=secret)
        if name == "b":
            membership.sleep(10.0)
        try:
            while cluster.time.now < 30.0:
                membership.next_view({}, 10.0)
                membership.sleep(1.0)
            return "trains"
        except (DisagreementError, LinkError) as error:
            return type(error)

    assert cluster.play({name: run for name in "ab"}) == {
        "a": "trains",
        "b": DisagreementError if secret else LinkError,
    }


def test_a_member_with_a_refused_status_is_excluded_and_named_once():
    cluster, told = SimulatedCluster(), []
    facts = {"protocols": str(PROTOCOLS)}

    def check(status, name):
        if status["step"] > 9:
            raise PeerError(f"{name} is at step {status['step']}")

    def run(name):
        def observe(kind, fields):
            if kind == "retry":
                told.append((name, fields["reason"], fields["seconds"]))

        membership, views = cluster.membership(name, observe=observe), []
        while cluster.time.now < 20.0:
            views.append(membership.next_view({"step": 1}, 50.0, check))
            membership.sleep(1.0)
        assert all([member.name for member in view.members] == ["a", "c"] for view in views)
        return {text for view in views for text in view.left_out}

    def ahead(name):
        rendezvous = ThreadRendezvous(cluster, name)
        rendezvous.sleep(5.0)  # otherwise it would be called alone
        for calls in range(1, 20):
            with suppress(LinkError):
                rendezvous.call(Presence(name, "f" * 16, calls, facts=facts, status={"step": 10}), 2.0)
        return "over"

    said = "b is at step 10"
    assert cluster.play({"a": run, "b": ahead, "c": run}) == {"a": {f"b: {said}"}, "b": "over", "c": {f"b: {said}"}}
    assert sorted(one for one in told if one[1] == said) == [("a", said, 0.0), ("c", said, 0.0)]
