"""The simulated cluster, by hand in virtual time: messages, faults, and the members whom its lighthouse calls together."""

from __future__ import annotations

import threading

import pytest
import torch

from thinwire.errors import LinkError
from thinwire.membership.commit import keys_of
from thinwire.membership.rendezvous import AnswerLostError
from thinwire.membership.testing.cluster import Killed, SimulatedCluster, ThreadRendezvous
from thinwire.membership.testing.lighthouse import SimulatedVoteStore
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Presence


def test_messages_arrive_after_their_links_delay_damage_and_cuts():
    """One bit of the second message is wrong. A cut link keeps messages in order until it heals."""
    cluster, seen, message = SimulatedCluster(), [], torch.zeros(5, dtype=torch.uint8)

    def carry(sender="a", receiver="b"):
        cluster.carry(sender, receiver, message, lambda come: seen.append((cluster.time.now, come.tolist())))

    whole, wrong = [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]
    with cluster.time:
        cluster.damage("a", "b", nth=2)
        for pair in (("a", "b"), ("b", "a"), ("a", "b"), ("a", "b")):
            carry(*pair)
        assert [come for _, come in seen] == [whole, whole, wrong, whole] and message.tolist() == whole
        seen.clear()
        cluster.slow("b", "a", 2.0)
        cluster.later(1.0, lambda: cluster.cut("a", "b"))
        cluster.later(3.0, lambda: cluster.heal("b", "a"))
        cluster.damage("a", "b")
        for receiver in "bbc":
            carry("a", receiver)
        assert seen == [(0.0, whole)] and cluster.answers("a", "b")
        assert cluster.time.wait_for("a", lambda: not cluster.answers("a", "b")) and cluster.time.now == 1.0
        assert cluster.time.wait_for("a", lambda: len(seen) == 3)
        assert seen[1:] == [(3.0, wrong), (3.0, whole)]


def test_a_fault_strikes_at_a_replicas_nth_operation():
    cluster, seen = SimulatedCluster(), []
    cluster.at("a", "put", lambda: seen.append("second"), nth=2)
    cluster.at("a", "put", lambda: cluster.kill("a"), nth=3)
    for name, phase in (("a", "put"), ("b", "put"), ("b", "put"), ("a", "all"), ("a", "put")):
        assert not seen and cluster.beats(name)
        cluster.passing(name, phase)
    assert seen == ["second"]
    with pytest.raises(Killed, match="a"):
        cluster.passing("a", "put")
    assert not cluster.beats("a") and not cluster.answers("b", "a") and cluster.answers("a", "b")
    cluster.revive("a")
    cluster.passing("a", "put")
    cluster.at("b", "put", lambda: cluster.freeze("b"), nth=3)
    cluster.later(2.0, lambda: cluster.thaw("b"))
    with cluster.time:
        cluster.time.leave("a")
    cluster.passing("b", "put")
    assert cluster.time.now == 2.0 and cluster.beats("b")


def presence(name, number=1):
    return Presence(name, f"{name}-{number}", 1, address=f"thread:{name}")


def names(present):
    return [one.name for one in present]


def test_a_silent_replica_counts_as_alive_until_its_timeout():
    assert SimulatedCluster(heartbeat_timeout=7.0).lighthouse.heartbeat_timeout == 7.0
    cluster = SimulatedCluster()
    lighthouse, time = cluster.lighthouse, cluster.time
    with time:
        lighthouse.hear("b", "b-1")
        lighthouse.silence("b")
        time.after(1.0, lambda: lighthouse.silence("b"))  # it is already silent
        assert names(lighthouse.call("a", presence("a"), 60.0)) == ["a"] and time.now == 5.0
        # all living members of the last view
        assert names(lighthouse.call("a", presence("a"), 60.0)) == ["a"] and time.now == 5.0
        with pytest.raises(LinkError, match="no view within 3 s: too few others called"):
            lighthouse.call("b", presence("b", 2), 3.0)  # half are not enough
        assert time.now == 8.0
        assert names(lighthouse.call("a", presence("a"), 60.0)) == ["a"]  # b-2 is alive and no longer calls
        lighthouse.leave("b")
        time.after(4.0, lighthouse.hear_again)
        time.wait_for("a", lambda: False, 5.0)
        assert lighthouse._silent["b-2"] == 8.0 and lighthouse._names == {"a": "a-1"}


def test_a_majority_waits_half_a_second_for_the_others():
    cluster = SimulatedCluster()
    lighthouse, time = cluster.lighthouse, cluster.time

    def calls(name):
        with time:
            return names(lighthouse.call(name, presence(name), 60.0)), time.now

    with time:
        for name in "de":
            lighthouse.hear(name, f"{name}-1")
    results = cluster.play(dict.fromkeys("abc", calls))
    assert results == dict.fromkeys("abc", (["a", "b", "c"], 0.5))


