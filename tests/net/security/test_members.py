"""Members that lie, flood or are revoked, and a network that changes bytes: the others' rounds continue, and memory stays bounded."""

from __future__ import annotations

import asyncio
import hashlib
import queue
import random
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
import torch
from group_laws import TIMEOUT, Exchange
from hub_process import HubProcess
from raw_member import RawMember, admitted, welcomed
from secure_groups import run_secure
from tcp_proxy import Proxy

from thinwire.errors import LinkError
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, frames, join, streams
from thinwire.net.channels import CONTROL, MEET, dial
from thinwire.net.messages import BUDGET_NBYTES
from thinwire.net.proxy import STRANGERS
from thinwire.net.state import HubState
from thinwire.version import HUB_FRAMES, PROTOCOLS, Protocols

AFTER = Protocols(HUB_FRAMES.oldest, HUB_FRAMES.newest + 1, "0.2.0")
FAR = Protocols(HUB_FRAMES.newest + 2, HUB_FRAMES.newest + 3, "9.0")
NBYTES = 1_500_000


def rounds(group):
    for what in range(4):
        small = Exchange(group, 1, what, 100)
        Exchange(group, 2, what, NBYTES).check()
        small.check()


def flip(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


GARBLED = {
    "flips a bit": flip,
    "drops bytes": lambda data: data[: len(data) // 2],
    "repeats bytes": lambda data: data + data,
    "reorders bytes": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
}


@pytest.mark.parametrize("kind", GARBLED)
def test_bytes_changed_by_a_man_in_the_middle_end_the_connection_only(kind, hub, tmp_path):
    """Any change ends the connection. The next connection continues there, and what arrives is what was sent."""
    failures: list[BaseException] = []
    with Proxy(hub.invite()) as proxy:
        spoilt = [0, 0]

        def garble(way: int, data: bytes) -> bytes:
            if spoilt[way] < 2 and len(data) > 20_000 and proxy.forwarded > (1 + 2 * spoilt[way]) * 1_000_000:
                spoilt[way] += 1
                return GARBLED[kind](data)
            return data

        proxy.upwards, proxy.downwards = lambda data: garble(0, data), lambda data: garble(1, data)
        tokens = [str(hub.invite()), str(proxy.token)]

        def replica(index: int) -> None:
            try:
                with join(tokens[index], f"r-{index}", 2, tmp_path / "keys", "", TIMEOUT) as group:
                    rounds(group)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=replica, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert sum(spoilt) >= 2


SAID = {  # by a member with a valid key, as the first frame after its welcome
    "a frame again": (frames.LEAVE, 0, b"", 0, "frame 0 came where frame 1 was expected"),
    "a frame too early": (frames.LEAVE, 0, b"", 7, "frame 7 came where frame 1 was expected"),
    "an unknown kind": (200, 0, b"", 1, "of kind 200"),
    "a kind that is the hub's": (frames.GONE, 1, b"\0", 1, "not allowed here"),
    "another length": (frames.PULL, 1, b"\0" * 27, 1, "27 bytes"),
    "a frame for itself": (frames.ACK, 0, bytes(16), 1, "for member 0; another member from 0 to 1 is needed"),
    "a frame for nobody": (frames.ACK, 9, bytes(16), 1, "for member 9; another member from 0 to 1 is needed"),
    "more receivers than bytes": (frames.DATA, 0, bytes(8) + b"\xff\xff", 1, "and 65535 receivers"),
    "a long chunk with control": (frames.DATA, 0, frames.packed_data(0, [(1, 0)], bytes(9000)), 1, "on the control stream"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAID)
def test_forbidden_frames_end_a_members_stream_with_a_reason(kind, hub, audit, tmp_path):
    """The reason also stands in the audit log."""
    what, rank, body, sequence, why = SAID[kind]
    liar = admitted(hub.invite(), "a-liar", tmp_path)
    other = admitted(hub.invite(), "other", tmp_path)
    with RawMember(hub.invite(), liar) as first, RawMember(hub.invite(), other) as second:
        stream, there = first.hello(2), second.hello(2)
        assert welcomed(stream).rank == 0 and welcomed(there).rank == 1
        stream.put(what, rank, body, sequence)
        code, told = stream.refusal()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and why in told
    assert "a-liar.member.thinwire" in audit.wait("refused frames of 127.0.0.1:", why)


def test_a_member_of_another_version_is_refused_by_name(hub, audit, tmp_path):
    """Both ranges and what to do are named, beside members whose rounds continue. If the ranges meet, it is served."""
    run_secure(hub, 2, rounds, tmp_path / "keys")
    (one, other) = (admitted(hub.invite(), name, tmp_path) for name in ("bergen", "oslo"))
    with RawMember(hub.invite(), one) as first, RawMember(hub.invite(), other) as second:
        for said in (str(FAR), None, "all of them"):
            first.stated = said
            code, told = first.hello(2).refusal()
            there = FAR if said == str(FAR) else "states none"
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert (
                f"bergen.member.thinwire: the hub speaks frames {HUB_FRAMES}, the replica {there}. Install one release on both"
                in told
            )
        audit.wait("refused frames of", "bergen.member.thinwire", f"the replica {FAR}")
        first.stated = str(AFTER)  # of the next release, which speaks the older frames, too
        first.hello(2)
        audit.wait("waits bergen")
        oldest, newest = PROTOCOLS.oldest, PROTOCOLS.newest
        second.protocols = Protocols(newest + 1, newest + 3, "9.0")
        code, told = second.hello(2).refusal()
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert f"oslo speaks protocols {second.protocols}, bergen speaks {PROTOCOLS}" in told
        assert "Install one release on both" in told
        second.protocols = Protocols(oldest, newest + 3, "9.0")  # it reads what earlier releases send
        assert welcomed(second.hello(2)).rank == 1
    run_secure(hub, 2, rounds, tmp_path / "keys", run="after")


def test_an_invitation_to_a_run_is_refused_by_other_runs(tmp_path, audit):
    """It is refused for a fixed group and for an elastic run, also after a restart of the hub. Other invitations join any run."""
    with Hub(tmp_path / "hub", say=audit) as hub:
        oslo = admitted(hub.invite(runs=["red", "pink"]), "oslo", tmp_path)
        lima, token = admitted(hub.invite(), "lima", tmp_path), hub.invite()
        for own, run, refused in ((oslo, "blue", True), (oslo, "", True), (oslo, "pink", False), (lima, "blue", False)):
            with RawMember(token, own, frames.group_label(1, run)) as member:
                stream = member.hello(1)
                if refused:
                    code, told = stream.refusal()
                    assert code is grpc.StatusCode.PERMISSION_DENIED and "oslo was invited to pink, red and may" in told
                else:
                    assert len(welcomed(stream).names) == 1
    audit.wait("refused 127.0.0.1:", "oslo.member.thinwire: oslo was invited to pink, red and may join no other", nth=2)
    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0), say=audit) as hub:
        for own, run, refused in ((oslo, "blue", True), (oslo, "", True), (oslo, "red", False), (lima, "blue", False)):
            with RawMember(hub.invite(), own) as member:
                stream = member.meet(run)
                stream.put(frames.ASK, 0, b'{"do": "beat"}')
                if refused:
                    code, told = stream.refusal()
                    assert code is grpc.StatusCode.PERMISSION_DENIED and "thinwire join --group pink" in told
                else:
                    assert frames.opened(next(stream.call), 0, [frames.ANSWER], stream.version).body
        state = HubState(tmp_path / "hub")
        assert [run.name for run in state.runs()] == ["red", "blue"] and state.bound("lima") == []
        state.close()
    audit.wait("oslo was invited to pink, red", nth=4)


def test_a_dead_member_is_reported_after_patience(tmp_path, audit):
    """It is killed during an exchange. The other is told its name when the hub's patience ends, long before a timeout."""
    with Hub(tmp_path / "hub", patience=0.2, say=audit) as hub:
        oslo = admitted(hub.invite(), "oslo", tmp_path)
        token, told = hub.invite(), []

        def bergen() -> None:
            with join(str(token), "bergen", 2, tmp_path, "", 600.0) as group:
                with pytest.raises(LinkError, match=r"is cut\. See there why, then start all") as raised:
                    group.post(0, {}, {1: torch.zeros(9, dtype=torch.uint8)}).wait()
                assert raised.value.cause == "replica 1 (oslo) has died, or its link is cut."
                told.append(group.rank)

        thread = threading.Thread(target=bergen)
        thread.start()
        audit.wait("waits bergen")
        label = hashlib.sha256(b"thinwire 2 ").digest()
        with RawMember(hub.invite(), oslo, label) as second:
            welcomed(second.hello(2))
        thread.join()
        assert told == [0]
        audit.wait("gone oslo: has died")
        with RawMember(hub.invite(), oslo, label) as again:
            again.process = second.process
            code, why = again.hello(2).refusal()
            assert (
                code is grpc.StatusCode.PERMISSION_DENIED
                and "told that oslo has died, or its link is cut; they have stopped" in why
            )


def test_oversized_frames_are_refused(hub, audit, tmp_path):
    """gRPC refuses a declared length before it allocates. The audit log has the end of the stream."""
    with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as member:
        stream = member.hello(1)
        welcomed(stream)
        stream.raw(bytes(1 << 20))
        assert stream.refusal()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    audit.wait("disconnected oslo")
    run_secure(hub, 2, rounds, tmp_path / "keys")


def test_compressed_messages_are_refused_before_they_are_expanded(hub, audit, tmp_path):
    """A kilobyte that claims to be gzip and would become a megabyte: gRPC names the algorithm, and nothing is expanded."""
    with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as member:
        bomb = member.channel.stream_stream(CONTROL)(
            iter([bytes(1 << 20)]), metadata=[("thinwire-frames", member.stated)], compression=grpc.Compression.Gzip
        )
        with pytest.raises(grpc.RpcError) as refusal:
            next(bomb)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED and "gzip" in refusal.value.details()
    audit.wait("refused", "127.0.0.1:")
    run_secure(hub, 2, rounds, tmp_path / "keys")


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_flooding_member_is_ended_with_bounded_memory(tmp_path):
    """It sends frames that no member reads, until the hub ends it. The hub's memory is bounded, and another group trains on."""
    hub = HubProcess(tmp_path / "hub")
    try:
        flooder, sink = (admitted(hub.invite(1), name, tmp_path) for name in ("a-flooder", "sink"))
        before = resident(hub.process.pid)
        with RawMember(hub.invite(1), flooder) as first, RawMember(hub.invite(1), sink) as second:
            control, there = first.hello(2), second.hello(2)
            connection = welcomed(control).connection
            welcomed(there)  # it never reads again
            ended = threading.Event()

            def flood() -> None:
                bulk = first.bulk()
                bulk.put(frames.ATTACH, 0, frames.packed(frames.ATTACH, connection))
                body = frames.packed_data(0, [(1, 0)], bytes(frames.CHUNK_NBYTES))
                for _ in range(4 * 3 * BUDGET_NBYTES // frames.CHUNK_NBYTES):
                    bulk.put(frames.DATA, 0, body)
                code, why = bulk.refusal()
                assert code is grpc.StatusCode.INVALID_ARGUMENT and "the sender floods" in why
                ended.set()

            thread = threading.Thread(target=flood)
            thread.start()
            run_secure(hub.invite(2), 2, rounds, tmp_path / "keys", run="others")
            thread.join()
            assert ended.is_set()
            grown = resident(hub.process.pid) - before
        # of 12 that were sent; gRPC and the allocator need some memory, too
        assert grown < 8 * BUDGET_NBYTES, f"{grown:,} bytes"
        print(f"the hub grew by {grown:,} bytes while {12 * BUDGET_NBYTES:,} were sent (measured)")
        assert "the sender floods" in (tmp_path / "hub" / "audit.txt").read_text()
    finally:
        hub.close()


def test_a_member_cannot_take_the_streams_of_the_others(hub, audit, tmp_path, monkeypatch):
    """It opens one stream more than it may, and says nothing. One is refused, and a group of others exchanges its messages."""
    monkeypatch.setattr(streams, "STREAMS_OF_MEMBER", 4)
    ended: queue.Queue[grpc.RpcError] = queue.Queue()
    with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as member:
        for _ in range(5):
            member.control().call.add_done_callback(ended.put)
        first = ended.get(timeout=600.0)
        assert (
            first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            and "oslo.member.thinwire has 4 open streams" in first.details()
        )
        run_secure(hub.invite(2), 2, rounds, tmp_path / "keys")
    audit.wait("refused oslo.member", "a member may have no more")


def test_a_revoked_member_is_disconnected_at_once(hub, audit, tmp_path):
    """It is disconnected while it waits. The other is told, and neither certificate nor key of the revoked member works again."""
    joined = {"bergen": threading.Event(), "oslo": threading.Event()}
    told: dict[str, str] = {}

    def replica(name: str, other: int) -> None:
        with join(str(hub.invite()), name, 2, tmp_path, "", TIMEOUT) as group:
            joined[name].set()
            try:
                group.post(0, {}, {other: torch.zeros(9, dtype=torch.uint8)}).wait()
            except LinkError as error:
                told[name] = str(error)

    threads = [threading.Thread(target=replica, args=args) for args in (("bergen", 1), ("oslo", 0))]
    for thread in threads:
        thread.start()
    assert all(event.wait(600.0) for event in joined.values())  # the hub logs a join before the member's call returns
    state = HubState(tmp_path / "hub")  # as `thinwire hub` does, from another process
    state.revoke("oslo")
    state.close()
    for thread in threads:
        thread.join()
    assert "replica 1 (oslo) was revoked at the hub" in told["bergen"] and "oslo is revoked" in told["oslo"]
    audit.wait("gone oslo: was revoked")
    with pytest.raises(LinkError, match="oslo is revoked"):
        join(str(hub.invite(5)), "oslo", 1, tmp_path)
    audit.wait("refused to admit", "oslo is revoked")


def test_a_revoked_member_that_does_not_leave_is_disconnected(hub, audit, tmp_path):
    """It ignores what it is told, in a group or while it waits for one."""
    oslo, lima, kyoto = (admitted(hub.invite(), name, tmp_path) for name in ("oslo", "lima", "kyoto"))
    with RawMember(hub.invite(), oslo) as first, RawMember(hub.invite(), lima) as second:
        there, other = first.hello(2), second.hello(2)
        welcomed(there), welcomed(other)
        with RawMember(hub.invite(), kyoto, bytes(31) + b"1") as third:
            waiting = third.hello(2)
            audit.wait("waits kyoto")
            state = HubState(tmp_path / "hub")
            state.revoke("oslo"), state.revoke("kyoto")
            state.close()
            for stream, name in ((there, "oslo"), (waiting, "kyoto")):
                code, told = stream.refusal()
                assert code is grpc.StatusCode.PERMISSION_DENIED and f"{name} is revoked" in told
                audit.wait("refused 127.0.0.1:", f"{name} is revoked")


def test_certificates_are_renewed_during_training(tmp_path, audit):
    """Certificates are valid for a few seconds, and the rounds take longer; no message is lost."""
    with Hub(tmp_path / "hub", lifetime=timedelta(seconds=4), say=audit) as hub:

        def renewed(group) -> None:
            """Holds rounds until the certificate of replica 0 was renewed twice."""
            more, seen = torch.ones(1, dtype=torch.uint8), set()
            while int(more):
                rounds(group)
                if group.rank == 0:
                    seen.add(group._link.enrolment._admitted.credentials.certificate)
                    more[0] = len(seen) < 3
                    group.post(9, {1: more}, {}).wait()
                else:
                    group.post(9, {}, {0: more}).wait()

        run_secure(hub, 2, renewed, tmp_path / "keys")


def test_a_restarted_process_ends_its_former_group(hub, audit, tmp_path):
    """The others are told as soon as its former process has ended, and form a new group with it."""
    with RawMember(hub.invite(), admitted(hub.invite(), "lima", tmp_path)) as second:
        there = second.hello(2)
        with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as first:
            welcomed(first.hello(2)), welcomed(there)
        with RawMember(hub.invite(), admitted(hub.invite(), "oslo", tmp_path)) as again:
            stream = again.hello(2)
            while there.frame().kind != frames.GONE:
                pass
            audit.wait("gone oslo: has restarted")
            there.end()
            second.process = bytes(16)
            assert {name for name in welcomed(second.hello(2)).names} == {name for name in welcomed(stream).names}


def test_a_copy_of_a_members_folder_does_not_end_its_group(hub, audit, tmp_path):
    """Two processes with one key: the second hears from where the first came, and the group of the first goes on."""
    oslo, lima = (admitted(hub.invite(), name, tmp_path) for name in ("oslo", "lima"))
    with RawMember(hub.invite(), oslo) as first, RawMember(hub.invite(), lima) as other:
        stream, there = first.hello(2), other.hello(2)
        welcomed(stream), welcomed(there)
        with RawMember(hub.invite(), oslo) as copy:
            code, why = copy.hello(2).refusal()
        assert code is grpc.StatusCode.PERMISSION_DENIED and why.count("127.0.0.1:") == 2
        assert why.startswith("oslo trains already: a process with the same key is connected from 127.0.0.1:")
        audit.wait("refused 127.0.0.1:", "oslo.member.thinwire", "trains already")
        stream.put(frames.LEAVE, 0, b"")
        while (frame := there.frame()).kind != frames.GONE:
            pass
        assert frame.number(0) == frames.LEFT and not any("restarted" in line for line in audit.said)


@pytest.mark.parametrize("connections", [900, pytest.param(5000, marks=pytest.mark.slow)])
def test_half_open_connections_hold_bounded_files(connections, tmp_path):
    """They send nothing, or little. Rounds continue. Files and memory of the hub are bounded."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    hub = HubProcess(tmp_path / "hub")
    opened: list[socket.socket] = []
    try:
        token = hub.invite(2)
        files = Path(f"/proc/{hub.process.pid}/fd")
        before, most, held = len(list(files.iterdir())), 0, resident(hub.process.pid)
        drip = random.Random(0)
        for number in range(connections):
            one = socket.create_connection((token.host, (token.port, token.join_port)[number % 2]))
            if number % 3:
                one.sendall(b"\x16\x03\x01\x02\x00\x01"[: drip.randint(1, 6)])
            opened.append(one)
            if number % 20 == 0:
                most = max(most, len(list(files.iterdir())) - before)
        run_secure(token, 2, rounds, tmp_path / "keys")
        most = max(most, len(list(files.iterdir())) - before)
        # three files for each at the members' port, and one at the other
        assert most <= 4 * STRANGERS + 256, most
        grown = resident(hub.process.pid) - held
        assert grown < 128 << 20, f"{grown:,} bytes"
        print(f"{connections} connections: at most {most} more files, {grown:,} more bytes (measured)")
        assert "others connected" in (tmp_path / "hub" / "audit.txt").read_text()
    finally:
        for one in opened:
            one.close()
        hub.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_member_cannot_be_the_hub(hub, tmp_path):
    """Its certificate is that of a client and has its own name: the handshake ends before any call."""
    token, heard = hub.invite(9), list[str]()
    mallory, oslo = admitted(token, "mallory", tmp_path), admitted(token, "oslo", tmp_path)

    class Impostor(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> None:
            heard.append(details.method)

    server = grpc.server(ThreadPoolExecutor(1), handlers=(Impostor(),))
    own = grpc.ssl_server_credentials([(mallory.key, mallory.certificate)], mallory.authorities, True)
    port = server.add_secure_port("127.0.0.1:0", own)
    server.start()

    async def answer(method: str) -> grpc.StatusCode:
        async with dial("127.0.0.1", port, oslo.authorities, oslo) as channel:
            return await channel.stream_stream(method)().code()

    assert [asyncio.run(answer(method)) for method in (CONTROL, MEET)] == 2 * [grpc.StatusCode.UNAVAILABLE]
    assert not heard
    server.stop(0).wait()
