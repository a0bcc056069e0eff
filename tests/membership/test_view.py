"""All members compute the same view from the same presences, in any order."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm import ThreadGroup
from thinwire.errors import ConfigurationError, PacketError
from thinwire.membership import view as presence
from thinwire.membership.view import LIMIT, Member, Presence, View, expected


def present(name, incarnation="", **said):
    return Presence(name, incarnation or f"incarnation-of-{name}", 1, **said)


def judge(here, facts=None):
    """Returns the verdict of a replica with these facts."""
    return presence.judge(here, facts or {})


def names(verdict):
    return [p.name for p in verdict.members]


def test_members_are_sorted_by_name():
    verdict = judge([present("c"), present("a"), present("b")])
    assert names(verdict) == ["a", "b", "c"] and not verdict.left_out


def test_every_view_has_a_unique_id():
    here = [present("a"), present("b")]
    assert judge(here).id == judge(here[::-1]).id
    again = [replace(p, calls=p.calls + 1) for p in here]
    assert len({judge(here).id, judge(again).id, judge([here[0], again[1]]).id, judge(here[:1]).id}) == 4


def test_of_two_presences_with_one_name_the_elder_stays():
    verdict = judge([present("a", "new"), present("a", "old", views=3), present("b")])
    assert [(p.name, p.incarnation) for p in verdict.members] == [("a", "old"), ("b", "incarnation-of-b")]
    assert verdict.left_out[0].reason == "another replica has the name 'a'" and not verdict.left_out[0].foreign
    verdict = judge([present("a", "new"), present("a", "old", views=3, address="oslo:29400")])
    assert verdict.left_out[0].reason == "the replica at oslo:29400 has the name 'a'"


def test_differing_facts_are_named_with_both_values_and_exclude_by_majority():
    here = [
        present("a", facts={"run": "x"}),
        present("b", facts={"run": "y"}, views=10**9),
        present("c", facts={"run": "x"}),
    ]
    verdict = judge(here, {"run": "x"})
    assert names(verdict) == ["a", "c"]
    assert verdict.left_out[0].reason == "run: y there, x here" and verdict.left_out[0].foreign
    assert names(judge(here, {"run": "y"})) == ["b"]
    assert judge(here, {}).left_out[0].reason == "run: y there, absent here"


def test_a_view_takes_the_protocol_of_the_groups_majority():
    """The same holds from the view of a member that speaks several protocols. A number that only one member claims decides nothing."""

    def of(name, oldest, newest, holds=""):
        return present(
            name, facts={"run": "x", "protocols": f"{oldest} to {newest} (Thinwire {newest}.0)"}, holds=holds
        )

    old, between, new, far = of("a", 5, 5), of("b", 5, 6), of("c", 6, 7), of("d", 0, 999_999_999)
    here = [old, between, new, far]
    assert [names(judge(here, one.facts)) for one in (old, between, new)] == [
        ["a", "b", "d"],
        ["a", "b", "d"],
        ["b", "c", "d"],
    ]
    verdict = judge(here, between.facts)
    said = "protocols: 6 to 7 (Thinwire 7.0) there, 5 to 6 (Thinwire 6.0) here; install one release on all, or one that speaks a protocol of each"
    assert [(out.presence.name, out.reason, out.foreign) for out in verdict.left_out] == [("c", said, True)]
    held = [old, of("b", 5, 6, "G"), of("c", 6, 7, "G"), of("e", 5, 5)]
    assert names(judge(held, between.facts)) == ["b", "c"], "more of one group speak 6"
    held = [of("a", 5, 5), of("b", 5, 6), of("c", 6, 6, "G"), of("d", 5, 5)]
    assert names(judge(held, held[1].facts)) == ["b", "c"], "one of a group counts more than many of none"
    unread = present("u", facts={"run": "x", "protocols": "5 to six"})
    assert names(judge([unread, old, between], old.facts)) == ["a", "b"] and names(
        judge([unread, old], unread.facts)
    ) == ["u"]


@pytest.mark.parametrize(
    ("members", "others", "trusted", "due"),
    [
        ("", "G", True, "x"), ("", "G", False, ""), ("", "GG", False, "x"), ("-", "H", True, "x"), ("-", "H", False, ""),
        ("G", "G", True, "x"), ("G", "G", False, ""), ("G", "GG", False, "x"), ("G", "HH", True, ""), ("G", "HHHH", False, ""),
        ("GG", "GG", False, ""), ("GG", "GGG", False, "x"), ("GH", "GGH", False, ""), ("GH", "GGH", True, "x"),
        ("", "-", True, ""), ("", "--", True, "x"), ("-", "--", False, "x"), ("--", "--", True, ""), ("--", "---", True, "x"),
    ],
)  # fmt: skip
def test_a_newcomer_yields_to_a_group_of_others_or_to_their_majority(members, others, trusted, due):
    """One letter for each replica: the group that it holds, or - for none."""

    def of(run, letters):
        return [
            present(f"{run}{place}", holds=letter.strip("-"), facts={"run": run})
            for place, letter in enumerate(letters)
        ]

    other = judge([*of("own", members), *of("x", others)], {"run": "own"}).replica_of_others(trusted)
    assert (other.name[:1] if other else "") == due


def test_others_that_differ_from_each_other_are_no_majority():
    here = [present(name, facts={"run": name}) for name in "abc"]
    assert judge(here, {"run": "d"}).replica_of_others(trusted=True) is None


def test_a_broken_link_excludes_one_member():
    far = {"unreachable": ["incarnation-of-b"]}
    back = {"unreachable": ["incarnation-of-a"]}
    assert names(judge([present("a", **far), present("b", **back), present("c")])) == ["a", "c"]
    assert names(judge([present("a", **far), present("b", views=1, **back), present("c")])) == ["b", "c"]
    # one that says it alone, however old it is, puts out itself, where three are there
    assert names(judge([present("a", views=9, **far), present("b"), present("c")])) == ["b", "c"]
    assert names(judge([present("a", **far), present("b")])) == ["a"]
    star = [
        present("a", unreachable=["incarnation-of-b", "incarnation-of-d"]),
        present("b"),
        present("c"),
        present("d", views=9),
    ]
    # the member that reaches nobody leaves, not those that it cannot reach
    assert names(judge(star)) == [
        "b",
        "c",
        "d",
    ]
    assert "b, d" in judge(star).left_out[0].reason
    assert names(judge([present("a", unreachable=["somebody who is not here"])])) == ["a"]


def test_one_alone_lets_nobody_wait_where_three_are_there():
    a, b, c = present("a", expects=["d", "e"]), present("b", expects=["d"]), present("c")
    assert expected([a, b, c]) == {"d"} and expected([a, b]) == {"d", "e"}
    assert expected([a, replace(a, incarnation="a-2"), c, present("f")]) == set()


def test_a_replica_without_a_presence_is_no_member():
    assert judge([]).members == ()


@given(st.integers(0, 10**9))
def test_views_ignore_the_order_of_presences(seed):
    draw = random.Random(seed)
    incarnations = [f"incarnation-{i}" for i in range(5)]
    here = [
        Presence(
            draw.choice("abc"), incarnation, draw.randrange(3), views=draw.randrange(2), facts={"run": draw.choice("xyy")},
            unreachable=draw.sample(incarnations, draw.randrange(3)),
        )
        for incarnation in incarnations
    ]  # fmt: skip
    verdicts = [judge(draw.sample(here, len(here)), {"run": "y"}) for _ in range(11)]
    told = {
        (
            v.id,
            tuple(p.incarnation for p in v.members),
            frozenset((o.presence.incarnation, o.reason) for o in v.left_out),
        )
        for v in verdicts
    }
    assert len(told) == 1


def test_presences_survive_serialisation():
    there = present(
        "a",
        facts={"run": "x"},
        status={"round": 3, "tokens": 1.5, "more": [None, "é"]},
        unreachable=["l"],
        expects=["m"],
    )
    for said in (there, replace(there, calls=0), replace(there, calls=(1 << 53) - 1, views=(1 << 53) - 1)):
        assert Presence.from_json(said.to_json()) == said
    assert json.loads(there.to_json()) == {
        "name": "a", "incarnation": "incarnation-of-a", "calls": 1, "views": 0, "holds": "", "facts": {"run": "x"},
        "status": {"round": 3, "tokens": 1.5, "more": [None, "é"]}, "unreachable": ["l"], "excludes": {}, "expects": ["m"], "address": "",
    }  # fmt: skip


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e309"])
def test_numbers_that_are_not_finite_are_refused(number):
    text = present("a", status={"x": 1.7e308}).to_json()
    assert Presence.from_json(text).status == {"x": 1.7e308}
    with pytest.raises(PacketError, match=f"a presence cannot be read \\({number} is "):
        Presence.from_json(text.replace("1.7e+308", number))


def test_a_presence_has_at_most_16384_bytes():
    room = 16_384 - len(present("a", status={"x": ""}).to_json())
    whole, more = (present("a", status={"x": "y" * length}) for length in (room, room + 1))
    assert len(whole.to_json()) == LIMIT == 16_384
    assert Presence.from_json(whole.to_json()).status == whole.status
    with pytest.raises(ConfigurationError, match="facts and status are 16385 bytes; at most 16384 are allowed"):
        more.to_json()
    with pytest.raises(PacketError, match="16385 bytes, at most 16384 are allowed"):
        Presence.from_json(json.dumps(vars(more)))


def test_the_text_of_a_view_leaves_out_its_connections():
    group = ThreadGroup.create(1)[0]
    view = View("v", (Member("a", {}),), group, True, (), None, (), print, lambda: None, {"land": True})
    assert repr(view) == (
        f"View(id='v', members=(Member(name='a', status={{}}),), group={group!r}, rebuilt=True, left_out=())"
    )
    assert view.written() == ["v/land/0"]
    assert view.decide("land", False, 1.0) is True and view.decide("late", False, 1.0) is False
    assert view.decide("late", True, 1.0) is False and view.written() == ["v/land/0", "v/late/0"]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "ä", "a/b", "a\n", None, 3])
def test_invalid_names_are_refused(name):
    with pytest.raises(ConfigurationError, match="was given to a replica"):
        present(name, "incarnation")


@pytest.mark.parametrize("status", [{"x": float("nan")}, {"x": object()}, {"x": "y" * LIMIT}, {"x": b"bytes"}])
def test_statuses_that_cannot_be_serialised_are_refused(status):
    with pytest.raises(ConfigurationError):
        present("a", status=status).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "no name"}, {"name": 3}, {"incarnation": None}, {"calls": "1"}, {"calls": True}, {"calls": -1}, {"views": 0.5},
        {"views": 1 << 53}, {"calls": 1 << 53}, {"facts": []},
        {"facts": {"a": 1}}, {"status": "x"}, {"unreachable": {}}, {"unreachable": [1]}, {"expects": [1]}, {"address": 1}, {"more": 1},
        {"status": {"x": "y" * LIMIT}},
    ],
)  # fmt: skip
def test_malformed_presences_are_refused(change):
    said = json.loads(present("a").to_json()) | change
    with pytest.raises(PacketError, match="a presence cannot be read"):
        Presence.from_json(json.dumps(said))


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "[" * 100_000, '{"name": NaN}', "\0"])
def test_bytes_that_are_not_json_are_refused(text):
    with pytest.raises(PacketError):
        Presence.from_json(text)
