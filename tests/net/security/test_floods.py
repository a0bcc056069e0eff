"""Floods: what strangers and members cost is bounded, in bytes, counts and order of service, and the others' rounds go on."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from group_laws import Exchange
from hub_process import HubProcess
from raw_member import RawMember, admitted, welcomed
from secure_groups import run_secure

from thinwire.net import Hub, frames, limits
from thinwire.net.audit import LINES, AuditLog
from thinwire.net.channels import CONTROL
from thinwire.net.limits import FairBucket, TokenBucket
from thinwire.net.proxy import STRANGER_NBYTES, TcpProxy
from thinwire.net.versions import stated

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, body: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body


FLOODS = {
    "pings": frame(6, bytes(8)) * 200,
    "settings": frame(4, b"\0\3\0\0\0\1") * 200,
    "resets": b"".join(frame(1, b"\x82\x86\x84", 2 * n + 1, 5) + frame(3, bytes(4), 2 * n + 1) for n in range(200)),
    "continuations": frame(1, b"\x40\x01a\x01b", 1, 1) + frame(9, b"\x40\x01a\x01b" * 500, 1) * 20,
}


def rounds(group) -> None:
    for what in range(3):
        Exchange(group, 1, what, 300_000).check()


@pytest.mark.parametrize("identified", [False, True])
def test_a_connection_without_authentication_sends_no_more_than_a_bound(identified: bool, tmp_path: Path) -> None:
    lines = list[str]()

    async def play() -> int:
        took, ended = 0, asyncio.Event()
        port = TcpProxy(AuditLog(tmp_path / "audit.txt", lines.append), 600.0)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal took
            if identified:
                port.authenticated(f"unix:{writer.get_extra_info('peername')}", "oslo")
            while data := await reader.read(1 << 16):
                took += len(data)
            writer.close()
            ended.set()

        server = await asyncio.start_unix_server(take, port.inner)
        number = await port.open("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", number)
        with suppress(OSError):
            for _ in range(8):
                writer.write(bytes(STRANGER_NBYTES))
                await writer.drain()
            writer.write_eof()
        await ended.wait()
        writer.transport.abort()
        server.close()
        await port.close()
        return took

    took = asyncio.run(play())
    if identified:
        assert took == 8 * STRANGER_NBYTES and not lines
    else:
        assert took <= STRANGER_NBYTES and f"it sent {STRANGER_NBYTES} bytes without authentication" in lines[0]


@pytest.mark.parametrize("side", ["the stranger", "the server"])
def test_the_reason_of_a_refusal_is_the_same_however_the_connection_ends(side: str, tmp_path: Path) -> None:
    """A refused handshake ends by a reset, a broken pipe or an end of file, as chance has it."""
    lines = list[str]()

    async def play() -> None:
        ended = asyncio.Event()
        port = TcpProxy(AuditLog(tmp_path / "audit.txt", lambda line: (lines.append(line), ended.set())), 600.0)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            (writer if side == "the server" else outer).transport.abort()

        server = await asyncio.start_unix_server(
            take, port.inner, limit=1
        )  # what it has not read makes its end a reset
        number = await port.open("127.0.0.1", 0)
        _, outer = await asyncio.open_connection("127.0.0.1", number)
        outer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        outer.write(bytes(1000))
        await ended.wait()
        server.close()
        await port.close()

    asyncio.run(play())
    assert "refused a connection from" in lines[0] and "it ended without authentication" in lines[0]


@pytest.mark.parametrize("kind", FLOODS)
def test_frames_of_http_at_the_port_for_joining_are_not_read(kind: str, hub: Hub, audit, tmp_path: Path) -> None:
    """What is no request to join ends its connection after a header's bytes, whatever it would have asked for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])

    def flood() -> None:
        for _ in range(30):
            with suppress(OSError), socket.create_connection((hub.host, hub.join_port)) as plain:
                with context.wrap_socket(plain) as link:
                    link.sendall(PREFACE + frame(4))
                    for _ in range(50):
                        link.sendall(FLOODS[kind])
                    while link.recv(4096):  # the hub ends it, not this side, which would be another reason
                        pass

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    run_secure(hub, 2, rounds, tmp_path / "keys")
    for thread in threads:
        thread.join()
    audit.wait("refused a connection from 127.0.0.1:", nth=LINES)
    for line in filter(
        lambda line: "refused" in line, audit.said
    ):  # by its first bytes, or by their number, as chance has it
        assert "it sent no request to join" in line or "bytes without authentication" in line
        assert int(line.rpartition("(")[2].split()[0]) < 1 << 15
    hub.close()
    assert "strangers in" in audit.wait("counted") and sum("refused" in line for line in audit.said) <= LINES + 1


