"""What a member gives to a hub's client, and what it does with the client's answers; without a hub."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import ConfigurationError, DisagreementError, LinkError
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Presence
from thinwire.net import rendezvous as module
from thinwire.net.calls import Refused
from thinwire.net.rendezvous import HubRendezvous

ENROLMENT: Any = SimpleNamespace(name="oslo", token=SimpleNamespace(where="the hub at hub.example:29500"))
TIMES = Timeouts(heartbeat_interval=1.5, heartbeat_timeout=7.0, connect=11.0, transfer=13.0)
MEMBERS = [Presence(name, f"{place:016x}", 1) for place, name in enumerate(("lima", "oslo"))]


class Thread:
    """Stands for the process's loop, and counts its users."""

    users = 0

    @classmethod
    def shared(cls) -> Thread:
        cls.users += 1
        return cls()

    def release(self) -> None:
        Thread.users -= 1


@pytest.fixture(autouse=True)
def thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LoopThread", Thread)
    monkeypatch.setattr(Thread, "users", 0)


def arrived(*given: Any, **more: Any) -> HubRendezvous:
    made = HubRendezvous(ENROLMENT, *given, **more)
    made._name, made._incarnation, made._timeouts = "oslo", "0123456789abcdef", TIMES
    return made


@pytest.mark.parametrize("run", ["", "red"])
def test_a_group_is_of_one_run_and_epoch_and_of_the_views_members(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    links, built, closed = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[str]()
    names = ["lima", "oslo"]

    def link(*given: Any) -> str:
        links.append(given)
        return "link"

    def group(*given: Any, **more: Any) -> Any:
        built.append((*given, more))
        return SimpleNamespace(names=tuple(names), close=lambda: closed.append("closed"))

    monkeypatch.setattr(module, "HubLink", link)
    monkeypatch.setattr(module, "connected_group", group)
    member = arrived(*([run] if run else []), bits_per_second=8e6)
    assert member.connect("epoch 7", MEMBERS, 1).names == ("lima", "oslo") and not closed  # type: ignore[attr-defined]
    label = hashlib.sha256(f"thinwire elastic {run} epoch 7".encode()).digest()
    assert links == [(ENROLMENT, label, 2, 8e6, "", 1, b"0123456789abcdef", 7.0, False)]
    assert built == [("link", 11.0, 13.0, {"farewell": 3.0})]
    names[0] = "rome"
    with pytest.raises(LinkError, match="rome, oslo came in place of the members of the view"):
        member.connect("epoch 8", MEMBERS, 1)
    assert closed == ["closed"]


def test_a_member_is_named_in_messages_and_relays() -> None:
    member = arrived()
    assert (member.address, member.where, member.relays) == ("hub:oslo", "the hub at hub.example:29500", True)
    with pytest.raises(ConfigurationError):
        arrived("no run")


def test_another_member_is_reached_if_the_hub_hears_it() -> None:
    member, asked = arrived(), list[Any]()
    assert member.reaches(MEMBERS[0]) is False  # no hub has been found

    def ask(do: str, who: str) -> dict[str, Any]:
        asked.append((do, who))
        if len(asked) == 3:
            raise LinkError("gone")
        return {"here": len(asked) == 1}

    member._vote_store = SimpleNamespace(channel=SimpleNamespace(ask=ask))  # type: ignore[assignment]
    assert [member.reaches(MEMBERS[0]) for _ in range(3)] == [True, False, False]
    assert asked == [("here", MEMBERS[0].incarnation)] * 3


def test_a_member_that_has_left_uses_the_loop_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = list[tuple[Any, ...]]()
    monkeypatch.setattr(module, "HubChannel", lambda *given: channels.append(given))
    member = arrived("red")
    member._channel()
    ((enrolment, incarnation, run, thread, silent),) = channels
    assert (enrolment, incarnation, run, silent) == (ENROLMENT, "0123456789abcdef", "red", 7.0)
    assert isinstance(thread, Thread) and Thread.users == 1
    for _ in range(2):
        member.leave()
        assert Thread.users == 0
    with pytest.raises(LinkError, match=r"^this replica has left the hub at hub\.example:29500$"):
        member._channel()


def test_two_threads_may_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a run: one thread has kept the final state, the other closes the replica. The loop runs until the channel is closed."""
    member, lock, other = arrived(), threading.RLock(), threading.Event()

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is second:
                other.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def leaves() -> None:
        member.leave()
        other.set()

    def close() -> None:
        second.start()
        other.wait()  # until the second thread has left, or waits for the first
        users.append(Thread.users)

    users, second = list[int](), threading.Thread(target=leaves)
    monkeypatch.setattr(member, "_leaving", Lock(), raising=False)
    member._vote_store = SimpleNamespace(channel=SimpleNamespace(close=close))  # type: ignore[assignment]
    member.leave()
    second.join()
    assert users == [1] and Thread.users == 0


def test_a_refused_member_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise Refused("oslo is revoked")

    monkeypatch.setattr(module, "HubChannel", refuse)
    with pytest.raises(DisagreementError, match="replica 'oslo' cannot take part: oslo is revoked"):
        arrived()._channel()
