"""The store of members' keys, in which gloo finds its peers: requests and responses by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest

from thinwire.errors import LinkError
from thinwire.membership import store as module
from thinwire.membership.channel import Channel
from thinwire.membership.store import ChannelVoteStore, EpochStore


class Answers:
    """A channel that returns these answers and records the requests."""

    heartbeat_timeout = 5.0

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.asked, self.closed = list(answers), list[tuple[Any, ...]](), False

    def ask(self, do: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        self.asked.append((do, seconds, *fields.values()))
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed = True


def test_a_vote_store_sends_the_documented_requests() -> None:
    channel = Answers(
        {}, {"values": ["1", "1"]}, {"values": None}, {"value": "no"}, {"values": ["yes"]}, {"values": None}
    )
    unused = list[str]()
    members = (("paris", "p-1", 1), ("lima", "l-1", 2))
    votes = ChannelVoteStore(channel, unused).of(members)
    votes.put("a/0")
    assert votes.all(("a/0", "a/1")) is True and votes.all(["b/0"]) is False
    assert votes.settle("a", b"yes") == b"no"
    assert votes.wait("a", 7.0) == b"yes" and votes.wait("b", 0.0) is None
    votes.forget(["a/0", "a/1"])
    assert unused == ["a/0", "a/1"] and channel.asked == [
        ("put", 0.0, "a/0", "1", members),
        ("look", 0.0, ["a/0", "a/1"]),
        ("look", 0.0, ["b/0"]),
        ("settle", 0.0, "a", "yes", members),
        ("look", 7.0, ["a"], members),
        ("look", 0.001, ["b"], members),
    ]


def test_all_addresses_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    found = {"values": ["YQ=="]}
    channel = Answers({}, found, found, found, {"values": None}, {"values": ["!"]}, {"values": None})
    store = EpochStore(cast(Channel, channel), "e", 5.0)
    store.set("x", "a")
    now[0] = 101.0
    assert store.get("x") == b"a" and store.own == ["group/e/x"]
    store.wait(["x"])
    now[0] = 110.0
    assert store.check(["x"]) is True
    with pytest.raises(LinkError, match="not all members came in time"):
        store.wait(["x", "y"])
    with pytest.raises(LinkError, match=r"the address of a member cannot be read \(x\)"):
        store.get("x")
    assert store.check(["y"]) is False
    store.close()
    assert channel.closed and channel.asked == [
        ("put", 0.0, "group/e/x", "YQ==", []),
        ("look", 4.0, ["group/e/x"]),
        ("look", 4.0, ["group/e/x"]),
        ("look", 0.0, ["group/e/x"]),
        ("look", 0.001, ["group/e/x", "group/e/y"]),
        ("look", 0.001, ["group/e/x"]),
        ("look", 0.0, ["group/e/y"]),
    ]
