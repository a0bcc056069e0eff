"""What a member does with the address of a lighthouse and of other members; without a run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import LinkError
from thinwire.membership import Lighthouse, LighthouseRendezvous
from thinwire.membership import lighthouse as module
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Presence

LIFE = "0123456789abcdef"
TIMES = Timeouts(connect=11.0, transfer=13.0)
ADVICE = "Start one with `thinwire lighthouse`, and check that this machine reaches it: port"


@pytest.fixture
def closed() -> Iterator[int]:
    """A port of this machine at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def test_a_lighthouse_that_is_away_is_reported_with_the_reason(closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    member = LighthouseRendezvous(f"127.0.0.1:{closed}")
    where = f"the lighthouse at 127.0.0.1:{closed} does not answer"
    assert member.away() == f"{where} (Connection refused). {ADVICE} {closed}."
    there = Lighthouse("127.0.0.1", 0)
    assert LighthouseRendezvous(there.address).away() == ""
    there.close()

    def late(*given: Any, **more: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", late)
    assert member.away() == f"{where} (timed out). {ADVICE} {closed}."


def test_addresses_that_this_machine_does_not_have_or_reach_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    member = LighthouseRendezvous("127.0.0.1:1", "203.0.113.1")
    with pytest.raises(
        LinkError, match=r"cannot listen at 203\.0\.113\.1 \(.*Give the address of this machine that the others reach"
    ):
        member.arrive("oslo", LIFE, b"", TIMES, lambda kind, fields: None)
    member.leave()  # it does not listen

    def unknown(*given: Any, **more: Any) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        LinkError, match=r"^the lighthouse oslo:7 has no address that is reached from here \(no such name\)\.$"
    ):
        LighthouseRendezvous("oslo:7")


def test_a_member_is_reached_if_its_process_answers_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_SECONDS", 600.0)
    member, other = (LighthouseRendezvous("127.0.0.1:1") for _ in range(2))
    assert member.address == "127.0.0.1"
    for one in (member, other):  # on one machine
        one.arrive("oslo", LIFE, b"", TIMES, lambda kind, fields: None)
    other.leave()

    def reached(address: str, incarnation: str = LIFE) -> bool:
        return member.reaches(Presence("oslo", incarnation, 1, address=address))

    assert [reached(member.address), reached(member.address, "f" * 16), reached("a..b:7")] == [True, False, False]
    assert member._listener is not None and all(thread.daemon for thread in member._threads)
    member.leave()
    assert not reached(member.address) and member._listener.fileno() == -1
    assert not any(thread.is_alive() for thread in member._threads)


def test_a_member_answers_again_after_its_files_were_used_up() -> None:
    waited, sent, ends = list[float](), list[bytes](), iter([False, False, True])

    class Line:
        def __enter__(self) -> Line:
            return self

        def __exit__(self, *given: object) -> None:
            sent.append(b"closed")

        def sendall(self, data: bytes) -> None:
            sent.append(data)
            raise ConnectionResetError  # it has gone

    accepted = iter([OSError, (Line(), None), OSError, (Line(), None), OSError])

    def accept() -> Any:
        if (one := next(accepted)) is OSError:
            raise OSError
        return one

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return next(ends)

    made: Any = SimpleNamespace(
        _listener=SimpleNamespace(accept=accept), _left=SimpleNamespace(wait=wait), _incarnation=LIFE
    )
    LighthouseRendezvous._answer(made)
    assert sent == [LIFE.encode(), b"closed"] * 2 and len(waited) == 3


def test_a_group_that_cannot_be_built_names_the_others_and_its_keys_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member, asked = LighthouseRendezvous("127.0.0.1:1", "10.0.0.2"), list[tuple[Any, ...]]()
    member._name, member._incarnation, member._timeouts = "oslo", LIFE, TIMES

    def channel(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(
            ask=lambda do, **fields: asked.append((do, fields["key"])), close=lambda: asked.append(("close",))
        )

    def connect(addresses: Any, *given: Any) -> Any:
        addresses.set("0", b"here")
        asked.append(given)
        if len(asked) == 3:
            return "pairs"
        raise LinkError("not all members came in time")

    monkeypatch.setattr(module, "Channel", channel)
    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(module, "TorchGroup", lambda *given: given)
    members = [Presence(name, life, 1) for name, life in (("lima", "1" * 16), ("oslo", LIFE), ("rome", "2" * 16))]
    built: Any = member.connect("epoch 7", members, 1)
    assert built == ("pairs", 13.0)
    key = member._addresses[0]
    opened = ("127.0.0.1", 1, "oslo", LIFE, b"", 2.0)
    assert key.endswith("epoch 7/0") and not member._unused_keys
    assert asked == [opened, ("put", key), (1, 3, "10.0.0.2", 11.0), ("close",)]
    with pytest.raises(LinkError, match=r"^connecting to lima, rome failed: not all members came in time$"):
        member.connect("epoch 8", members, 1)
    assert asked[-1] == ("close",) and member._unused_keys == [key] and member._addresses[0].endswith("epoch 8/0")
