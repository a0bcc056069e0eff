"""Machines without a valid key: none gets in, each leaves one line in the audit log, and rounds of the others continue."""

from __future__ import annotations

import runpy
import socket
import ssl
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random

import grpc
import pytest
from group_laws import Exchange
from hub_process import HubProcess
from raw_member import RawMember, admitted, signed
from secure_groups import run_secure

from thinwire.errors import ConfigurationError, LinkError
from thinwire.net import Hub, Token, admit, channels, join, proxy
from thinwire.net import hub as hub_module
from thinwire.net.keys import Authority, Credentials, private_folder


def rounds(group):
    for what in range(3):
        Exchange(group, 1, what, 300_000).check()


def refused(token: Token, own: Credentials) -> None:
    with RawMember(token, own) as member:
        assert member.hello(1).refusal()[0] is grpc.StatusCode.UNAVAILABLE


def speaking(own: Credentials, folder: Path | None) -> ssl.SSLContext:
    """Returns a context that trusts the hub of `own`. It shows the certificate, by a file in `folder`, unless that is None."""
    context = ssl.create_default_context(cadata=own.authorities.decode())
    context.set_alpn_protocols(["h2"])
    context.check_hostname = False  # at the port where machines join, the authority shows its own certificate
    if folder:
        (folder / "own.pem").write_bytes(own.key + own.certificate)
        context.load_cert_chain(folder / "own.pem")
    return context


@pytest.mark.parametrize("kind", ["no certificate", "a foreign authority", "expired", "no TLS"])
def test_a_machine_without_a_valid_certificate_is_refused(kind, hub, audit, tmp_path):
    """The handshake refuses it, while rounds of a group continue."""
    token, own = hub.invite(), Authority(tmp_path / "hub")
    foreign = Authority(private_folder(tmp_path / "foreign"))
    hour = timedelta(hours=1)

    def knock() -> None:
        if kind == "no TLS":
            with socket.create_connection((token.host, token.port)) as one:
                one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)) * 64)
                while one.recv(4096):
                    pass
        elif kind == "no certificate":
            refused(token, Credentials(b"", b"", own.pem))
        elif kind == "expired":
            refused(token, signed(own, "oslo", -timedelta(minutes=1), own.pem))
        else:
            refused(token, signed(foreign, "oslo", hour, own.pem))

    thread = threading.Thread(target=knock)
    thread.start()
    run_secure(hub, 2, rounds, tmp_path / "keys")
    thread.join()
    assert "bytes" in audit.wait("refused a connection from 127.0.0.1:")
    assert sum("refused" in line for line in audit.said) == 1


def test_another_key_for_a_members_name_is_refused(hub, audit, tmp_path):
    """Neither a token, which remains unused, nor a certificate of another name helps."""
    admit(str(hub.invite()), "oslo", tmp_path / "a")
    token = str(hub.invite())
    with pytest.raises(LinkError, match="the name oslo belongs to another key"):
        join(token, "oslo", 1, tmp_path / "b")
    audit.wait("refused to admit 127.0.0.1:", "the name oslo belongs to another key")
    with join(token, "lima", 1, tmp_path / "b"):
        pass
    own = Authority(tmp_path / "hub")
    thief = signed(own, "oslo", timedelta(hours=1), own.pem)  # as if the authority had made a mistake
    with RawMember(hub.invite(), thief) as member:
        code, why = member.hello(1).refusal()
        assert code is grpc.StatusCode.PERMISSION_DENIED and "belongs to another key" in why
    audit.wait("refused 127.0.0.1:", "oslo.member.thinwire", "belongs to another key")


def test_hub_and_member_certificates_are_not_interchangeable(hub, tmp_path):
    """A member's key cannot be the hub's, because names and purposes differ."""
    own = Authority(tmp_path / "hub")
    refused(hub.invite(), own.hub_credentials(timedelta(hours=1), own.pem))


