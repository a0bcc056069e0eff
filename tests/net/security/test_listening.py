"""A member that listens: only connected members of its group get in, each refusal leaves a line in its audit log, and rounds continue."""

from __future__ import annotations

import asyncio
import dataclasses
import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import grpc
import pytest
from group_laws import TIMEOUT, Exchange, free_port
from raw_member import RawMember, admitted, signed, welcomed
from secure_groups import run_secure

from thinwire.comm import gather
from thinwire.errors import LinkError
from thinwire.net import Hub, frames, join, straight
from thinwire.net.audit import AuditLog
from thinwire.net.channels import CONTROL, MEET, STRAIGHT, dial
from thinwire.net.keys import HUB, Authority, Credentials, member_dns, private_folder
from thinwire.net.state import HubState
from thinwire.net.versions import stated


class Impostor:
    """A gRPC server with the valid key of a member. `heard` has the calls that a victim has made."""

    def __init__(self, own: Credentials) -> None:
        self.heard: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(1), handlers=(self,))
        credentials = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authorities, True)
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.heard.append(details.method)

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()


class Pair:
    """`bergen`, which listens, and `oslo`. Their audit logs tell `says`."""

    def __init__(self, hub: Hub, folder, says, monkeypatch) -> None:
        monkeypatch.setattr(straight, "AuditLog", lambda path: AuditLog(path, says))
        self.folder, self.token, port = folder, hub.invite(9), free_port()
        self.groups = {}

        def enter(name: str, listen: str) -> None:
            self.groups[name] = join(str(self.token), name, 2, folder, "", TIMEOUT, listen=listen)

        other = threading.Thread(target=enter, args=("oslo", ""))
        other.start()
        enter("bergen", f"127.0.0.1:{port}")
        other.join()
        self.port = dataclasses.replace(self.token, port=port)

    def exchange(self) -> None:
        exchanges = [Exchange(group, 1, 0, 300_000) for group in self.groups.values()]
        for exchange in exchanges:
            exchange.check()

    def knock(self, own: Credentials) -> RawMember:
        return RawMember(self.port, own, dns="bergen.member.thinwire")

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


@pytest.fixture
def lines(audit):
    """The audit log of the members, apart from the hub's."""
    return type(audit)()


@pytest.fixture
def pair(hub, tmp_path, lines, monkeypatch):
    pair = Pair(hub, tmp_path / "keys", lines, monkeypatch)
    yield pair
    pair.close()


def test_machines_that_are_not_in_the_group_are_refused(pair, lines, tmp_path):
    """Without a valid certificate by the handshake, and another member of the hub by its name."""
    own, foreign = Authority(tmp_path / "hub"), Authority(private_folder(tmp_path / "foreign"))
    hour = timedelta(hours=1)
    strangers = [
        Credentials(b"", b"", own.pem),
        signed(foreign, "oslo", hour, own.pem),
        signed(own, "oslo", -timedelta(minutes=1), own.pem),
    ]
    for count, stranger in enumerate(strangers, 1):
        with pair.knock(stranger) as member:
            assert member.straight(1, 1).refusal()[0] is grpc.StatusCode.UNAVAILABLE
        lines.wait("refused a connection from 127.0.0.1:", "without authentication", nth=count)
    with pair.knock(admitted(pair.token, "kyoto", pair.folder)) as member:
        code, why = member.straight(1, 1).refusal()
    assert code is grpc.StatusCode.PERMISSION_DENIED and "kyoto is not in this member's group" in why
    lines.wait("refused 127.0.0.1:", "kyoto is not in this member's group")
    pair.exchange()


def test_frames_that_are_not_allowed_end_the_stream(pair, lines):
    """The other streams of the pair stay, and packets arrive."""
    lines.wait("chose bergen")
    own, chunk = admitted(pair.token, "oslo", pair.folder), frames.packed_passed(0, 0, memoryview(b"a"))
    greetings = [(2, 1), (1, 0)]  # another group, another member's rank
    then = [
        (frames.DATA, 1, chunk, 7),
        (frames.ACK, 1, chunk, None),
        (frames.DATA, 1, b"", None),
        (frames.DATA, 0, chunk, None),
    ]
    for count, (greeting, frame) in enumerate(
        [*((one, None) for one in greetings), *(((1, 1), one) for one in then)], 1
    ):
        code, why = None, "oslo is not connected to the hub"
        while "is not connected to the hub" in why:  # on a busy machine its connection may be lost for a moment
            with pair.knock(own) as member:
                stream = member.straight(*greeting)
                with suppress(grpc.RpcError):
                    if frame and next(stream.call):
                        stream.put(*frame)
                code, why = stream.refusal()
        assert code is grpc.StatusCode.INVALID_ARGUMENT, why
        lines.wait("refused frames of 127.0.0.1:", "oslo.member.thinwire", nth=count)
    pair.exchange()