def test_a_killed_simulated_lighthouse_loses_its_state():
    cluster = SimulatedCluster()
    lighthouse, time = cluster.lighthouse, cluster.time
    store = SimulatedVoteStore(lighthouse, cluster, "a")
    outcome, ballots = keys_of("land", 2)
    for ballot in ballots:
        assert not store.all(ballots)
        store.put(ballot)
    assert store.all(ballots) and store.settle(outcome, b"yes") == b"yes" == store.settle(outcome, b"no")
    assert store.wait(outcome, 9.0) == b"yes" and store.wait("other", 9.0) is None
    assert time.now == 9.0
    store.forget([ballots[0]])
    assert set(lighthouse.written) == {ballots[1], outcome}
    store.forget([ballots[1], "unknown"])
    assert not lighthouse.written
    with time:
        lighthouse.hear("b", "b-1")
        lighthouse.hear("c", "c-1")
    cluster.killed.add("c")
    cluster.later(1.0, lighthouse.stop)
    with time, pytest.raises(LinkError, match="the lighthouse has gone"):
        lighthouse.call("a", presence("a"), 60.0)
    assert (lighthouse.up, lighthouse.epoch, time.now) == (False, 1, 10.0)
    for ask in (
        lambda: store.put("k"),
        lambda: store.all(["k"]),
        lambda: store.settle("k", b""),
        lambda: store.wait("k", 9.0),
    ):
        with pytest.raises(LinkError, match="the lighthouse has gone, and what was written with it"):
            ask()
    store.forget(["k"])
    lighthouse.start()
    with time:
        assert set(lighthouse._silent) == {"a-1", "b-1", "c-1"} and lighthouse.up
        time.wait_for("a", lambda: not lighthouse._silent.keys() & {"a-1", "b-1"})
        assert time.now == 11.0 and set(lighthouse._silent) == {"c-1"}


def rendezvous(cluster, name, told=None):
    one = ThreadRendezvous(cluster, name)
    one.arrive(name, f"{name}-1", b"", Timeouts(), lambda kind, fields: told.append((kind, fields)))
    return one


def test_replicas_run_in_daemon_threads_of_their_names():
    """The program ends although a replica waits for ever."""

    def run(name):
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert SimulatedCluster().play({"a": run, "b": run}) == {"a": ("a", True), "b": ("b", True)}


def test_a_frozen_replica_finds_what_became_true_after_its_wait_was_over():
    cluster = SimulatedCluster()
    cluster.later(1.0, lambda: cluster.freeze("a"))
    cluster.later(4.0, lambda: cluster.thaw("a"))
    with cluster.time:
        assert cluster.wait("a", lambda: cluster.time.now >= 3.0, 2.0) and cluster.time.now == 4.0


def test_a_member_that_ends_breaks_its_connections_at_once():
    cluster = SimulatedCluster()

    def run(name):
        group, began = cluster.membership(name).next_view({}).group, cluster.time.now
        if name == "a":
            with pytest.raises(LinkError):
                group.post(1, {}, {1: torch.zeros(1, dtype=torch.uint8)}).wait()
        return cluster.time.now - began

    assert cluster.play({"a": run, "b": run}) == {"a": 0.0, "b": 0.0}


def test_a_connection_needs_all_members_their_links_and_the_lighthouse():
    cluster = SimulatedCluster()

    def run(name):
        one = rendezvous(cluster, name)
        members, _ = one.call(presence(name), 60.0)
        began = one.clock()

        def refused(group, reason, seconds):
            with pytest.raises(LinkError, match=reason):
                one.connect(group, members, "ab".index(name))
            assert one.clock() - began == seconds

        if name == "a":
            refused("first", "b did not come within 10 s", 10.0)
            cluster.cut("a", "b")
        one.sleep(began + 20.0 - one.clock())
        refused("second", "somebody did not come within 10 s", 30.0)
        if name == "a":
            cluster.later(1.0, cluster.lighthouse.stop)
            refused("third", "the lighthouse has gone", 31.0)
        return names(members)

    assert cluster.play({"a": run, "b": run}) == {"a": ["a", "b"], "b": ["a", "b"]}


def test_a_call_ends_in_its_last_second_or_with_the_lighthouse():
    """An answer that is lost with a lighthouse is an error of its own; a replica that starts later finds the next lighthouse."""
    cluster, told = SimulatedCluster(), []
    lighthouse = cluster.lighthouse

    def run(name):
        one = rendezvous(cluster, name, told)
        for other in "bc":
            lighthouse.hear(other, f"{other}-1")
        with pytest.raises(LinkError, match="no other replica, or no lighthouse") as caught:
            one.call(presence(name), 3.0)
        assert type(caught.value) is LinkError
        assert told == [("retry", {"reason": "no view within 1 s: too few others called", "seconds": 0.0})]
        cluster.later(1.0, lighthouse.stop)
        cluster.later(2.0, lighthouse.start)
        with pytest.raises(AnswerLostError, match="the lighthouse has gone"):
            one.call(presence(name), 60.0)
        for other in "bc":
            lighthouse.leave(other)
        late = rendezvous(cluster, name, told)
        late.sleep(2.0)
        return [names(late.call(presence(name), seconds)[0]) for seconds in (60.0, 1.0)]

    assert cluster.play({"a": run}) == {"a": [["a"], ["a"]]}