@pytest.mark.parametrize("kind", ["used up", "expired", "another name", "wrong secret"])
def test_invalid_tokens_are_refused(kind, hub, audit, tmp_path):
    token = hub.invite(1, name="oslo" if kind == "another name" else None)
    if kind == "used up":
        admit(str(token), "lima", tmp_path / "a")
    if kind == "expired":
        token, _ = hub.invite(1, 1e-9), hub.invite()  # a later one is made, which does not make it unknown
    if kind == "wrong secret":
        token = Token(token.host, token.port, token.join_port, token.authority, token.invitation, bytes(16))
    why = {"used up": "is used up", "expired": "has expired", "another name": "for another name"}.get(kind, "no such")
    with pytest.raises(LinkError, match=f"does not admit this machine: .*{why}.*Ask the hub's owner"):
        join(str(token), "kyoto", 1, tmp_path / "b")
    audit.wait("refused to admit 127.0.0.1:", why)


def test_a_used_token_readmits_only_its_own_member(hub, tmp_path):
    """A member that joined but got no answer asks again with the same key; no other machine can."""
    token = str(hub.invite())
    for _ in range(2):
        admit(token, "oslo", tmp_path / "a")
    kept = tmp_path / "a" / "oslo"
    assert {path.name: path.stat().st_mode & 0o777 for path in kept.iterdir()} == dict.fromkeys(
        ("authority.pem", "authority.sha256", "key.pem"), 0o600
    )
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hub").iterdir()}
    assert set(files.values()) == {0o600} and "authority.key" in files


def test_an_impostor_hub_gets_no_token_secret(hub, audit, tmp_path):
    """A token names the hub's authority, so a member does not send the secret to another one."""
    heard: list[str] = []
    with Hub(tmp_path / "other", say=heard.append) as other:
        token = hub.invite()
        there = Token(other.host, other.port, other.join_port, token.authority, token.invitation, token.secret)
        with pytest.raises(LinkError, match="is not the hub of this token: its authority has another fingerprint"):
            admit(str(there), "oslo", tmp_path / "keys")
        assert not heard
        admit(str(token), "oslo", tmp_path / "keys")
        with pytest.raises(ConfigurationError, match="holds the key of oslo at another hub"):
            admit(str(other.invite()), "oslo", tmp_path / "keys")


def test_a_mistyped_token_does_not_bind_the_key(hub, tmp_path):
    token = hub.invite()
    mistyped = replace(token, authority=bytes(32))
    with pytest.raises(LinkError, match=r"another fingerprint\. Check that the whole token of this hub was given"):
        admit(str(mistyped), "oslo", tmp_path / "keys")
    admit(str(token), "oslo", tmp_path / "keys")


@pytest.mark.parametrize("place", [0, 1], ids=["members", "joining"])
def test_one_address_cannot_end_the_connections_of_others(place, tmp_path, audit, monkeypatch):
    """It opens more than the hub holds without authentication, and ends its own: a slow machine still gets its handshake."""
    monkeypatch.setattr(proxy, "STRANGERS", 8)
    monkeypatch.setattr("thinwire.net.audit.LINES", 100)
    monkeypatch.setattr(hub_module, "STRANGER_SECONDS", 600.0)
    with Hub(tmp_path / "hub", say=audit) as hub, ExitStack() as opened:
        ports = hub.port, hub.join_port
        slow = opened.enter_context(socket.create_connection((hub.host, ports[place])))
        own = admitted(hub.invite(), "oslo", tmp_path / "keys")
        for number in range(1, 25):
            opened.enter_context(socket.create_connection((hub.host, ports[place]), source_address=("127.0.0.2", 0)))
            if number > 7:  # one after the other, so that none is refused because many are being closed
                ended = audit.wait("8 others connected, and it did not authenticate", nth=number - 7)
                assert "from 127.0.0.2:" in ended
        with speaking(own, tmp_path).wrap_socket(slow) as served:
            assert served.version() == "TLSv1.3"
            assert not any("127.0.0.1" in line and "refused" in line for line in audit.said)


