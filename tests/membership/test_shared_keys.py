"""Keys that members write for each other: each writes only for itself and within limits, and no member changes a decision."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from thinwire.errors import PacketError
from thinwire.membership import shared_keys as module
from thinwire.membership.commit import keys_of, view_id
from thinwire.membership.shared_keys import SharedKeys, TooMuchError


@dataclass(frozen=True)
class Writer:
    name: str
    incarnation: str


A, B, C = (Writer(name, f"{name}-1") for name in "abc")
VIEW = [["a", "a-1", 4], ["b", "b-1", 7]]
OUTCOME, BALLOTS = keys_of(f"{view_id([('a', 'a-1', 4), ('b', 'b-1', 7)])}/land", 2)


def refused(message: str, do: object, *given: object) -> None:
    with pytest.raises(PacketError, match=message):
        do(*given)  # type: ignore[operator]


def test_a_member_votes_for_itself_alone():
    keys = SharedKeys()
    refused("a votes for another member", keys.put, A, BALLOTS[1], "1", VIEW)
    refused("b votes for another", keys.put, Writer("b", "b-2"), BALLOTS[1], "1", VIEW)  # another incarnation of b
    # the incarnation of another member
    refused("c votes for another", keys.put, Writer("c", "b-1"), BALLOTS[1], "1", VIEW)
    refused("has other members", keys.put, C, BALLOTS[1], "1", [VIEW[0], ["c", "c-1", 7]])
    refused("is not one of a ballot", keys.put, A, BALLOTS[0][:-1] + "2", "1", VIEW)
    refused("is not one of a ballot", keys.put, A, OUTCOME, "yes", VIEW)
    refused("does not name the members", keys.put, A, BALLOTS[0], "1", None)
    refused("cannot be read", keys.put, A, BALLOTS[0], "1", [["a", 1, 4]])
    refused("c is no member", keys.settle, C, OUTCOME, "no", VIEW)
    refused("not an outcome", keys.settle, A, BALLOTS[0], "no", VIEW)
    refused("not an outcome", keys.settle, A, OUTCOME, "maybe", VIEW)
    refused("not an outcome", keys.settle, A, OUTCOME, "\ud800", VIEW)  # JSON can carry what no file can
    refused("the key of a note cannot be read", keys.put, A, "end/" + "a" * 99, "1", [])
    for writer, key in ((C, OUTCOME), (Writer("b", "b-2"), OUTCOME), (Writer("c", "b-1"), OUTCOME), (A, BALLOTS[0])):
        refused(f"{writer.name} is no member", keys.ballots, writer, key, VIEW)
    assert keys.ballots(B, OUTCOME, VIEW) == dict(zip(BALLOTS, ("a-1", "b-1")))
    assert keys.read([OUTCOME]) is None and keys.read(BALLOTS) is None


def test_a_view_has_at_most_128_members():
    crowd = [[f"m{number}", f"i{number}", 1] for number in range(129)]
    for view, allowed in ((crowd[:128], True), (crowd, False)):
        outcome, ballots = keys_of(f"{view_id([tuple(one) for one in view])}/land", len(view))
        member = Writer("m127", "i127")
        if allowed:
            SharedKeys().put(member, ballots[127], "1", view)
            assert len(SharedKeys().ballots(member, outcome, view)) == 128
        else:
            refused("does not name the members of its view", SharedKeys().put, member, ballots[127], "1", view)


def test_a_commit_needs_all_ballots_and_is_kept_while_members_may_ask():
    keys = SharedKeys()
    keys.put(A, BALLOTS[0], "1", VIEW)
    keys.put(B, BALLOTS[1], "1", VIEW)
    assert keys.settle(B, OUTCOME, "yes", VIEW) == "yes" == keys.settle(A, OUTCOME, "no", VIEW)
    for writer, key in ((B, OUTCOME), (B, BALLOTS[0]), (C, BALLOTS[1]), (B, BALLOTS[1])):
        keys.forget(writer, key)
        assert keys.settle(B, OUTCOME, "no", VIEW) == "yes"
    assert keys.read(BALLOTS[:1]) == ["1"] and keys.read(BALLOTS) is None
    keys.forget(A, BALLOTS[0])
    assert keys.read([OUTCOME]) is None and not keys._values and not +keys._nbytes and not +keys._ballots
    keys.put(A, BALLOTS[0], "1", VIEW)
    assert keys.settle(A, OUTCOME, "yes", VIEW) == "no"  # b has not voted
    keys.put(B, BALLOTS[1], "1", VIEW)
    assert keys.settle(B, OUTCOME, "yes", VIEW) == "no"


def test_a_member_writes_within_its_limit_and_never_over_another(monkeypatch):
    keys = SharedKeys()
    monkeypatch.setattr(module, "_MOST_OF_ONE", 21)
    monkeypatch.setattr(module, "_MOST_WRITTEN", 32)
    keys.put(A, "group//1", "3456789012345", [])  # 21 bytes, the limit
    keys.put(A, "group//1", "5432109876543", [])  # replaces as many bytes
    refused("written by a", keys.put, B, "group//1", "x", [])
    with pytest.raises(TooMuchError, match="too large together"):
        keys.put(A, "group//2", "", [])
    with pytest.raises(TooMuchError, match="too large together"):
        keys.put(B, "group//2", "6789", [])  # 33 bytes in all
    keys.put(B, "group//2", "678", [])
    keys.forget(B, "group//1")
    keys.forget(B, "group//2")
    assert keys.read(["group//1"]) == ["5432109876543"] and keys.read(["group//2"]) is None
    keys.put(A, "group//1", "", [])
    keys.put(A, "group//2", "", [])
    keys.forget(A, "group//2")
    with pytest.raises(TooMuchError, match="too large together"):
        keys.put(A, "group//2", "1234567", [])  # 8 bytes are still written


def test_a_ballot_replaces_those_of_an_earlier_process_of_its_name():
    """A process that died has deleted none. One that was only away is told nothing that the others may not have been told."""
    keys, sizes = SharedKeys(), []
    lives = [[["a", "a-1", 4], ["b", f"b-{life}", 7]] for life in range(4)]
    votes = [keys_of(f"{view_id([tuple(one) for one in view])}/land", 2) for view in lives]
    for life, (view, (outcome, ballots)) in enumerate(zip(lives, votes)):
        keys.put(A, ballots[0], "1", view)
        keys.put(Writer("b", f"b-{life}"), ballots[1], "1", view)
        assert keys.settle(A, outcome, "yes", view) == "yes"
        if life:
            earlier, (own, _) = votes[life - 1]
            keys.forget(A, own)
            assert keys.read([earlier]) is None
            late = Writer("b", f"b-{life - 1}")
            refused("another process of b has voted since", keys.settle, late, earlier, "no", lives[life - 1])
        sizes.append((len(keys._values), keys._nbytes.total(), len(keys._ballots)))
    assert sizes == [sizes[0]] * 4
    outcome, ballots = votes[-1]
    keys.forget(A, ballots[0])
    assert keys.read([outcome]) == ["yes"], "b may still ask"
    keys.forget(Writer("b", "b-3"), ballots[1])
    assert not keys._values and not keys._nbytes and not +keys._ballots and not keys._voters


def test_addresses_of_a_new_group_replace_those_of_earlier_ones():
    """A process that died, or left, has deleted none. Others keep theirs, and so does a vote."""
    keys, sizes = SharedKeys(), []
    keys.put(B, "group/0/b", "5", [])
    keys.put(A, BALLOTS[0], "1", VIEW)
    for life in range(3):
        for address in "xy":
            keys.put(Writer("a", f"a-{life}"), f"group/{life}/{address}", "5", [])
        sizes.append(keys._nbytes["a"])
    assert sizes == [sizes[0]] * 3 and keys.read(["group/2/x", "group/2/y", "group/0/b", BALLOTS[0]]) is not None
    refused("written by b", keys.put, A, "group/0/b", "5", [])
    assert keys.read(["group/2/x"]) == ["5"], "a refused key deletes nothing"
    for writer, key in ((A, "group/2/x"), (A, "group/2/y"), (A, BALLOTS[0]), (B, "group/0/b")):
        keys.forget(writer, key)
    assert not keys._values and not keys._nbytes and not +keys._ballots and not any(keys._addresses.values())


def test_names_that_never_come_back_leave_nothing_beyond_a_bound():
    """Each name votes once, and once has addresses; a votes all the time, and keeps what it wrote first."""
    keys, sizes = SharedKeys(), []
    keys.put(A, BALLOTS[0], "1", VIEW)
    for life in range(3000):
        other = Writer(f"b{life}", f"b{life}-1")
        view = [["a", "a-1", 4], [other.name, other.incarnation, 7]]
        outcome, ballots = keys_of(f"{view_id([tuple(one) for one in view])}/land", 2)
        keys.put(other, f"group/{life}/address", "5", [])
        keys.put(A, ballots[0], "1", view)
        keys.put(other, ballots[1], "1", view)
        assert keys.settle(other, outcome, "yes", view) == "yes"
        keys.forget(A, ballots[0])
        sizes.append(
            (len(keys._values), len(keys._nbytes), len(keys._ballots), len(keys._voters), len(keys._addresses))
        )
    assert sizes[-1] == sizes[1500] and keys.read([outcome, BALLOTS[0]]) == ["yes", "1"]
    assert sum(key.endswith("address") for key in keys._values) == 1023, "beside a"


def test_keys_values_and_totals_have_limits():
    """The limits: a key of 256 bytes, a value of 64 KiB, 512 KiB for one member, 64 MiB for all."""
    keys, most = SharedKeys(), 1 << 16
    longest = "group/" + "k" * 250
    for key, value, fits in ((longest, "", True), (longest + "k", "", False), ("group/", "v" * (most + 1), False)):
        with nullcontext() if fits else pytest.raises(TooMuchError, match="a key or a value is too large"):
            keys.put(A, key, value, [])
    keys.forget(A, longest)
    keys.put(A, "group/", "v" * most, [])
    keys.forget(A, "group/")
    value = "v" * (most - len("group//0000"))
    for number in range(1024):
        writer = Writer(f"w{number // 8}", "")
        keys.put(writer, f"group//{number:04}", value, [])
        if number in (7, 1023):
            with pytest.raises(TooMuchError, match="too large together"):
                keys.put(writer if number == 7 else A, "group/", "", [])
