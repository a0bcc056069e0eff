"""Views and votes of simulated replicas: who joins and leaves, who is waited for, what a lighthouse restart changes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
import torch
from voted_rounds import ROUNDS, RoundLog, finished, hold_rounds, hold_rounds_of_all

from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup, gather
from thinwire.errors import ConfigurationError, LinkError, PacketError, UndecidedError
from thinwire.membership import Membership, Timeouts
from thinwire.membership.registry import JOIN_SECONDS
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.cluster import Killed, ThreadRendezvous


def test_a_healthy_run_builds_one_group_and_votes_once_a_round():
    cluster = SimulatedCluster()
    results, _ = hold_rounds_of_all(cluster, "abc")
    for log in results.values():
        assert finished(log) and log.rebuilt == 1 and not log.failed
        assert list(log.decided.values()) == [True] * ROUNDS and set(log.members) == {("a", "b", "c")}
    assert cluster.time.now == 2.0  # two heartbeats at the beginning, in which they learn of each other
    assert len(cluster.lighthouse.written) <= 8  # keys of past views are deleted


def test_keys_of_a_view_whose_member_died_are_deleted_by_the_others_after_more_deaths():
    cluster, mortal = SimulatedCluster(), "cdefghijk"
    for nth, name in enumerate(mortal, 1):
        cluster.at(name, "all", partial(cluster.kill, name), nth=2 * nth)
    _, logs = hold_rounds_of_all(cluster, "ab" + mortal, rounds=14)
    written = cluster.lighthouse.written
    # Keys are kept until new processes of the dead vote.
    kept = [view for view in logs["a"].decided if f"{view}/land/outcome" in written]
    ballots = [f"{view}/land/{rank}" in written for view in kept for rank in (0, 1)]
    assert ballots == [False] * 2 * (len(kept) - 7) + [True] * 14


def test_a_third_joins_and_one_leaves():
    cluster = SimulatedCluster()
    logs = {name: RoundLog() for name in "abc"}

    def run(name):
        if name == "c":
            ThreadRendezvous(cluster, name).sleep(20.0)
        membership = cluster.membership(name)
        hold_rounds(membership, 3 if name != "c" else 6, logs[name])
        if name == "a":
            membership.close()
            with pytest.raises(LinkError, match="has left"):
                membership.next_view({})
            return logs[name]
        while cluster.time.now < 30.0:
            ThreadRendezvous(cluster, name).sleep(1.0)
        return hold_rounds(membership, 9, logs[name])

    results = cluster.play({name: run for name in "abc"})
    assert [log.round for log in results.values()].count(9) == 2, results
    assert logs["a"].members[0] == ("a", "b") and logs["b"].members[-1] == ("b", "c")


def test_a_lighthouse_restart_keeps_the_group_and_its_rounds():
    """The round in flight is undecided or dropped. The group stays, no member is left out, and rounds continue."""
    cluster = SimulatedCluster()

    def restart():
        cluster.lighthouse.stop()
        cluster.later(13.0, cluster.lighthouse.start)

    cluster.at("b", "all", restart, nth=2)
    results, logs = hold_rounds_of_all(cluster, "abc")
    assert all(finished(log) for log in results.values()), results
    assert sum(log.undecided for log in logs.values()) >= 1
    assert all(set(log.members) == {("a", "b", "c")} for log in logs.values())


class Later(ThreadRendezvous):
    """Finds a restarted lighthouse later than the others do."""

    def _find(self, seconds):
        super()._find(seconds)
        if self._cluster.lighthouse.epoch:
            self.sleep(4.0)


def test_the_grace_begins_when_a_returned_lighthouse_is_found():
    """The outage is longer than any grace, and no round is held without the member that finds it last."""
    cluster = SimulatedCluster()

    def restart():
        cluster.lighthouse.stop()
        cluster.later(60.0, cluster.lighthouse.start)

    def run(name):
        rendezvous = (Later if name == "c" else ThreadRendezvous)(cluster, name)
        return hold_rounds(Membership(rendezvous, name, timeouts=Timeouts(grace=5.0)), ROUNDS, logs[name])

    cluster.at("b", "all", restart, nth=2)
    logs = {name: RoundLog() for name in "abc"}
    results = cluster.play(dict.fromkeys("abc", run))
    assert all(finished(log) for log in results.values()), results
    assert cluster.time.now > 60.0 and all(set(log.members) == {("a", "b", "c")} for log in logs.values())


def test_a_lighthouse_that_stays_away_is_an_error_within_its_timeout():
    cluster = SimulatedCluster()
    cluster.lighthouse.stop()
    told = []
    results = cluster.play(
        {"a": lambda name: cluster.membership(name, observe=lambda kind, _: told.append(kind)).next_view({}, 9.0)}
    )
    assert isinstance(results["a"], LinkError) and "lighthouse" in str(results["a"]) and "retry" in told
    assert cluster.time.now == 9.0


@pytest.mark.parametrize(("late", "members"), [(9.0, "abc"), (12.0, "ab")])
@pytest.mark.parametrize("newcomer", [False, True])
def test_a_late_member_is_waited_for_within_the_grace_only(late, members, newcomer):
    """The same holds if a joiner has called for long: it shortens no member's grace."""
    cluster = SimulatedCluster()
    timeouts = Timeouts(grace=10.0)

    def run(name):
        membership = cluster.membership(name, timeouts=timeouts)
        if name == "d":
            ThreadRendezvous(cluster, name).sleep(20.0)
        else:
            membership.next_view({})
            ThreadRendezvous(cluster, name).sleep(100.0 + late * (name == "c"))
        view = membership.next_view({}, 200.0)
        ThreadRendezvous(cluster, name).sleep(60.0)
        return "".join(m.name for m in view.members)

    results = cluster.play({name: run for name in ("abcd" if newcomer else "abc")})
    assert results["a"] == results["b"] == members + "d" * newcomer


