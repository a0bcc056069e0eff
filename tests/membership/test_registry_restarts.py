"""A registry that starts again, with what the process before it kept on the disk."""

from __future__ import annotations

import asyncio

import pytest
from requesters import Requester, ask, calls, names, turns

from thinwire.membership import registry as module
from thinwire.membership.commit import keys_of, view_id
from thinwire.membership.registry import MemberRegistry


class Disk:
    """What the registry has stored, in the order of writing."""

    def __init__(self) -> None:
        self.written, self.noted = list[str](), list[str]()

    def present(self) -> str:
        return self.written[-1] if self.written else ""

    def keep(self, present: str) -> None:
        self.written.append(present)

    def note(self, key: str) -> None:
        self.noted.append(key)

    def notes(self) -> list[str]:
        return self.noted


@pytest.mark.parametrize("back", ["late", "anew", "never"])
def test_after_a_restart_a_view_waits_for_members_that_may_return(monkeypatch, back):
    """Two of three are a majority, and wait for the third as long as it counts as alive, also after it restarted."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    registry, disk = MemberRegistry(5.0), Disk()
    # Three were alive, and members of one view.
    disk.keep('[{"a-1": "a", "b-1": "b", "c-1": "c"}, ["a-1", "b-1", "c-1"]]')
    registry.remember(disk)

    async def call(name: str, incarnation: str = "") -> list[str] | None:
        told = await registry.answer(Requester(name, incarnation), {"do": "call", "presence": "", "seconds": 99})
        return [name for name, *_ in told["present"]]

    async def play() -> None:
        calls = [asyncio.ensure_future(call(name)) for name in "ab"]
        await asyncio.sleep(0)
        for _ in range(2):
            now[0] += 2.0
            for name in "ab":
                await registry.answer(Requester(name), {"do": "beat"})
            registry.tick()
            await asyncio.sleep(0)
            assert not any(each.done() for each in calls)
        now[0] += 1.0 if back == "never" else 0.9
        if back == "never":
            registry.tick()
        else:
            calls.append(asyncio.ensure_future(call("c", "c-2" if back == "anew" else "c-1")))
        said = await asyncio.wait_for(asyncio.gather(*calls), 600.0)
        assert said == [list("ab" if back == "never" else "abc")] * len(calls)

    asyncio.run(play())


def test_after_a_restart_a_vote_waits_for_members_that_may_return_and_those_that_did_are_as_before(monkeypatch):
    now, registry, disk, a, b, c = [100.0], MemberRegistry(5.0), Disk(), *map(Requester, "abc")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    disk.keep('[{"a-1": "a", "b-1": "b", "c-1": "c"}, []]')
    registry.remember(disk)
    members = [["a", "a-1", 1], ["b", "b-1", 1]]
    outcome, ballots = keys_of(f"{view_id(members)}/land", 2)

    async def play() -> None:
        look = {"do": "look", "keys": [outcome], "seconds": 9.0, "members": members}
        vote = asyncio.ensure_future(registry.answer(a, look))
        await turns()
        assert not vote.done()
        for one, ballot in zip((a, b), ballots):
            await registry.answer(one, {"do": "put", "key": ballot, "value": "1", "members": members})
        assert await asyncio.wait_for(vote, 600.0) == {"values": ["yes"]}
        for one in (a, b, c):
            registry.hear(one)
        called = calls(registry, a, b)
        await turns()
        now[0] += 0.25
        registry.tick()
        await turns()
        assert not any(call.done() for call in called)
        now[0] += 0.25
        registry.tick()
        assert [names(told) for told in await asyncio.wait_for(asyncio.gather(*called), 600.0)] == [list("ab")] * 2

    asyncio.run(play())


def test_a_restarted_registry_reads_what_it_kept(monkeypatch):
    now, disk, lines, a, b = [100.0], Disk(), list[str](), Requester("a"), Requester("b")
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    registry, note = MemberRegistry(5.0), f"end/{'0' * 32}"
    registry.remember(disk)
    for one in (a, b):
        registry.hear(one)
        registry.tick()
        registry.tick()
    assert disk.written == ['[{"a-1": "a"}, []]', '[{"a-1": "a", "b-1": "b"}, []]'], "what has changed alone"
    for key in (note, "group/k"):
        ask(registry, a, "put", key=key, value="1")
    assert disk.noted == [note]

    registry = MemberRegistry(5.0, lines.append)
    registry.remember(disk)
    hasty = Requester("c", patient=False)
    assert not registry.empty and ask(registry, hasty, "look", keys=[note], seconds=9) == {"values": ["1"]}
    assert not hasty.waits, "what is there is not waited for"
    for one in (Requester("a", "a-2"), b):
        registry.hear(one)
    assert lines == ["left: a (it has restarted)", "joined: a at at a"]
    now[0] += 5.0
    registry.tick()
    assert registry.empty and disk.written[-1] == ""


def test_calls_are_answered_while_the_disk_is_full():
    """The next tick says so, and writes when there is room."""
    registry, disk = MemberRegistry(5.0), Disk()
    registry.remember(disk)

    def fails(present: str) -> None:
        raise OSError("no space left")

    async def play() -> None:
        disk.keep = fails
        both = Requester("a"), Requester("b")
        for one in both:
            registry.hear(one)
        told = await asyncio.wait_for(asyncio.gather(*calls(registry, *both)), 600.0)
        assert [names(one) for one in told] == [list("ab")] * 2
        with pytest.raises(OSError, match="no space left"):
            registry.tick()
        del disk.keep
        registry.tick()
        assert disk.written == ['[{"a-1": "a", "b-1": "b"}, ["a-1", "b-1"]]']

    asyncio.run(play())
