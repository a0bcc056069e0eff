"""A lighthouse's connections: whom it refuses, with which bytes, and how many it keeps."""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from thinwire.errors import ConfigurationError, LinkError
from thinwire.membership import Lighthouse, server
from thinwire.membership.channel import FULL, HELLO, OTHER_SECRET, PROOF, WELCOME, Channel, mac, spoken
from thinwire.membership.lighthouse import _parse
from thinwire.membership.server import _Line

SECRET, LIFE = bytes(range(32)), "f" * 16
LIMIT = 600.0  # ends a hang


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def lighthouse(told: list[str]) -> Iterator[Lighthouse]:
    with_secret = Lighthouse("127.0.0.1", 0, 7.0, SECRET, lambda line: told.append(line.split(" ", 2)[2]))
    yield with_secret
    with_secret.close()


def channel(lighthouse: Lighthouse, name: str = "oslo") -> Channel:
    return Channel(lighthouse.host, lighthouse.port, name, LIFE, SECRET, LIMIT)


def refused(lighthouse: Lighthouse, name: bytes, life: bytes = LIFE.encode(), secret: bytes = SECRET) -> bytes:
    """What a lighthouse sends to a replica that introduces itself so, until it closes the connection."""
    with socket.create_connection((lighthouse.host, lighthouse.port), timeout=LIMIT) as line:
        hello = line.recv(HELLO.size, socket.MSG_WAITALL)
        said = spoken() + struct.pack("<64s16s32s", name, life, secrets.token_bytes(32))
        line.sendall(said + mac(secret, "replica", hello, said))
        heard = b""
        while piece := line.recv(1 << 16):
            heard += piece
    return heard


def test_a_lighthouse_goes_on_if_what_it_tells_cannot_be_written() -> None:
    def tell(line: str) -> None:
        tried.put(line.split(" ", 2)[2])
        raise OSError("no space left on device")

    tried: queue.Queue[str] = queue.Queue()
    there = Lighthouse("127.0.0.1", 0, 0.05, SECRET, tell)
    try:
        channel(there).ask("beat")
        assert tried.get() == "joined: oslo at 127.0.0.1"
        assert tried.get() == "left: oslo (not heard for 0.05 s)"
        channel(there).ask("beat")
    finally:
        there.close()


def test_a_refusal_says_why_and_nothing_else(lighthouse: Lighthouse, told: list[str]) -> None:
    assert refused(lighthouse, b"oslo", secret=b"") == WELCOME.pack(OTHER_SECRET, 0.0, bytes(PROOF))
    for name, life in ((b"os lo", LIFE), (b"oslo", "F" * 16), (b"\xff", LIFE), (b"oslo", "\0" * 16)):
        assert refused(lighthouse, name, life.encode()) == b""
    lighthouse._registry.full = lambda incarnation, name: "128 replicas are there already"  # type: ignore[method-assign]
    assert refused(lighthouse, b"oslo") == WELCOME.pack(FULL, 0.0, bytes(PROOF))
    with pytest.raises(LinkError, match="is full: 128 replicas are there already"):
        channel(lighthouse)
    assert told == [
        f"refused: {who} at 127.0.0.1 ({why})"
        for who, why in (
            ("somebody", "it does not hold this run's secret"),
            ("somebody", "its name is not allowed"),
            ("oslo", "128 replicas are there already"),
        )
    ]


def test_a_request_of_the_most_bytes_is_answered_and_a_longer_one_ends_its_connection(
    lighthouse: Lighthouse, told: list[str]
) -> None:
    member = channel(lighthouse)
    assert member.heartbeat_timeout == 7.0 and lighthouse._thread.daemon
    around = len(b'{"do":"sing","seconds":0.0,"song":""}')
    with pytest.raises(LinkError, match="this request is not known"):
        member.ask("sing", song="a" * (131_072 - around))
    assert member.ask("beat") == {"heartbeat_timeout": 7.0}
    with pytest.raises(LinkError):
        member.ask("sing", song="a" * (131_073 - around))
    why = "it announces a message of 131,073 bytes; at most 131,072 are allowed"
    assert told == ["joined: oslo at 127.0.0.1", f"refused: oslo at 127.0.0.1 ({why})"]


def test_replicas_that_disconnect_during_a_call_or_after_one_are_no_error(
    lighthouse: Lighthouse, told: list[str]
) -> None:
    errors, gone, member = list[object](), queue.SimpleQueue[str](), channel(lighthouse)
    assert member.ask("call", 9.0, presence="status") == {"present": [["oslo", LIFE, "status"]]}
    lighthouse._loop.set_exception_handler(lambda loop, context: errors.append(context))
    lighthouse._registry.hear(SimpleNamespace(name="rome", incarnation="0" * 16, address="there"))  # does not call
    lighthouse._registry.disconnected = gone.put  # type: ignore[method-assign, assignment]
    for name, incarnation in (("lima", "1" * 16), ("bern", "2" * 16)):
        other = Channel(lighthouse.host, lighthouse.port, name, incarnation, SECRET, LIMIT)
        if name == "lima":
            other._line.sendall(other._says.pack({"do": "call", "seconds": 99.0, "presence": "status"}))
        other.close()
        assert gone.get(timeout=LIMIT) == incarnation
    assert member.ask("beat") == {"heartbeat_timeout": 7.0} and not errors
    assert [line.split()[1] for line in told] == ["oslo", "rome", "lima", "bern"]
    lighthouse.close()  # ends the connections that are open
    with pytest.raises(LinkError):
        member.ask("beat")