def test_frames_of_http_without_a_message_are_read_later_and_named(
    tmp_path: Path, audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a member with a key. Long messages of others need nothing of what such frames are allowed."""
    monkeypatch.setattr(limits, "BARE_PER_SECOND", 1 << 16)
    monkeypatch.setattr(limits, "BARE_AT_ONCE", 1 << 18)
    monkeypatch.setattr("thinwire.net.audit.SECONDS", 0.0)  # what is counted is written at the next count
    unknown = frame(0x33, bytes(1000)) * 60  # which gRPC ignores; it ends a connection with many pings by itself
    with Hub(tmp_path / "hub", say=audit) as hub, ExitStack() as stack:
        token = hub.invite(9)
        own = admitted(token, "a-flooder", tmp_path)
        (tmp_path / "own.pem").write_bytes(own.key + own.certificate)
        context = ssl.create_default_context(cadata=own.authorities.decode())
        context.set_alpn_protocols(["h2"])
        context.check_hostname = False
        context.load_cert_chain(tmp_path / "own.pem")
        plain = stack.enter_context(socket.create_connection(("127.0.0.1", token.port)))
        link = stack.enter_context(context.wrap_socket(plain))
        link.sendall(PREFACE + frame(4) + frame(1, call(CONTROL), 1, 4))
        heard = link.makefile("rb")
        while (head := heard.read(9))[3] != 1:  # until it is identified, and its call is answered by headers
            heard.read(int.from_bytes(head[:3]))

        def flood() -> None:
            for _ in range(1 << 10):
                link.sendall(unknown)

        flooding = stack.enter_context(ThreadPoolExecutor()).submit(flood)
        stack.callback(link.shutdown, socket.SHUT_RDWR)  # a send that waits ends
        audit.wait("delayed a-flooder: ", "bytes, which carry no message")
        run_secure(hub, 2, rounds, tmp_path / "keys")
        assert not flooding.done()  # at 64 KiB a second its 61 MB take a quarter of an hour


def call(method: str) -> bytes:
    """The headers of a call of gRPC, without an index."""
    pairs = [(":method", "POST"), (":scheme", "https"), (":path", method), (":authority", "hub"), ("te", "trailers")]
    pairs += [("content-type", "application/grpc"), *stated()]
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in pairs
    )


def test_folders_of_sockets_of_killed_processes_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of processes that live stay."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    def folders() -> set[str]:
        return {path.name for path in (tmp_path / "tmp").glob("thinwire-*")}

    killed = HubProcess(tmp_path / "killed")
    (left,) = folders()
    with closing(HubProcess(tmp_path / "lives")) as lives:
        (living,) = folders() - {left}
        killed.kill()
        assert folders() == {left, living}
        with closing(HubProcess(tmp_path / "next")):
            assert living in folders() and left not in folders() and len(folders()) == 2
        run_secure(lives.invite(2), 2, rounds, tmp_path / "keys")


def test_another_source_waits_behind_one_request_of_a_flood() -> None:
    """And not behind all of them, which came before."""
    served = list[str]()

    async def play() -> None:
        bucket = FairBucket(lambda: TokenBucket(1000.0, 1000.0), TokenBucket(200.0, 1.0))

        async def one(source: str) -> None:
            await bucket.take(source, 1)
            served.append(source)

        flood = [asyncio.create_task(one("flood")) for _ in range(100)]
        await asyncio.sleep(0)
        await one("other")
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(play())
    assert served.index("other") <= 2


def test_a_request_that_is_given_up_costs_nothing() -> None:
    now = [0.0]
    bucket = TokenBucket(1.0, 2.0, lambda: now[0])
    assert bucket.take(2) == 0.0 and bucket.take(2) == 2.0 and bucket.take(1) == 1.0
    now[0] = 1.0
    assert bucket.take(1) == 0.0 and bucket.take(1) == 1.0
    bucket.give(100)
    assert bucket.take(2) == 0.0 and bucket.take(1) == 1.0


def test_frames_of_a_member_that_come_too_fast_are_read_later_and_named(
    tmp_path: Path, audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of others are not held up."""
    monkeypatch.setattr(limits, "FRAMES_AT_ONCE", 200)
    monkeypatch.setattr(limits, "FRAMES_PER_SECOND", 1e-3)
    with Hub(tmp_path / "hub", say=audit) as hub:
        flooder, sink = (admitted(hub.invite(1), name, tmp_path) for name in ("a-flooder", "sink"))
        with RawMember(hub.invite(), flooder) as first, RawMember(hub.invite(), sink) as second:
            stream, other = first.hello(2), second.hello(2)
            welcomed(stream), welcomed(other)
            stream.put(frames.SYNC, 1, frames.packed(frames.SYNC, connection_of(other, stream), 0))
            for number in range(1000):
                stream.put(frames.ACK, 1, frames.packed(frames.ACK, number, 0))
            numbers = [other.frame().number(0) for _ in range(199)]
            assert numbers[-1] == 198 or numbers[-1] == 197
            run_secure(hub, 2, rounds, tmp_path / "keys")
            hub._audit.flush()
            assert "frames, which came faster" in audit.wait("delayed a-flooder: 1 ")


def connection_of(other, stream) -> int:  # type: ignore[no-untyped-def]
    """The hub's number of the connection of `other`, as it tells `stream`."""
    while (heard := stream.frame()).kind != frames.BACK:
        pass
    return heard.number(0)


def test_masses_of_strangers_at_both_ports_leave_few_lines_on_the_console(tmp_path: Path) -> None:
    """gRPC printed one for each handshake without a certificate."""
    hub = HubProcess(tmp_path / "hub")
    try:
        token = hub.invite(2)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for number in range(60):
            with (
                suppress(OSError),
                socket.create_connection((token.host, (token.port, token.join_port)[number % 2])) as one,
            ):
                with context.wrap_socket(one) as link:
                    link.sendall(bytes(100))
                    while link.recv(100):
                        pass
        run_secure(token, 2, rounds, tmp_path / "keys")
    finally:
        hub.process.terminate()
        said, _ = hub.process.communicate()
        hub.close()
    assert 0 < sum("refused" in line for line in said.splitlines()) <= LINES + 1
    assert sum("counted" in line and "strangers in" in line for line in said.splitlines()) == 1
