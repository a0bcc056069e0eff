"""The registry of a lighthouse and a hub, without sockets: requests and responses by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from requesters import Gone, Requester, ask, calls, names, turns

from thinwire.errors import PacketError
from thinwire.membership import registry as module
from thinwire.membership import shared_keys
from thinwire.membership.commit import keys_of, view_id
from thinwire.membership.registry import MemberRegistry, nobody_comes, quorum, will_not_vote


def test_a_quorum_is_a_majority_of_names_that_waits_for_live_members():
    def heard(incarnations, **names):
        return {incarnation: names.get(incarnation, incarnation) for incarnation in incarnations}

    calling = {"a": 0.0, "b": 9.0, "c": 9.5}
    assert quorum(calling, heard("abc"), set(), 9.5, 10.0) == {"a", "b", "c"}
    # d is alive and does not call, so the first waits for it
    assert quorum(calling, heard("abcd"), set(), 9.9, 10.0) == set()
    assert quorum(calling, heard("abcd"), set(), 10.0, 10.0) == {"a", "b", "c"}
    for previous in ({"a", "c"}, {"a", "b", "c"}):
        assert quorum(calling, heard("abcd"), previous, 9.5, 10.0) == {"a", "b", "c"}
    assert quorum(calling, heard("abcdef"), set(), 99.0, 10.0) == set()  # half is not more than half
    assert quorum(calling, heard("ab"), {"c"}, 9.5, 10.0) == {"a", "b"}
    many = heard("abcdefgh", **dict.fromkeys("defgh", "mallory"))  # one name, five processes
    assert quorum(calling, many, {"a", "b", "c", "z"}, 10.0, 10.0) == {"a", "b", "c"}
    assert quorum(dict.fromkeys("defgh", 0.0), many, set(), 99.0, 10.0) == set()


def test_the_processes_of_a_name_are_few_and_take_no_room_of_others():
    registry = MemberRegistry(600.0)
    for number in range(4):
        registry.hear(Requester("mallory", f"m-{number}"))
    with pytest.raises(PacketError, match="4 processes of mallory are there already"):
        registry.hear(Requester("mallory", "m-4"))
    for number in range(127):
        registry.hear(Requester(f"honest-{number}"))
    with pytest.raises(PacketError, match="128 replicas are there already"):
        registry.hear(Requester("one-more"))
    registry.gone("mallory", "m-0", "it closed")
    registry.hear(Requester("mallory", "m-4"))


def test_a_name_that_crashes_again_and_again_is_heard():
    """Its former processes were heard a moment ago, and their connections have ended."""
    registry, lines = MemberRegistry(600.0), []
    registry.say = lines.append
    registry.hear(Requester("other"))
    for number in range(20):
        assert not registry.full(f"m-{number}", "m")
        registry.hear(Requester("m", f"m-{number}"))
        registry.disconnected(f"m-{number}")
    assert sum("left: m (it has restarted)" in line for line in lines) == 16
    assert len(registry._replicas) == 5, "the last ones may only have lost a connection"


def test_one_word_notes_no_end_of_a_run_of_three():
    async def play():
        registry, members = MemberRegistry(600.0), [Requester(name) for name in ("lima", "mallory", "oslo")]
        for one in members:
            registry.hear(one)
        await asyncio.gather(*calls(registry, *members))
        end, closed = f"end/{'0' * 32}", f"end/-{'0' * 32}"
        lima, mallory, oslo = members

        async def answer(requester, do, **fields):
            return await registry.answer(requester, {"do": do, "members": [], "seconds": 0, **fields})

        for _ in range(2):
            await answer(mallory, "put", key=end, value="1")
        assert await answer(lima, "look", keys=[end]) == {"values": None}
        await answer(oslo, "put", key=end, value="1")
        assert await answer(lima, "look", keys=[end]) == {"values": ["1"]}
        assert await answer(lima, "look", keys=[closed]) == {"values": None}
        await answer(oslo, "put", key=closed, value="1")
        assert await answer(lima, "look", keys=[closed]) == {"values": ["1"]}
        for number in range(62):  # it has noted `end`, too
            assert await answer(mallory, "put", key=f"end/{number:032x}1"[:36], value="1") == {}
        told = [await answer(mallory, "put", key=f"end/f{number:031x}", value="1") for number in range(9)]
        assert "too many ends" in told[-1]["error"]

    asyncio.run(play())


def test_a_wait_is_in_vain_only_if_nobody_can_end_it():
    assert nobody_comes({"a"}, "abc", "bc") and not nobody_comes({"a"}, "abc", "b")
    assert not nobody_comes({"a"}, "a", ""), "another may be on its way back"
    assert not will_not_vote("a", "ab", "b") and will_not_vote("a", "b", "b") and will_not_vote("b", "ab", "b")
    assert not will_not_vote("bc", "abc", "b") and will_not_vote("bc", "ab", "b") and will_not_vote("", "ab", "")


def test_keys_are_put_looked_up_and_forgotten(monkeypatch):
    registry, a = MemberRegistry(), Requester("a", patient=False)
    assert ask(registry, a, "put", key="group/k", value="1") == {}
    assert ask(registry, a, "look", keys=["group/k"], seconds=0.0) == {"values": ["1"]}
    assert ask(registry, a, "look", keys=["group/k", "m"], seconds=0.5) == {"values": None} and not registry._waits
    ask(registry, a, "forget", keys=["group/k", "m", 7])
    assert ask(registry, a, "look", keys=["group/k"], seconds=0) == {"values": None} and a.waits == [0.5]
    assert "error" in ask(registry, a, "look", keys=["l", 7], seconds=0) and "error" in ask(registry, a, "dance")
    monkeypatch.setattr(shared_keys, "_MOST_OF_ONE", 9)
    assert "too large" in ask(registry, a, "put", key="group/k", value="123")["error"]


def test_a_look_returns_once_all_its_keys_are_written():
    async def play() -> list[dict[str, Any]]:
        registry = MemberRegistry()
        looks = [
            asyncio.ensure_future(
                registry.answer(
                    Requester("a"), {"do": "look", "keys": [f"group/0/{key}" for key in keys], "seconds": 9}
                )
            )
            for keys in ("k", "kl")
        ]
        await asyncio.sleep(0)
        await registry.answer(Requester("b"), {"do": "put", "key": "group/0/k", "value": "1", "members": []})
        first, *rest = await asyncio.wait_for(looks[0], 600.0), looks[1].done()
        assert rest == [False]
        await registry.answer(Requester("b"), {"do": "put", "key": "group/0/l", "value": "2", "members": []})
        return [first, await asyncio.wait_for(looks[1], 600.0)]

    assert asyncio.run(play()) == [{"values": ["1"]}, {"values": ["1", "2"]}]


@pytest.mark.parametrize(
    ("then", "values"),
    [
        ("votes", ["yes"]), ("votes no", ["no"]), ("calls", None), ("leaves", None), ("is silent", None),
        ("is disconnected", None),
    ],
)  # fmt: skip
def test_a_wait_for_an_outcome_ends_when_all_have_voted_or_a_member_will_not(monkeypatch, then, values):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    a, b, registry = Requester("a"), Requester("b"), MemberRegistry(5.0)
    members = [["a", "a-1", 1], ["b", "b-1", 1]]
    outcome, ballots = keys_of(f"{view_id(members)}/land", 2)

    async def play() -> None:
        for one in (a, b):
            await registry.answer(one, {"do": "beat"})
        vote = {"value": "1", "members": members}
        await registry.answer(a, {"do": "put", "key": ballots[0], **vote})
        look = {"do": "look", "keys": [outcome], "seconds": 9.0, "members": members}
        waits = asyncio.ensure_future(registry.answer(a, look))
        await turns()
        registry.tick()
        await turns()
        assert not waits.done()
        if then == "is silent":
            now[0] += 4.0
            await registry.answer(a, {"do": "beat"})
            now[0] += 1.0
            registry.tick()
        elif then == "is disconnected":
            registry.disconnected("b-1")
        else:
            said = {
                "votes": {"do": "put", "key": ballots[1], **vote},
                "votes no": {"do": "put", "key": ballots[1], **vote, "value": "no"},
                "calls": {"do": "call", "presence": "of b", "seconds": 0.0},
                "leaves": {"do": "leave"},
            }[then]
            await registry.answer(Requester("b", patient=False), said)
            registry.tick()
        assert await asyncio.wait_for(waits, 600.0) == {"values": values} and not registry._votes
        stranger = Requester("c")
        with pytest.raises(PacketError, match="c is no member of the view that votes"):
            await registry.answer(stranger, look)

    asyncio.run(play())


def test_a_wait_for_addresses_ends_when_all_others_call_for_another_view():
    """Not before: one that does not call may still write its address. Other keys are waited for as long as was asked."""

    async def play() -> None:
        registry = MemberRegistry()
        a, b, c = map(Requester, "abc")
        for one in (a, b, c):
            registry.hear(one)
        look = {"do": "look", "seconds": 9}
        addresses = asyncio.ensure_future(registry.answer(a, look | {"keys": ["group/epoch/0/1"]}))
        ballots = asyncio.ensure_future(registry.answer(a, look | {"keys": ["vote"]}))
        others = [
            asyncio.ensure_future(registry.answer(one, look | {"keys": [f"group/{epoch}/0/1"]}))
            for one, epoch in ((a, "former"), (b, "next"))
        ]
        await turns()
        registry.tick()
        called = []
        for one in (b, c):
            await turns()
            assert not addresses.done() and not any(other.done() for other in others)
            called += calls(registry, one)
        assert await asyncio.wait_for(addresses, 600.0) == {"values": None}
        await turns()
        assert not any(call.done() for call in called) and not ballots.done() and not others[1].done()
        called += calls(registry, a)
        for told in await asyncio.wait_for(asyncio.gather(*called), 600.0):
            assert names(told) == ["a", "b", "c"]
        for wait in (ballots, *others):
            wait.cancel()

    asyncio.run(play())


def test_a_majority_waits_half_a_second_and_one_that_disconnected_is_not_in_its_view(monkeypatch):
    """A call that has been replaced by a newer one may end without harm to the newer one."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    registry, b, c, d, e = MemberRegistry(), *map(Requester, "bcde")

    async def play() -> None:
        assert await registry.answer(d, {"do": "beat"}) == {"heartbeat_timeout": 5.0}
        former, gone = Gone("b"), Gone("a")
        first = [*calls(registry, former, gone)]
        await turns()
        called = calls(registry, b, c)
        for one in (former, gone):
            one.ends.set()
        with pytest.raises(ConnectionError):
            await first[0]
        with pytest.raises(ConnectionError):
            await first[1]
        registry.hear(e)
        now[0] += 0.5
        registry.tick()
        await turns()
        assert not any(call.done() for call in called), "two of five are not a majority"
        called += calls(registry, d)
        assert [names(told) for told in await asyncio.wait_for(asyncio.gather(*called), 600.0)] == [list("bcd")] * 3
        called = calls(registry, d, c, b)  # all of the last view, in which a and e are not
        assert [names(told) for told in await asyncio.wait_for(asyncio.gather(*called), 600.0)] == [list("bcd")] * 3

    asyncio.run(play())