@pytest.mark.parametrize("do", ["beat", "call"])
@pytest.mark.parametrize("hops", range(8))
def test_a_connection_ends_wherever_it_is_cancelled_beside_an_answer(
    lighthouse: Lighthouse, hops: int, do: str
) -> None:
    """An end that falls between an answer and the next request is not lost: `close` would wait for it for ever."""
    answer, cancelled = lighthouse._registry.answer, queue.SimpleQueue[bool]()

    async def answered(requester: Any, said: Any) -> Any:
        if said["do"] == do:
            (task,) = lighthouse._lines[requester.incarnation]
            cancel(hops, task)
        return await answer(requester, said)

    def cancel(left: int, task: asyncio.Task[None]) -> None:
        if left:
            lighthouse._loop.call_soon(cancel, left - 1, task)
        else:
            cancelled.put(task.cancel())

    lighthouse._registry.answer = answered  # type: ignore[method-assign]
    member = channel(lighthouse)
    with suppress(LinkError):  # it may be answered before its end
        member.ask(do, **({"seconds": 0.0, "presence": "status"} if do == "call" else {}))
    assert cancelled.get(timeout=LIMIT)
    with pytest.raises(LinkError):
        member.ask("forget", keys=[])


def test_a_port_that_cannot_be_is_refused(lighthouse: Lighthouse) -> None:
    assert lighthouse.address == f"127.0.0.1:{lighthouse.port}"
    for port in (65536, lighthouse.port):
        with pytest.raises(
            LinkError, match=rf"cannot listen at 127\.0\.0\.1:{port} \(.*Give an address of this machine"
        ):
            Lighthouse("127.0.0.1", port)


def test_a_silent_stranger_is_refused_after_its_time(
    lighthouse: Lighthouse, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.0)
    with socket.create_connection((lighthouse.host, lighthouse.port), timeout=LIMIT) as line, suppress(ConnectionError):
        while line.recv(1 << 16):
            pass
    assert told == ["refused: somebody at 127.0.0.1 (it said nothing, or read nothing, for 0 s)"]


def tasks(addresses: list[str], closed: list[int]) -> dict[Any, str]:
    def task(number: int) -> Any:
        return type("Task", (), {"cancel": lambda self: closed.append(number)})()

    return {task(number): address for number, address in enumerate(addresses)}


@pytest.mark.parametrize(
    ("addresses", "closes"),
    [
        ([*"abc", *["x"] * 15], []),
        ([*"abc", *["x"] * 16], [3]),  # a quarter of 64 from one address: the oldest of them
        ([str(number) for number in range(63)], []),
        ([str(number) for number in range(64)], [0]),
    ],
)
def test_the_oldest_connection_without_a_proof_makes_room(
    lighthouse: Lighthouse, addresses: list[str], closes: list[int]
) -> None:
    closed: list[int] = []
    room = SimpleNamespace(_strangers=tasks(addresses, closed))
    Lighthouse._make_room(room, "x")  # type: ignore[arg-type]
    assert closed == closes


def test_a_refusal_is_reported_again_only_after_1024_others(lighthouse: Lighthouse, told: list[str]) -> None:
    line = _Line("here", None, None)  # type: ignore[arg-type]
    refuse: Callable[[int], None] = lambda number: lighthouse._refuse(line, f"reason {number}")  # noqa: E731
    for number in (*range(1024), 0):
        refuse(number)
    assert len(told) == 1024 and told[0] == "refused: somebody at here (reason 0)"
    refuse(1024)  # the oldest is forgotten, which is 1: 0 was heard again
    for number in (0, 2):
        refuse(number)
    assert len(told) == 1025
    refuse(1)
    assert len(told) == 1026


def test_addresses_have_a_host_and_may_have_a_port() -> None:
    for text, due in (
        ("oslo", ("oslo", 29510)), ("oslo:1", ("oslo", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]", ("::1", 29510)),
        ("[::1]:7", ("::1", 7)),
    ):  # fmt: skip
        assert _parse(text) == due
    for text in (
        "",
        ":7",
        "oslo:",
        "oslo:0",
        "oslo:65536",
        "oslo:000007",
        "oslo:7x",
        "oslo:٧",
        "[]:7",
        "a..b:7",
        "a" * 64,
    ):
        with pytest.raises(ConfigurationError, match=r"HOST:PORT is needed, as 10\.0\.0\.1:29510"):
            _parse(text)
