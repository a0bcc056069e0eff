"""What one replica concludes from an answer of the rendezvous: whether it is a view, whether the run has ended, which keys nobody reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import DisagreementError, EndedError, LinkError
from thinwire.membership import Membership
from thinwire.membership import rendezvous as module
from thinwire.membership.channel import INCARNATION
from thinwire.membership.rendezvous import CLOSED
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.view import LeftOut, Presence, Verdict


class Notes:
    """A vote store that keeps notes, and lists the keys to forget."""

    def __init__(self) -> None:
        self.keys, self.forgotten = set[str](), list[str]()

    def put(self, key: str, value: str = "1") -> None:
        self.keys.add(key)

    def all(self, keys: list[str]) -> bool:
        return set(keys) <= self.keys

    def forget(self, keys: list[str]) -> None:
        self.forgotten += keys


def member(name: str, calls: int = 1, holds: str = "", **status: Any) -> Presence:
    return Presence(name, f"{name}-1", calls, holds=holds, status=status)


def alone(**settings: Any) -> Membership:
    return SimulatedCluster().membership("a", **settings)


KEEPER = "the run has ended, and the member that keeps its final state has not responded yet"
ENDED = "the run has ended without replica 'a', and no member keeps its final state any longer."
HELD = [member("a", holds="group"), member("b", holds="group")]
NEW = [member("a"), member("b")]


@pytest.mark.parametrize(
    ("notes", "members", "holds", "reason", "due"),
    [
        ([("run",)], HELD, "group", "", ""),  # they train, and need not ask
        ([("run",)], HELD, "group", "b is late", KEEPER),
        ([("run",)], [HELD[0], NEW[1]], "group", "", KEEPER),
        ([("run",)], NEW, "", "", KEEPER),
        ([("run",)], NEW[:1], "", "", ENDED),
        ([("run",)], HELD[:1], "group", "", ENDED),
        ([("run",), ("run", CLOSED)], NEW, "", "", ENDED),
        ([("run", CLOSED)], NEW, "", "", ""),
        ([("run",)], [NEW[0], member("b", over=False)], "", "", KEEPER),
        ([("run",)], [NEW[0], member("b", over=True)], "", "", ""),
        ([("another",)], NEW, "", "b is late", "b is late"),
        ([()], NEW, "", "b is late", "b is late"),
    ],
)
def test_a_run_that_has_ended_is_entered_only_with_a_member_that_keeps_its_state(notes, members, holds, reason, due):
    membership, verdict = alone(run="run"), Verdict(tuple(members), ())
    assert not membership.ended() and membership.note_end("nowhere") is None  # no server has been found
    membership._vote_store, membership._holds = Notes(), holds
    for what in notes:
        membership.note_end(*what)
    assert all(key[:4] == "end/" and len(key.replace("/-", "/")) == 36 for key in membership._vote_store.keys)
    if due == ENDED:
        with pytest.raises(EndedError) as caught:
            membership._past_the_end(verdict, reason)
        assert str(caught.value) == ENDED
    else:
        assert membership._past_the_end(verdict, reason) == due


def test_a_replica_without_a_run_is_told_that_one_with_its_settings_has_ended():
    membership, verdict = alone(), Verdict(tuple(NEW), ())
    membership._vote_store = Notes()
    assert membership._past_the_end(verdict, "b is late") == "b is late"
    membership.note_end()
    told = "b is late; a run with these settings has ended here, and this would be another"
    assert membership._past_the_end(verdict, "b is late") == told and membership._past_the_end(verdict, "") == ""


def test_a_view_needs_its_least_members_and_those_of_the_last_round():
    membership = alone(least=3)
    stranger = LeftOut(member("x"), "run: this there, that here")
    few = "2 of at least 3 members came (a, b); x was left out: run: this there, that here. Start the others, or ask for fewer"
    for over, due in ((False, few), (True, "")):
        verdict = Verdict((member("a"), member("b", over=over)), (stranger,))
        assert membership._obstacle(verdict, set()) == due
    membership._members = (member("a"), member("b"), member("c"))
    verdict = Verdict((*membership._members[:2], member("d")), ())
    assert membership._obstacle(verdict, {"c-1"}) == "c of the last round: late"
    assert membership._obstacle(verdict, {"e-1"}) == "1 replica(s) of the last round: late"
    assert membership._obstacle(verdict, set()) == ""


def test_a_namesake_that_calls_again_is_alive_and_one_that_does_not_may_have_died():
    """A replica that has been a member is never ended."""

    def told(membership: Membership, calls: int) -> str:
        own = Presence("a", membership._incarnation, 1)
        verdict = Verdict((member("a", calls), member("c", 7 * calls)), (LeftOut(own, "another has the name 'a'"),))
        return membership._obstacle(verdict, set())

    out, membership, old = "it was left out: another has the name 'a'", alone(), alone()
    old._views = 1
    assert [told(membership, calls) for calls in (3, 3)] == [out] * 2 and not membership.closed
    membership._namesakes["c-1"] = 0
    assert told(membership, 3) == out, "another member that calls again is no namesake"
    with pytest.raises(
        DisagreementError, match=r"'a' cannot take part: another has .* Every replica needs its own name"
    ):
        told(membership, 4)
    assert membership.closed is True
    assert [told(old, calls) for calls in (3, 4)] == [out] * 2 and old.closed is False


def test_keys_of_past_views_are_deleted_once_all_their_members_have_called_again():
    membership, here, old = alone(), Notes(), Notes()

    def past(name: str, store: Notes, **calls: int) -> Any:
        view = SimpleNamespace(vote_store=store, written=lambda: [name])
        return module._Past(view, {f"{who}-1": count for who, count in calls.items()})

    membership._past = [past("of an ended connection", old, a=1), past("read", here, a=2, b=1)]
    membership._past += [past("a may read it", here, a=3, b=1), past("c may read it", here, a=1, c=0)]
    view = SimpleNamespace(vote_store=here)
    membership._sweep(view, {"a-1": 3, "b-1": 2})
    assert here.forgotten == ["of an ended connection", "read"] and not old.forgotten
    assert [one.view.written()[0] for one in membership._past[:-1]] == ["a may read it", "c may read it"]
    assert membership._past[-1] == (view, {"a-1": 3, "b-1": 2})
    membership._past = [past(str(number), here, c=1) for number in range(9)]
    membership._sweep(view, {"a-1": 4})
    assert [one.view.written()[0] for one in membership._past[:-1]] == [*"2345678"]


def test_calls_and_views_are_counted_from_one():
    """A replica's first call has the number 1; others compare these numbers, and send them with votes."""
    heard, cluster = list[tuple[str, dict[str, Any]]](), SimulatedCluster()

    def run(name: str) -> list[int]:
        membership = cluster.membership(name, least=1, observe=lambda kind, fields: heard.append((kind, fields)))
        assert INCARNATION.fullmatch(membership._incarnation)
        first, second = membership.next_view({}), membership.next_view({})
        assert (first.rebuilt, second.rebuilt) == (True, False)
        second.close()
        assert membership.next_view({}).rebuilt
        calls = [(fields["calls"], fields["holds"]) for kind, fields in heard if kind == "call"]
        assert calls == [(1, ""), (2, first.id), (3, "")]
        presence = membership._presence({}, ())
        return [presence.calls, presence.views]

    assert cluster.play({"a": run})["a"] == [3, 3]


def test_a_group_in_which_a_member_is_not_heard_is_closed_and_tried_again_until_the_deadline():
    closed, cluster = list[int](), SimulatedCluster()

    def post(*args: Any) -> None:
        raise LinkError("nobody is heard")

    def counted(group: Any) -> Any:
        return SimpleNamespace(rank=group.rank, size=group.size, post=post, close=lambda: closed.append(group.close()))

    def run(name: str) -> str:
        membership = cluster.membership(name, least=1, wrap=counted)
        with pytest.raises(LinkError) as caught:
            membership.next_view({}, 9.03)
        return str(caught.value)

    said = "replica 'a' found no view within 9.03 s: no group could be built: nobody is heard."
    assert cluster.play({"a": run}) == {"a": said}
    assert len(closed) > 9 and cluster.time.now == pytest.approx(9.03)
