"""Simulated faults: whatever happens to one of three replicas, at any phase, the others agree and continue."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from membership_play import Log, check_one_outcome, hold_rounds

from thinwire.comm import CountedGroup, Ledger, Link, LinkedGroup, gather
from thinwire.errors import (
    ConfigurationError,
    DisagreementError,
    LinkError,
    PacketError,
    PeerError,
    UndecidedError,
)
from thinwire.membership import Membership, Timeouts
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.cluster import Killed, ThreadRendezvous
from thinwire.membership.testing.lighthouse import JOIN
from thinwire.membership.view import Presence
from thinwire.version import PROTOCOLS

PHASES = ["call", "called", "connect", "put", "all", "settle", "wait", "post"]
ROUNDS = 5


def play(cluster, replicas, rounds=ROUNDS, **settings):
    """Lets `replicas` hold rounds until `rounds` are over. Returns their logs or errors."""
    logs = {name: Log() for name in replicas}

    def run(name):
        return hold_rounds(cluster.membership(name, **settings), rounds, logs[name])

    results = cluster.play({name: run for name in replicas})
    check_one_outcome(logs.values())
    return results, logs


def finished(result):
    return isinstance(result, Log) and result.round == ROUNDS


def test_a_healthy_run_builds_one_group_and_votes_once_a_round():
    cluster = SimulatedCluster()
    results, _ = play(cluster, "abc")
    for log in results.values():
        assert finished(log) and log.rebuilt == 1 and not log.failed
        assert list(log.decided.values()) == [True] * ROUNDS and set(log.members) == {("a", "b", "c")}
    assert cluster.time.now == 2.0  # two heartbeats at the beginning, in which they learn of each other
    assert len(cluster.lighthouse.written) <= 8  # keys of past views are deleted


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_others_go_on_when_a_replica_is_killed_at_any_phase(phase, nth):
    """The others continue, and no two members learn different outcomes."""
    cluster = SimulatedCluster()
    cluster.at("b", phase, lambda: cluster.kill("b"), nth)
    results, logs = play(cluster, "abc")
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
    logs = {name: Log() for name in "abc"}

    def run(name):
        def ready(number):
            """Arranges that b settles, or waits, in the first round."""
            if name != "b" and phase == "wait" and number == 0:
                ThreadRendezvous(cluster, name).sleep(1.0)
            return not (name == "b" and phase == "settle" and not logs[name].decided)

        membership = cluster.membership(name)
        hold_rounds(membership, ROUNDS, logs[name], ready=ready)
        while cluster.time.now < 100.0:  # until b has thawed and calls
            ThreadRendezvous(cluster, name).sleep(5.0)
        return hold_rounds(membership, 2 * ROUNDS, logs[name])

    results = cluster.play({name: run for name in "abc"})
    check_one_outcome(logs.values())
    assert all(isinstance(log, Log) and log.round == 2 * ROUNDS for log in results.values()), results
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
        return view.decide("land", True, 20.0), view.decide("land", False, 20.0), cluster.time.now - began

    results = cluster.play({name: run for name in "abc"})
    assert results == {"a": (False, False, 20.0), "c": (False, False, 20.0), "b": (False, False, 0.0)}


def test_a_cut_link_excludes_the_younger_member_until_it_heals():
    cluster = SimulatedCluster()

    def ready(number):
        if number == 2:
            cluster.cut("a", "b")
        return True

    logs = {name: Log() for name in "abc"}

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
    results, logs = play(cluster, "abc")
    assert all(finished(log) for log in results.values()) and not logs["a"].failed
    assert cluster.time.now >= 2 * ROUNDS * seconds  # lengths, then bodies


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_damaged_message_fails_one_round_for_all(nth):
    """The damage is in lengths or bodies, in the first hello or in a round. No member accepts the message."""
    cluster = SimulatedCluster()
    cluster.damage("b", "a", nth)
    retries = []
    results, logs = play(cluster, "abc", observe=lambda kind, _: retries.append(kind) if kind == "retry" else None)
    assert all(finished(log) for log in results.values()), results
    if nth <= 2:
        assert retries and all(logs["a"].decided.values())
    else:
        assert list(logs["a"].decided.values()).count(False) == 1


def test_a_restarted_replica_becomes_a_member_again():
    cluster = SimulatedCluster()
    cluster.at("b", "put", lambda: cluster.kill("b"), nth=2)
    logs = {name: Log() for name in ("a", "b", "c", "again")}

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
    assert all(isinstance(log, Log) and log.round == 40 for log in results.values()), results
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


def test_a_third_joins_and_one_leaves():
    cluster = SimulatedCluster()
    logs = {name: Log() for name in "abc"}

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
    results, logs = play(cluster, "abc")
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
    logs = {name: Log() for name in "abc"}
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
    assert results["a"] == pytest.approx(2.0 + JOIN + 0.1)


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


def two_names(cluster):
    """Starts two threads, `b` and `b2`, that both use the name `b`."""

    def run(name):
        membership = Membership(ThreadRendezvous(cluster, name), name[0])
        return hold_rounds(membership, ROUNDS, Log(), seconds=60.0)

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
        return hold_rounds(membership, ROUNDS, Log())

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
            return hold_rounds(membership, ROUNDS, Log())
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


def test_all_members_get_the_statuses_in_rank_order():
    cluster = SimulatedCluster()

    def run(name):
        view = cluster.membership(name).next_view({"step": ord(name)})
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
        assert ledger.sent("view") == 8 + 16  # the hello of a new group, once


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


def test_the_same_faults_give_the_same_result():
    def once():
        cluster = SimulatedCluster()
        cluster.at("b", "put", lambda: cluster.kill("b"), nth=2)
        cluster.damage("c", "a", 7)
        cluster.slow("a", "c", 0.5)
        _, logs = play(cluster, "abc")
        return cluster.time.now, [(log.members, list(log.decided.values()), log.rebuilt) for log in logs.values()]

    assert once() == once()


def test_a_deadlock_of_all_replicas_is_an_error():
    cluster = SimulatedCluster()

    def run(name):
        with cluster.time:
            cluster.time.wait_for(name, lambda: False)

    assert isinstance(cluster.play({"a": run})["a"], RuntimeError)


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
