"""A rendezvous that ends while it answers: some members are told a view, others are not. The latter close their group at once, so that
nobody who was told waits for packets that will not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from voted_rounds import RoundLog, check_one_outcome, hold_rounds

from thinwire import ThreadGroup
from thinwire.comm.group import Group
from thinwire.errors import LinkError
from thinwire.membership import Membership
from thinwire.membership.commit import VoteStore
from thinwire.membership.rendezvous import AnswerLostError
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.lighthouse import SimulatedLighthouse
from thinwire.membership.view import Presence

ROUNDS, NTH = 5, 3


class PartlyAnswering(SimulatedLighthouse):
    """It gives the answers of its nth view to those in `told`, ends before it gives any other, and is back a second later. All of that happens
    under the lock of the cluster, so that the order of threads does not matter."""

    def __init__(self, cluster: SimulatedCluster, told: set[str], nth: int = NTH) -> None:
        super().__init__(cluster, 5.0)
        self.told, self.given, self.views, self.away, self.nth = told, set[str](), 0, False, nth

    def call(self, name: str, presence: Presence, seconds: float) -> list[Presence]:
        answer = super().call(name, presence, seconds)
        if self.views == self.nth and not self.away:
            self.given.add(name)
            if self.given == self.told:
                self.away = True
                self.stop()
                self.cluster.time.after(1.0, self.start)
        return answer

    def _look(self) -> None:
        before = len(self._answers)
        super()._look()
        if len(self._answers) > before:
            self.views += 1
            if self.views == self.nth:
                self._answers = {one: self._answers[one] for one in map(self.incarnation_of, self.told)}


@pytest.mark.parametrize("told", ["a", "b", "c", "ab", "ac", "bc"])
def test_members_that_were_told_a_view_do_not_wait_for_those_that_were_not(told: str) -> None:
    cluster = SimulatedCluster()
    cluster.lighthouse = lighthouse = PartlyAnswering(cluster, set(told))
    logs = {name: RoundLog() for name in "abc"}
    results = cluster.play(
        {name: lambda name: hold_rounds(cluster.membership(name), ROUNDS, logs[name]) for name in logs}
    )
    assert lighthouse.away and all(isinstance(log, RoundLog) and log.round == ROUNDS for log in results.values()), (
        results
    )
    check_one_outcome(logs.values())
    for name, log in logs.items():
        assert set(log.members) == {("a", "b", "c")}
        assert len(log.failed) == (name in told) and all("closed its group" in why for why in log.failed), log.failed
    assert cluster.time.now == 2.0 + 1.0 + 2.0  # heartbeats at the beginning, the outage, heartbeats again


@pytest.mark.parametrize(("told", "least"), [("a", 1), ("c", 2), ("ab", 2)])
def test_members_that_were_told_the_first_view_do_not_wait_for_those_that_were_not(told: str, least: int) -> None:
    """Nobody holds a group yet. The wait to build one ends with the lighthouse, and nobody begins without the others."""
    cluster = SimulatedCluster()
    cluster.lighthouse = lighthouse = PartlyAnswering(cluster, set(told), nth=1)
    logs = {name: RoundLog() for name in "abc"}
    cluster.play(
        {name: lambda name: hold_rounds(cluster.membership(name, least=least), ROUNDS, logs[name]) for name in logs}
    )
    assert lighthouse.away and all(set(log.members) == {("a", "b", "c")} and not log.failed for log in logs.values())
    assert cluster.time.now == 2.0 + 1.0 + 2.0


class Cut(SimulatedLighthouse):
    """The connection of `b` breaks when its first answer is on its way."""

    cuts = 1

    def call(self, name: str, presence: Presence, seconds: float) -> list[Presence]:
        answer = super().call(name, presence, seconds)
        if name == "b" and self.cuts:
            self.cuts -= 1
            raise LinkError("the connection has broken")
        return answer


def test_members_do_not_wait_for_one_that_calls_for_another_view() -> None:
    """The lighthouse stays, and tells those that connect that nobody comes."""
    cluster = SimulatedCluster()
    cluster.lighthouse = Cut(cluster, 5.0)
    logs = {name: RoundLog() for name in "abc"}
    cluster.play({name: lambda name: hold_rounds(cluster.membership(name), ROUNDS, logs[name]) for name in logs})
    assert all(set(log.members) == {("a", "b", "c")} and not log.failed for log in logs.values()), logs
    assert cluster.time.now == pytest.approx(2.0 + 0.1)  # heartbeats, and a pause before the second call


class Scripted:
    """A rendezvous of two members in one thread. It answers calls in turn; an answer that is an error is raised."""

    address, relays = "", False

    def __init__(self, *answers: LinkError | None) -> None:
        self.answers, self.asked, self.groups = list(answers), list[Presence](), list[Group]()
        self.incarnation, self.store, self.reached = "", _Store(), True

    def clock(self) -> float:
        return float(len(self.asked))

    def sleep(self, seconds: float) -> None:
        pass

    def arrive(self, name: str, incarnation: str, *_: object) -> None:
        self.incarnation = incarnation

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        self.asked.append(presence)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return [presence], cast(VoteStore, self.store)

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        self.groups.append(ThreadGroup.create(1)[0])
        return self.groups[-1]

    def reaches(self, other: Presence) -> bool:
        return self.reached

    def leave(self) -> None:
        pass


class _Store:
    """Of a rendezvous that nobody asks anything else."""

    def forget(self, keys: Sequence[str]) -> None:
        pass


@pytest.mark.parametrize("relays", [True, False])
def test_who_lost_its_connection_to_a_relay_calls_nobody_unreachable(relays: bool) -> None:
    """While its connection was lost it could ask about nobody. Where groups are not relayed, members are asked directly."""
    scripted = Scripted(None, AnswerLostError("the hub has gone"), None)
    scripted.relays, scripted.reached = relays, False
    membership = Membership(scripted, "a", least=1)
    for _ in range(2):
        membership.next_view({})
    assert [bool(presence.unreachable) for presence in scripted.asked] == [False, False, not relays]


def test_a_member_whose_answer_is_lost_closes_its_group_and_calls_again() -> None:
    """It says in its next call that it holds no group. A call that ends for another reason keeps the group."""
    scripted = Scripted(None, LinkError("too few called"), None, AnswerLostError("the hub has gone"), None)
    membership = Membership(scripted, "a", least=1)
    first = membership.next_view({})
    with pytest.raises(LinkError, match="too few called"):
        membership.next_view({})
    assert membership.next_view({}).group is first.group and len(scripted.groups) == 1
    last = membership.next_view({})
    assert last.rebuilt and last.group is scripted.groups[1] is not first.group
    assert [bool(presence.holds) for presence in scripted.asked] == [False, True, True, True, False]
    with pytest.raises(LinkError, match="closed"):
        first.group.post(0, {}, {})


def test_a_call_whose_answer_is_lost_at_its_deadline_says_what_was_lost() -> None:
    scripted = Scripted(AnswerLostError("the hub has gone."))
    membership = Membership(scripted, "a", least=1)
    with pytest.raises(LinkError, match=r"'a' found no view within 1 s: the hub has gone\.$"):
        membership.next_view({}, 1.0)