@pytest.mark.parametrize(("seconds", "allowed"), [(-1.0, 0.0), (0.5, 0.5), (1e9, 86_400.0)])
def test_a_replica_waits_as_long_as_it_asks_and_a_day_at_most(seconds, allowed):
    registry, a, b = MemberRegistry(), Requester("a", patient=False), Requester("b")
    registry.hear(b)  # so that there is no view
    assert ask(registry, a, "call", presence="", seconds=seconds) == {"present": None} and a.waits == [allowed]
    assert ask(registry, a, "look", keys=["group/k"], seconds=seconds) == {"values": None}
    assert a.waits == [allowed] * (1 + (seconds > 0))
    members = [["a", "a-1", 1], ["b", "b-1", 1]]
    outcome, _ = keys_of(f"{view_id(members)}/land", 2)
    assert ask(registry, a, "look", keys=[outcome], seconds=seconds, members=members) == {"values": None}
    assert a.waits[-1] == allowed


def test_a_status_and_the_keys_of_a_replica_are_bounded(monkeypatch):
    registry, a = MemberRegistry(), Requester("a")
    assert ask(registry, a, "call", presence="x" * 16_384, seconds=9)["present"][0][0] == "a"
    said = "the status of a replica has 16385 bytes; at most 16384 are allowed, all ASCII"
    assert ask(registry, a, "call", presence="x" * 16_385, seconds=9) == {"error": said}
    members = [["a", "a-1", 1]]
    outcome, (ballot,) = keys_of(f"{view_id(members)}/land", 1)
    ask(registry, a, "put", key=ballot, value="1", members=members)
    monkeypatch.setattr(shared_keys, "_MOST_OF_ONE", 9)
    assert "too large" in ask(registry, a, "look", keys=[outcome], seconds=9, members=members)["error"]


