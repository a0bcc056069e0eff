"""A stranger without the run's secret is ignored and ends no member: over real sockets, and in virtual time."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from thinwire.errors import ConfigurationError, DisagreementError, LinkError
from thinwire.membership import Lighthouse, LighthouseRendezvous, Membership, Timeouts
from thinwire.membership.channel import (
    FRAME,
    HELLO,
    INTRODUCTION,
    OTHER_SECRET,
    WELCOME,
    Channel,
    secret_in,
    spoken,
)
from thinwire.membership.testing import SimulatedCluster
from thinwire.membership.testing.cluster import ThreadRendezvous
from thinwire.membership.view import Presence
from thinwire.version import Protocols

SECRET = bytes(range(32))
QUICK = Timeouts(heartbeat_interval=0.05, heartbeat_timeout=5.0, view=600.0)
LIFE = "f" * 16
LIMIT = 600.0  # only ends a hang
ELDER = Presence("aa", LIFE, 1, views=10**9, facts={"protocols": "because I say so"})


@pytest.fixture(params=[SECRET, b""], ids=["secret", "open"])
def lit(request):
    """A lighthouse in this process, its secret, and its log."""
    told = []
    lighthouse = Lighthouse("127.0.0.1", 0, 5.0, request.param, told.append)
    yield lighthouse, request.param, told
    lighthouse.close()


closed = pytest.mark.parametrize("lit", [SECRET], ids=["secret"], indirect=True)


def channel(lighthouse, secret, name="aa", incarnation=LIFE):
    return Channel(lighthouse.host, lighthouse.port, name, incarnation, secret)


def raw(lighthouse):
    line = socket.create_connection((lighthouse.host, lighthouse.port), timeout=LIMIT)
    return line, line.recv(HELLO.size, socket.MSG_WAITALL)


def ended(line):
    """Waits until the other side closes the connection, and ignores its other messages."""
    with line, suppress(ConnectionError):
        while line.recv(1 << 16):
            pass


def rounds(lighthouse, secret, attack):
    """Lets two members hold rounds. `attack` runs once they have a group, and three more rounds follow. Returns their members or errors."""
    held, over, results = threading.Semaphore(0), threading.Event(), {}

    def run(name):
        try:
            membership = Membership(LighthouseRendezvous(lighthouse.address), name, secret=secret, timeouts=QUICK)
            try:
                more = 3
                while more:
                    view = membership.next_view({"over": over.is_set()})
                    more -= all(member.status["over"] for member in view.members)  # all end in the same round
                    yes = view.decide("land", True, 20.0)
                    results[name] = [m.name for m in view.members], yes
                    held.release()
            finally:
                membership.close()
        except Exception as error:
            results[name] = error
            held.release()

    threads = [threading.Thread(target=run, args=(name,)) for name in "bc"]
    for thread in threads:
        thread.start()
    assert held.acquire(timeout=LIMIT) and held.acquire(timeout=LIMIT)
    try:
        attack()
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT)
    return results


BOTH = {"b": (["b", "c"], True), "c": (["b", "c"], True)}


@closed
def test_a_stranger_without_the_secret_is_refused_and_logged_once(lit):
    """Its claimed seniority does not matter. The log names it once, with what it did."""
    lighthouse, secret, told = lit

    def attack():
        for _ in range(3):
            for wrong in (b"", bytes(32)):
                with pytest.raises(LinkError, match="another run secret, or none"):
                    channel(lighthouse, wrong).ask("call", 5.0, presence=ELDER.to_json())
            web = http.client.HTTPConnection(lighthouse.host, lighthouse.port, timeout=LIMIT)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                web.request("POST", "/replica/b/kill")
                web.getresponse()
            web.close()

    assert rounds(lighthouse, secret, attack) == BOTH
    refused = [line.split(" ", 2)[2] for line in told if "refused" in line]
    assert refused == [
        "refused: somebody at 127.0.0.1 (it does not hold this run's secret)",
        "refused: somebody at 127.0.0.1 (it speaks another protocol)",
    ]
    assert sorted(line.split(" ", 2)[2] for line in told if line not in refused and "refused" not in line) == sorted(
        f"{what}" for name in "bc" for what in (f"joined: {name} at 127.0.0.1", f"left: {name} (it closed)")
    )


@pytest.mark.leaves(files="socket:", why="torchft's runtime has a pair for signals, once in a process")
@closed
def test_a_strangers_grpc_call_is_refused(lit):
    coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed: thinwire[rivals]")
    lighthouse, secret, told = lit

    def attack():
        with pytest.raises((RuntimeError, TimeoutError)):
            stranger = coordination.LighthouseClient(f"http://{lighthouse.address}", timedelta(seconds=1))
            stranger.quorum("aa:1", timedelta(seconds=1), data=json.loads(ELDER.to_json()))

    assert rounds(lighthouse, secret, attack) == BOTH
    assert sum("another protocol" in line for line in told) == 1


def test_an_unlike_stranger_ends_no_member_without_a_secret(lit):
    """With a secret, a member whose facts differ does not end the others either."""
    lighthouse, secret, _ = lit
    done = threading.Event()

    def insist():
        calls = 0
        while not done.is_set():
            calls += 1
            with suppress(LinkError):
                line.ask("call", 0.2, presence=replace(ELDER, calls=calls).to_json())

    line = channel(lighthouse, secret)
    stranger = threading.Thread(target=insist)
    stranger.start()  # it arrives before the others
    try:
        assert rounds(lighthouse, secret, lambda: None) == BOTH
    finally:
        done.set()
        stranger.join(LIMIT)
        line.close()


@closed
def test_replayed_messages_are_refused(lit):
    """An introduction is valid for one connection, and a message for one position in it."""
    lighthouse, secret, told = lit
    with socket.create_server(("127.0.0.1", 0)) as between:
        line, hello = raw(lighthouse)
        victim = threading.Thread(target=introduce, args=(between.getsockname()[1], secret))
        victim.start()
        member, _ = between.accept()
        with member:
            member.sendall(hello)
            heard = member.recv(INTRODUCTION.size, socket.MSG_WAITALL)
        victim.join(LIMIT)
    line.sendall(heard)  # in the right order it is accepted
    assert WELCOME.unpack(line.recv(WELCOME.size, socket.MSG_WAITALL))[0] == 0
    again, _ = raw(lighthouse)
    again.sendall(heard)
    assert WELCOME.unpack(again.recv(WELCOME.size, socket.MSG_WAITALL))[0] == OTHER_SECRET
    ended(again)
    line.sendall(FRAME.pack(2, bytes(32)) + b"{}")  # an attacker who took over a connection has no key
    ended(line)
    assert sum("wrong MAC" in text for text in told) == 1


def introduce(port, secret):
    with suppress(LinkError):
        Channel("127.0.0.1", port, "b", LIFE, secret)


def test_message_sizes_are_bounded(lit):
    lighthouse, secret, _ = lit
    line, _ = raw(lighthouse)
    line.sendall(FRAME.pack(3 << 20, bytes(32)))
    ended(line)
    member = channel(lighthouse, secret)
    with pytest.raises(LinkError, match="at most 16384 are allowed, all ASCII"):
        member.ask("call", 5.0, presence="x" * 20_000)
    for wrong in (
        {"do": "call", "presence": 3}, {"do": "look", "keys": [1]}, {"do": "put", "key": "k" * 300, "value": ""}, {"do": "kill"},
        {"do": "put", "key": "k", "value": "v" * 70_000}, {"do": "settle", "key": [], "value": ""}, {"do": "forget", "keys": {}},
    ):  # fmt: skip
        with pytest.raises(LinkError, match=r"the lighthouse at .* says:"):
            member.ask(**wrong)
    with pytest.raises(LinkError):
        member.ask("call", 5.0, presence="x" * (3 << 20))  # this ends its connection
    member.close()
    assert rounds(lighthouse, secret, lambda: None) == BOTH


@closed
def test_a_fifth_connection_closes_the_oldest_of_its_replica(lit):
    lighthouse, secret, told = lit
    lines = [channel(lighthouse, secret) for _ in range(5)]
    lines[4].ask("beat")  # it is answered after it was admitted
    with pytest.raises(LinkError):
        lines[0].ask("beat")
    assert all(line.ask("beat") == {"heartbeat_timeout": 5.0} for line in lines[1:])
    for line in lines:
        line.close()
    assert [line.split(" ", 2)[2] for line in told] == ["joined: aa at 127.0.0.1"]


@closed
def test_silent_connections_keep_no_member_out(lit):
    lighthouse, secret, _ = lit
    with ExitStack() as lines:
        for _ in range(100):
            lines.enter_context(socket.create_connection((lighthouse.host, lighthouse.port), timeout=LIMIT))
        assert rounds(lighthouse, secret, lambda: None) == BOTH
    threads = {thread.name for thread in threading.enumerate()}
    lighthouse.close()
    assert "thinwire-lighthouse" in threads and "thinwire-lighthouse" not in {t.name for t in threading.enumerate()}


@closed
def test_a_lighthouse_without_the_secret_is_refused(lit):
    _, secret, _ = lit
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend():
            line, _ = false.accept()
            with line:
                line.sendall(spoken() + bytes(32))
                line.recv(INTRODUCTION.size, socket.MSG_WAITALL)
                line.sendall(WELCOME.pack(0, 5.0, bytes(32)))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(LinkError, match="does not hold this run's secret"):
            Channel("127.0.0.1", false.getsockname()[1], "b", LIFE, secret)
        thread.join(LIMIT)


@closed
def test_a_replica_with_another_secret_is_told_so_and_nothing_else(lit):
    lighthouse, _, _ = lit
    stranger = LighthouseRendezvous(lighthouse.address)
    stranger.arrive("b", LIFE, b"another", QUICK, lambda kind, fields: None)
    with pytest.raises(LinkError, match=r"has another run secret, or none.*--secret") as caught:
        stranger.call(Presence("b", LIFE, 1), 0.0)
    stranger.leave()
    assert str(caught.value).endswith("--secret. Waited 0 s.")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("change", [{"facts": {"run": "mine"}}, {"name": "b"}])
def test_a_newcomer_that_claims_seniority_ends_no_member(early, change):
    """In virtual time. It has other facts, or the name of another member, from the beginning or later."""
    cluster = SimulatedCluster()
    facts = {"protocols": str(Protocols(0, 10**9 - 1, "9.0"))}

    def run(name):
        membership = cluster.membership(name)
        members = []
        while cluster.time.now < 100.0:
            with suppress(LinkError):
                members = [m.name for m in membership.next_view({}, 50.0).members]
            ThreadRendezvous(cluster, name).sleep(1.0)
        return members

    def stranger(name):
        rendezvous = ThreadRendezvous(cluster, name)
        if not early or "name" in change:  # before there is a group, the first owns a name
            rendezvous.sleep(20.0)
        for calls in range(1, 20):
            with suppress(LinkError):
                said = Presence(
                    **{"name": "aa", "incarnation": LIFE, "calls": calls, "views": 10**9, "facts": facts} | change
                )
                rendezvous.call(said, 2.0)
        return "over"

    results = cluster.play({"a": run, "b": run, "c": run, "stranger": stranger})
    assert results == {"a": ["a", "b", "c"], "b": ["a", "b", "c"], "c": ["a", "b", "c"], "stranger": "over"}


def test_a_newcomer_with_other_facts_is_refused_by_the_group(lit):
    lighthouse, secret, _ = lit
    refused = []

    def attack():
        membership = Membership(
            LighthouseRendezvous(lighthouse.address), "a", facts={"seed": "7"}, secret=secret, timeouts=QUICK
        )
        with pytest.raises(DisagreementError, match="seed: 7 there, absent at 'b'") as error:
            membership.next_view({})
        refused.append(error)

    assert rounds(lighthouse, secret, attack) == BOTH and refused


def test_a_secret_is_made_once_and_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(ConfigurationError, match="thinwire lighthouse --secret FILE"):
        secret_in(path)
    secret = secret_in(path, make=True)
    assert len(secret) == 32 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_in(path) == secret_in(path, make=True) == secret
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        secret_in(path)
    for wrong in ("", "00", "g" * 64, "0" * 1000):
        path.unlink(missing_ok=True)
        path.write_text(wrong)
        path.chmod(0o600)
        with pytest.raises(ConfigurationError, match="64 hexadecimal digits"):
            secret_in(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigurationError, match="holds no run secret"):  # not: chmod 600, as for a secret
        secret_in(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"\(Is a directory\)"):
        secret_in(tmp_path)