def test_a_revoked_member_loses_its_straight_streams(pair, lines, tmp_path):
    """The hub tells the member that listens. The certificate, which is still valid, opens no stream any more."""
    lines.wait("chose bergen")
    own = admitted(pair.token, "oslo", pair.folder)
    state = HubState(tmp_path / "hub")
    state.revoke("oslo")
    state.close()
    lines.wait("ended the straight streams of oslo: was revoked at the hub")
    with pair.knock(own) as member:
        code, why = member.straight(1, 1).refusal()
    assert code is grpc.StatusCode.PERMISSION_DENIED and "oslo is not connected to the hub" in why
    lines.wait("refused 127.0.0.1:", "oslo is not connected to the hub")
    with pytest.raises(LinkError, match="was revoked at the hub"):
        Exchange(pair.groups["bergen"], 1, 0, 300_000).check()


def test_a_member_cannot_be_the_hub_or_another_member(hub, tmp_path):
    """Its certificate is one for servers, too, but its name in it is not the one that is dialled: the handshake ends before any call."""
    token, folder = hub.invite(9), tmp_path / "keys"
    mallory, oslo = admitted(token, "mallory", folder), admitted(token, "oslo", folder)
    with Impostor(mallory) as impostor:

        async def answer(dns: str, method: str) -> grpc.StatusCode:
            async with dial("127.0.0.1", impostor.port, oslo.authorities, oslo, dns=dns) as channel:
                return await channel.stream_stream(method)(metadata=stated()).code()

        for dns, method in ((HUB, CONTROL), (HUB, MEET), (member_dns("bergen"), STRAIGHT)):
            assert asyncio.run(answer(dns, method)) is grpc.StatusCode.UNAVAILABLE
        assert not impostor.heard
        assert asyncio.run(answer(member_dns("mallory"), STRAIGHT)) is grpc.StatusCode.UNIMPLEMENTED  # its own name

        def replica(group) -> None:
            told = False
            while not told:  # by the hub
                Exchange(group, 1, 0, 300_000).check()
                told = b"\1" in gather(group, bytes([" cannot be used " in group.describe()]), 64, "packet")
            assert not group.sent_straight

        listens = {0: ("127.0.0.1:0", f"127.0.0.1:{impostor.port}")}  # who is at this address claims to be the first
        run_secure(token, 2, replica, folder, listens=listens)
        assert impostor.heard == [STRAIGHT]


def test_a_member_that_floods_another_gets_one_answer_and_is_dialled_at_one_address(hub, tmp_path):
    """Rank 0 announces each pair's first report to all; it announced all reports. Each address was dialled anew."""
    token, first, second = (
        str(hub.invite()),
        socket.create_server(("127.0.0.1", 0)),
        socket.create_server(("127.0.0.1", 0)),
    )
    oslo = RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path), frames.group_label(2, ""))
    with first, second, oslo, ThreadPoolExecutor() as pool:
        bergen = pool.submit(join, token, "bergen", 2, tmp_path / "keys", "", TIMEOUT)
        stream = oslo.hello(2)
        ((rank, connection),) = welcomed(stream).present
        stream.put(frames.SYNC, rank, frames.packed(frames.SYNC, connection, 0))
        for number in range(1, 1000):
            stream.put(frames.MEASURED, rank, frames.packed(frames.MEASURED, 0, *4 * (number,)))
        for server in (first, second):
            port = server.getsockname()[1]
            stream.put(frames.LISTENS, rank, frames.packed(frames.LISTENS, port, b"127.0.0.1"))
        stream.put(frames.PING, rank, frames.packed(frames.PING, 7))
        heard = list[int]()
        while (frame := stream.frame()).kind != frames.PONG:
            heard.append(frame.kind)
        dialled, _, _ = select.select([first, second], [], [], TIMEOUT)
        bergen.result().close()
    assert heard.count(frames.CHOSEN) == 1 and dialled == [first]


def test_a_member_that_names_another_address_each_time_it_comes_back_is_dialled_at_few(
    hub, audit, tmp_path, monkeypatch
):
    """Otherwise one name would let all others knock wherever it likes."""
    monkeypatch.setattr(straight, "DIALS_AT_ONCE", 2)
    monkeypatch.setattr(straight, "DIALS_PER_SECOND", 1e-9)
    token, label, process = str(hub.invite()), frames.group_label(2, ""), bytes(16)
    own = admitted(hub.invite(), "oslo", tmp_path)
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        bergen = pool.submit(join, token, "bergen", 2, tmp_path / "keys", "", TIMEOUT)
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        for count, server in enumerate(servers):
            with RawMember(hub.invite(), own, label) as oslo:
                oslo.process = process
                stream = oslo.hello(2)
                ((rank, connection),) = welcomed(stream).present
                stream.put(frames.SYNC, rank, frames.packed(frames.SYNC, connection, 0))
                port = server.getsockname()[1]
                stream.put(frames.LISTENS, rank, frames.packed(frames.LISTENS, port, b"127.0.0.1"))
                stream.put(frames.PING, rank, frames.packed(frames.PING, 7))
                while stream.frame().kind != frames.PONG:
                    pass
                if count < 2:
                    assert select.select([server], [], [], TIMEOUT)[0]
            audit.wait("disconnected oslo", nth=count + 1)
        assert select.select(servers, [], [], 0)[0] == servers[:2]
        group = bergen.result()
        group._farewell = 0.0
        group.close()