def test_a_dead_member_is_not_waited_for():
    """It accepts no connections, although the lighthouse still lists it."""
    cluster = SimulatedCluster()

    def run(name):
        membership = cluster.membership(name, timeouts=Timeouts(grace=1000.0, view=3000.0))
        membership.next_view({})
        if name == "c":
            cluster.kill(name)
        membership.next_view({})
        return cluster.time.now

    results = cluster.play({name: run for name in "abc"})
    assert results["a"] == pytest.approx(2.0 + JOIN_SECONDS + 0.1)


@pytest.mark.parametrize(
    ("phase", "landed", "seconds"), [("put", False, 5.0), ("all", True, 0.0), ("settle", True, 0.0)]
)
def test_a_vote_ends_when_a_member_has_died_before_or_after_its_ballot(phase, landed, seconds):
    """It votes last. After its death the others wait for no more than its heartbeats, and not for the time of the vote."""
    cluster = SimulatedCluster(heartbeat_timeout=5.0)
    cluster.at("c", phase, lambda: cluster.kill("c"))

    def run(name):
        view = cluster.membership(name).next_view({})
        if name == "c":
            ThreadRendezvous(cluster, name).sleep(1.0)
        began = cluster.time.now + (name != "c")
        return view.decide("land", True, seconds=15.0), cluster.time.now - began

    results = cluster.play({name: run for name in "abc"})
    assert results["a"] == results["b"] == (landed, seconds) and isinstance(results["c"], Killed)


@pytest.mark.parametrize("leaves", [False, True])
def test_who_votes_late_is_not_taken_for_the_one_that_voted_no(leaves):
    """d votes no at once, or calls for another view and does not vote; c votes seconds later, and is in time."""
    cluster = SimulatedCluster()

    def run(name):
        membership = cluster.membership(name)
        view = membership.next_view({})
        if name == "d" and leaves:
            with suppress(LinkError):
                membership.next_view({}, seconds=20.0)
            return None
        if name == "c":
            ThreadRendezvous(cluster, name).sleep(3.0)
        assert view.decide("land", name != "d", 15.0) is False
        return view.dissenters("land")

    results = cluster.play({name: run for name in "abcd"})
    assert results["a"] == results["b"] == {"d": "did not vote in time" if leaves else "voted no"}