def test_a_replica_reaches_the_present_incarnation_of_another_that_answers():
    cluster, told = SimulatedCluster(), []
    one = rendezvous(cluster, "a")
    with cluster.time:
        cluster.lighthouse.hear("b", "b-1")
    assert one.relays is False and one.address == "thread:a"

    def look():
        told.append((one.reaches(presence("b")), one.reaches(presence("b", 2)), one.reaches(presence("c"))))

    look()
    cluster.cut("a", "b")
    look()
    cluster.heal("a", "b")
    look()
    cluster.freeze("b")
    look()
    cluster.thaw("b")
    look()
    rendezvous(cluster, "b").leave()
    look()
    yes, no = (True, False, False), (False, False, False)
    assert told == [yes, no, yes, no, yes, no]


def test_what_a_replica_raises_is_its_result():
    """The first `put` of b kills it."""
    cluster, error = SimulatedCluster(), KeyboardInterrupt("stop")
    cluster.at("b", "put", lambda: cluster.kill("b"))

    def run(name):
        if name == "a":
            raise error
        cluster.passing(name, "put")

    results = cluster.play({"a": run, "b": run})
    assert results["a"] is error and isinstance(results["b"], Killed)


def test_a_vote_waits_for_the_last_ballot_and_for_no_member_that_will_not_vote():
    cluster = SimulatedCluster()
    lighthouse, time = cluster.lighthouse, cluster.time
    members = (("a", "a-1", 1), ("b", "b-1", 1))
    store = SimulatedVoteStore(lighthouse, cluster, "a").of(members)
    other = SimulatedVoteStore(lighthouse, cluster, "b").of(members)

    def waits(question, *later):
        """What the wait of a found, and how long it took."""
        began = time.now
        store.put(f"{question}/0")
        with time:
            lighthouse.hear("a", "a-1")
            lighthouse.hear("b", "b-1")
            for seconds, do in later:
                time.after(seconds, do)
        return store.wait(f"{question}/outcome", 9.0), time.now - began

    assert waits("first", (3.0, lambda: other.put("first/1"))) == (b"yes", 3.0)
    assert lighthouse.written["first/outcome"] == b"yes"
    assert waits("second", (2.0, lambda: other.put("second/1", "no"))) == (b"no", 2.0)
    early = (1.0, lambda: other.settle("seventh/outcome", b"no")), (2.0, lambda: other.put("seventh/1"))
    assert waits("seventh", *early) == (b"no", 2.0)
    assert waits("third") == (None, 9.0) and "third/outcome" not in lighthouse.written
    assert waits("fourth", (1.0, lambda: lighthouse.silence("b"))) == (None, 6.0)
    assert waits("fifth", (4.0, lambda: lighthouse._calls.update({"b-1": (0.0, None)}))) == (None, 4.0)
    lighthouse._calls.clear()
    with pytest.raises(LinkError, match="the lighthouse has gone"):
        waits("sixth", (1.0, lighthouse.stop))
    assert not lighthouse.written


def test_who_connects_waits_in_vain_if_all_others_call_for_a_view():
    lighthouse = SimulatedCluster().lighthouse
    for name in "abc":
        lighthouse.hear(name, f"{name}-1")
    assert not lighthouse.nobody_comes(["a"])
    lighthouse._calls |= {"b-1": (0.0, presence("b")), "c-1": (0.0, None)}  # c gave up its call
    assert not lighthouse.nobody_comes(["a"]) and lighthouse.nobody_comes(["a", "c"])
    lighthouse._calls["c-1"] = (0.0, presence("c"))
    assert lighthouse.nobody_comes(["a"]) and not lighthouse.nobody_comes(["b", "c"])


def test_a_run_with_the_same_order_is_the_same_run():
    """Three replicas act at the same virtual times, and one is killed at its second vote, and comes back."""

    def played(order: int) -> list[tuple[float, str, object]]:
        cluster, seen = SimulatedCluster(order=order), list[tuple[float, str, object]]()
        cluster.at("b", "put", lambda: cluster.kill("b"), nth=2)

        def vote(name: str) -> None:
            membership = cluster.membership(name, least=2)
            for number in range(4):
                view = membership.next_view({})
                answer = view.decide(str(number), True, seconds=5.0)
                seen.append((cluster.time.now, name, [*map(str, [len(view.members), answer])]))
            membership.close()

        def run(name: str) -> None:
            try:
                vote(name)
            except Killed:
                seen.append((cluster.time.now, name, "killed"))
                cluster.revive(name)
                vote(name)

        results = cluster.play(dict.fromkeys("abc", run))
        return [*seen, (cluster.time.now, "", str(results))]

    runs = [played(order) for order in (1, 1, 1, *range(2, 10))]
    assert runs[0] == runs[1] == runs[2] and any(name == "b" and what == "killed" for _, name, what in runs[0])
    assert len({str(run) for run in runs}) > 3, "orders differ"
