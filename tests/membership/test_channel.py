"""Messages between a replica and a lighthouse: their bytes, their limits, and what a connection makes of an answer."""

from __future__ import annotations

import json
import math
import socket
from typing import Any

import pytest

from thinwire.errors import LinkError, PacketError
from thinwire.membership import channel as module
from thinwire.membership.channel import Channel, Seal, at, family

SECRET = bytes(range(32))


def test_the_limits_of_all_releases_are_as_documented():
    """A replica and a lighthouse of different releases have the same ones."""
    assert (module.LIGHTHOUSE_PORT, module.ANSWER_SECONDS) == (29510, 5.0)
    assert (module.MOST_PRESENCE, module.MOST_MEMBERS) == (16_384, 128)
    assert (module.MOST_ASKED, module.MOST_ANSWERED) == (131_072, 6_291_456)
    assert Channel.begun is False


def test_messages_have_the_recorded_bytes():
    seal = Seal(SECRET, "replica", b"talk")
    recorded = (
        "0d000000 87e42728ef578121f2cca81416f2886b1607ae94330f1f9ac312f7912dea2784 7b22646f223a2262656174227d",
        "0d000000 052d6b4115d7d605e76b37d809f58d5f72b50eaa36e74dc847c1a89237208ea0 7b22646f223a2262656174227d",
    )
    assert [seal.pack({"do": "beat"}).hex() for _ in recorded] == [text.replace(" ", "") for text in recorded]
    with pytest.raises(ValueError, match="JSON compliant"):
        seal.pack({"seconds": math.nan})


def sealed(body: bytes) -> bytes:
    tag = Seal(SECRET, "replica", b"talk")._mac(body)
    return module.FRAME.pack(len(body), tag) + body


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000, b"[]"])
def test_what_is_no_json_object_is_refused_in_spite_of_its_mac(body):
    with pytest.raises(PacketError, match="a message is not"):
        Seal(SECRET, "replica", b"talk").open(sealed(body)[4:36], body)


class Line:
    """A socket that gives what is to be read in pieces of two bytes, and records what it is asked for."""

    def __init__(self, coming: bytes) -> None:
        self.coming, self.asked, self.closed = coming, list[int](), False

    def recv(self, nbytes: int) -> bytes:
        self.asked.append(nbytes)
        piece, self.coming = self.coming[: min(2, nbytes)], self.coming[min(2, nbytes) :]
        return piece

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def sendall(self, data: bytes) -> None:
        self.sent = data

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self.closed = True


def opened(coming: bytes) -> tuple[Channel, Line]:
    """A connection after its handshake, over which `coming` comes."""
    channel, line = Channel.__new__(Channel), Line(coming)
    channel._where, channel._line = "oslo:1", line  # type: ignore[assignment]
    channel._says, channel._hears = Seal(SECRET, "replica", b""), Seal(SECRET, "replica", b"talk")
    return channel, line


def test_bytes_are_received_until_the_deadline_and_no_more_than_are_due(monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", lambda: 100.0)
    channel, line = opened(b"abcdefg")
    assert channel._receive(5, 100.5) == b"abcde" and line.asked == [5, 3, 1]
    for until in (100.0, 99.0):
        with pytest.raises(OSError, match="it did not answer in time"):
            channel._receive(1, until)
    with pytest.raises(OSError, match="it has closed the connection"):
        channel._receive(3, 101.0)


def test_an_answer_of_the_most_bytes_is_read_and_a_longer_one_closes_the_connection(monkeypatch):
    answer: dict[str, Any] = {"heartbeat_timeout": 5.0}
    body = json.dumps(answer).encode()
    monkeypatch.setattr(module, "MOST_ANSWERED", len(body))
    channel, line = opened(sealed(body))
    assert channel.ask("beat") == answer and not line.closed
    assert line.sent[36:] == b'{"do":"beat","seconds":0.0}'
    monkeypatch.setattr(module, "MOST_ANSWERED", len(body) - 1)
    channel, line = opened(sealed(body))
    said = f"the lighthouse at oslo:1: it announces a message of {len(body)} bytes; at most {len(body) - 1} are allowed"
    with pytest.raises(LinkError) as caught:
        channel.ask("beat")
    assert str(caught.value) == said and line.closed


@pytest.mark.parametrize(
    ("error", "why"),
    [(TimeoutError("timed out"), "timed out"), (OSError(111, "Connection refused"), "Connection refused")],
)
def test_an_absent_lighthouse_is_named_with_the_cause(monkeypatch, error, why):
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise error

    monkeypatch.setattr(module.socket, "create_connection", refuse)
    with pytest.raises(LinkError) as caught:
        Channel("::1", 7, "oslo", "f" * 16, SECRET)
    advice = "check the address, and that `thinwire lighthouse` runs there."
    assert str(caught.value) == f"no lighthouse answers at [::1]:7: {why}; {advice}"


def test_addresses_of_ip_version_6_are_written_in_brackets():
    assert [at(host, 7) for host in ("::1", "oslo")] == ["[::1]:7", "oslo:7"]
    assert [family(host) for host in ("::1", "oslo")] == [socket.AF_INET6, socket.AF_INET]