def test_fewer_members_than_the_minimum_form_no_view():
    cluster = SimulatedCluster()

    def run(name):
        with pytest.raises(LinkError, match=r"found no view within 40 s: 2 of at least 3 members came \(a, b\)"):
            cluster.membership(name, least=3).next_view({}, 40.0)
        return "told"

    assert cluster.play({name: run for name in "ab"}) == {"a": "told", "b": "told"}


def test_a_replica_is_alone_in_a_view_only_where_allowed():
    cluster = SimulatedCluster()

    def run(name):
        view = cluster.membership(name, least=1).next_view({})
        return view.group.size, view.decide("land", True, 1.0), view.decide("other", False, 1.0)

    assert cluster.play({"a": run}) == {"a": (1, True, False)}
    assert cluster.time.now == 2.0


def test_all_members_get_the_statuses_in_rank_order():
    cluster = SimulatedCluster()

    def run(name):
        membership = cluster.membership(name)
        view = membership.next_view({"step": ord(name)})
        if name == "b":
            view.close()
        assert membership.next_view({"step": 0}).rebuilt, "one of them has lost its group"
        return view.group.rank, [(m.name, m.status) for m in view.members]

    results = cluster.play({name: run for name in "bca"})
    told = [("a", {"step": 97}), ("b", {"step": 98}), ("c", {"step": 99})]
    assert results == {name: (rank, told) for rank, name in enumerate("abc")}


def test_a_kept_group_counts_bytes_in_the_ledger():
    ledgers = {name: Ledger() for name in "ab"}
    cluster = SimulatedCluster()

    def run(name):
        membership = cluster.membership(
            name, wrap=lambda group: LinkedGroup(CountedGroup(group, ledgers[name]), Link(8e9))
        )
        groups = set()
        for _ in range(3):
            view = membership.next_view({})
            groups.add(id(view.group))
            assert gather(view.group, b"12345", 5, "packet") == [b"12345"] * 2
        return len(groups)

    assert cluster.play({"a": run, "b": run}) == {"a": 1, "b": 1}
    for ledger in ledgers.values():
        assert ledger.sent("packet") == ledger.received("packet") == 3 * (8 + 5)
        assert ledger.sent("view") == 16  # the greeting of a new group, once


def test_an_undecided_vote_is_a_link_error_and_a_no_is_known():
    cluster = SimulatedCluster()

    def run(name):
        view = cluster.membership(name).next_view({})
        if name == "a":
            cluster.lighthouse.stop()
        else:
            ThreadRendezvous(cluster, name).sleep(1.0)
        assert view.decide("no", False, 5.0) is False
        with pytest.raises(UndecidedError, match="'yes': this replica voted yes and cannot learn"):
            view.decide("yes", True, 5.0)
        return "told"

    assert issubclass(UndecidedError, LinkError)
    assert cluster.play({"a": run, "b": run}) == {"a": "told", "b": "told"}


@pytest.mark.parametrize("settings", [{"least": 0}, {"least": True}, {"least": 2.5}, {"facts": {"run": object()}}])
def test_invalid_memberships_are_refused(settings):
    with pytest.raises(ConfigurationError):
        SimulatedCluster().membership("a", **settings)


def test_wrong_message_sizes_are_refused():
    cluster = SimulatedCluster()

    def run(name):
        group = cluster.membership(name, timeouts=Timeouts()).next_view({}).group
        nbytes = 3 if name == "a" else 4
        message, buffer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        with pytest.raises(PacketError):
            group.post(1, {1 - group.rank: message}, {1 - group.rank: buffer}).wait()
        return "told"

    assert cluster.play({"a": run, "b": run}) == {"a": "told", "b": "told"}


@pytest.mark.parametrize("secret", [None, "run.secret", bytearray(32)])
def test_a_secret_that_is_not_bytes_is_refused_by_its_type(secret):
    with pytest.raises(
        ConfigurationError, match=rf"secret of type {type(secret).__name__}: bytes are needed.*secret_in"
    ):
        Membership(ThreadRendezvous(SimulatedCluster(), "a"), "a", secret=secret)