def test_joins_and_leaves_are_logged_once_and_calls_are_answered(monkeypatch):
    lines, lost, now = list[str](), list[tuple[str, str]](), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "MOST_MEMBERS", 3)
    registry = MemberRegistry(5.0, lines.append)
    registry.lost = lambda *who: lost.append(who)
    a, b = Requester("a"), Requester("b")

    async def play() -> None:
        for one in (a, b, a):
            assert await registry.answer(one, {"do": "beat"}) == {"heartbeat_timeout": 5.0}
        hasty = Requester("c", patient=False)
        for _ in range(2):  # the second view includes one that no longer waits
            calls = [
                asyncio.ensure_future(registry.answer(one, {"do": "call", "presence": f"of {one.name}", "seconds": 9}))
                for one in (b, a)
            ]
            said = await asyncio.wait_for(asyncio.gather(*calls), 600.0)
            assert said == [{"present": [["a", "a-1", "of a"], ["b", "b-1", "of b"]]}] * 2
            assert (await registry.answer(b, {"do": "beat"}))["begun"]  # a, of the last view, is alive
            assert await registry.answer(hasty, {"do": "call", "presence": "of c", "seconds": 0}) == {"present": None}
        assert "all ASCII" in (await registry.answer(hasty, {"do": "call", "presence": "é", "seconds": 0}))["error"]
        now[0] += 4.0
        assert await registry.answer(b, {"do": "here", "who": "a-1"}) == {"here": True}
        await registry.answer(b, {"do": "beat"})
        now[0] += 1.0  # a and c are silent for 5 s, b for 1 s
        registry.tick()
        assert await registry.answer(b, {"do": "here", "who": "a-1"}) == {"here": False}
        assert await registry.answer(b, {"do": "here", "who": "b-1"}) == {"here": True}
        assert await registry.answer(b, {"do": "beat"}) == {"heartbeat_timeout": 5.0}
        await registry.answer(b, {"do": "leave"})

    asyncio.run(play())
    assert lines[:3] == ["joined: a at at a", "joined: b at at b", "joined: c at at c"]
    assert sorted(lines[3:5]) == ["left: a (not heard for 5 s)", "left: c (not heard for 5 s)"]
    assert lines[5:] == ["left: b (it closed)"]
    assert sorted(lost[:2]) == [("a", "a-1"), ("c", "c-1")] and lost[2:] == [("b", "b-1")]
    for name in "abc":
        assert not registry.full(f"{name}-2", name)
        registry.hear(Requester(name, f"{name}-2"))
    assert registry.full("d-1", "d") and not registry.full("a-2", "a")
    with pytest.raises(PacketError, match="3 replicas are there already"):
        registry.hear(Requester("d"))
    with pytest.raises(PacketError, match="b speaks as an incarnation of a"):
        registry.hear(Requester("b", "a-2"))


def test_a_frozen_caller_leaves_once_and_is_in_a_view_after_its_return(monkeypatch):
    lines, now = list[str](), [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    registry, a, b = MemberRegistry(5.0, lines.append), Requester("a"), Requester("b")

    async def play() -> dict[str, Any]:
        registry.hear(b)  # b does not call, so there is no view
        call = asyncio.ensure_future(registry.answer(a, {"do": "call", "presence": "of a", "seconds": 1e9}))
        await asyncio.sleep(0)
        now[0] += 5.0
        for _ in range(2):
            registry.tick()
        assert not registry.empty and await registry.answer(b, {"do": "here", "who": "a-1"}) == {"here": False}
        assert await registry.answer(a, {"do": "beat"}) == {"heartbeat_timeout": 5.0}
        registry.tick()
        return await asyncio.wait_for(call, 600.0)

    assert asyncio.run(play()) == {"present": [["a", "a-1", "of a"]]}
    out = ["left: b (not heard for 5 s)", "left: a (not heard for 5 s)"]
    assert sorted(lines[2:4]) == sorted(out) and lines[4:] == ["joined: a at at a"] and a.waits == [86_400.0]