@pytest.mark.parametrize("place", [0, 1], ids=["members", "joining"])
def test_a_handshake_of_single_bytes_is_ended(place, tmp_path, audit, monkeypatch):
    """A machine sends a byte of its handshake now and then, and has no more time for that than any other."""
    monkeypatch.setattr(hub_module, "STRANGER_SECONDS", 0.3)
    with Hub(tmp_path / "hub", say=audit) as hub:
        with socket.create_connection((hub.host, (hub.port, hub.join_port)[place])) as slow:
            with suppress(OSError):
                for byte in b"\x16\x03\x01\x40\x00\x01" + bytes(5000):  # the record of 16,384 bytes never ends
                    slow.sendall(bytes([byte]))
            said = audit.wait("refused a connection from 127.0.0.1:", "it did not authenticate in 0.3 s")
            assert said.endswith("bytes)")


@pytest.mark.parametrize("place", [0, 1], ids=["members", "joining"])
def test_arbitrary_bytes_within_tls_end_their_connection_only(place, hub, audit, tmp_path):
    """HTTP/2 frames of random kinds, lengths and bytes, with a member's certificate at its port and without one at the other."""
    own, random = admitted(hub.invite(), "oslo", tmp_path / "keys"), Random(place)
    context = speaking(own, None if place else tmp_path)

    def knock(*frames: bytes) -> None:
        with socket.create_connection((hub.host, (hub.port, hub.join_port)[place])) as one, suppress(OSError):
            with context.wrap_socket(one) as secured:
                for frame in frames:
                    secured.sendall(frame)

    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    for _ in range(40):
        frames = [begin]
        for _ in range(random.randint(1, 30)):
            nbytes = random.choice([0, 1, 5, 300, 16_384])
            declared = random.choice([nbytes, nbytes, nbytes, (1 << 24) - 1])
            kind, flags, stream = random.randint(0, 12), random.randint(0, 255), random.choice([0, 1, 3, 1 << 30])
            head = declared.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
            frames.append(head + random.randbytes(nbytes))
        knock(*frames)
    knock(b"\xff" * 16_384)  # one TLS record, so the hub cannot end the connection before it has all of them
    assert int(audit.wait("refused a connection from 127.0.0.1:", "bytes)").rpartition("(")[2].split()[0]) > 0
    run_secure(hub, 2, rounds, tmp_path / "keys")


@pytest.mark.parametrize(
    "name", ["../oslo", "Oslo", "os lo", "oslo\x1b[31m", "", "a" * 64, "-oslo", "oslo/..", "оslo", "hub.thinwire"]
)
def test_invalid_member_names_are_refused(name, hub, audit, tmp_path):
    with pytest.raises(ConfigurationError, match="small letters, digits and hyphens"):
        join(str(hub.invite()), name, 1, tmp_path / "keys")
    assert not audit.said


def test_connections_older_than_tls_13_are_refused(tmp_path):
    """The command speaks no older version, even to a machine with a valid key."""
    hub = HubProcess(tmp_path / "hub")
    try:
        token = hub.invite(1)
        own = admitted(token, "oslo", tmp_path / "keys")
        for version, works in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            context = speaking(own, tmp_path)
            context.maximum_version = version
            with socket.create_connection((token.host, token.port)) as one:
                if works:
                    with context.wrap_socket(one) as secured:
                        assert secured.version() == "TLSv1.3" and secured.recv(9)
                else:
                    with pytest.raises(OSError):
                        context.wrap_socket(one)
    finally:
        hub.close()


def test_a_grpcio_that_does_not_say_which_tls_a_connection_has_is_refused(monkeypatch):
    monkeypatch.setattr(grpc, "__version__", "1.84.0")
    with pytest.raises(ConfigurationError, match=r"grpcio 1\.84\.0 .* pip install 'grpcio>=1\.85'"):
        runpy.run_path(channels.__file__)
