"""The hub's port for joining. It issues a certificate for the secret of an invitation, or for the key that belongs to a name."""

from __future__ import annotations

import sqlite3
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.channels import JOIN_NBYTES, check_tls
from thinwire.comm.secure.frames import SAME_RELEASE
from thinwire.comm.secure.keys import Authorities, check_name, key_digest, member_dns, opened_request
from thinwire.comm.secure.proxy import TcpProxy
from thinwire.comm.secure.state import HubState
from thinwire.comm.secure.versions import JOINING, agreed_with_member
from thinwire.errors import ConfigurationError, LinkError, PacketError

JOIN_HEAD = struct.Struct("<8s16sBH")  # invitation, secret, bytes of the name and of the request
# bytes of the certificate, of the authorities and of the run file; whether runs are elastic
ADMITTED = struct.Struct("<HHI?")


class Admission:
    """Admits members and renews their certificates.

    Args:
        folder: the hub's folder; its `run.toml`, if there is one, is sent to members that join.
        state, authorities, audit: those of the hub.
        lifetime: the lifetime of a certificate.
        elastic: whether runs are elastic, which is sent to members that join.
    """

    def __init__(
        self,
        folder: Path,
        state: HubState,
        authorities: Authorities,
        audit: AuditLog,
        lifetime: timedelta,
        elastic: bool,
    ) -> None:
        self._run, self._state, self.authorities, self._audit = folder / "run.toml", state, authorities, audit
        self._lifetime, self._elastic = lifetime, elastic
        self.proxy: TcpProxy | None = None  # the proxy for requests to join; set by the hub

    async def join(self, raw: bytes, context: Any) -> bytes:
        """Admit a member, or renew its certificate."""
        assert self.proxy
        who = self.proxy.remote_address(context.peer())
        try:
            check_tls(context)
            await agreed_with_member(context, JOINING)
            invitation, secret, name, request = opened_join(raw)
            found = opened_request(request)
            new = self._state.admit(name, key_digest(found), invitation, secret)
            self.proxy.authenticated(context.peer())
            if new:
                self._audit("admitted", name, f"from {who}")
            issuer, trusted = self.authorities.issuer, self.authorities.trusted
            certificate = issuer.issue(found, member_dns(name), self._lifetime)
            self._state.issued(name, issuer.fingerprint)
        except sqlite3.Error as error:  # no refusal: it is admitted when there is room
            self._audit.stranger("cannot admit", who, f"{error}; make room on its disk")
            await context.abort(grpc.StatusCode.ABORTED, f"it cannot write its state ({error}); make room on its disk")
        except (LinkError, PacketError, ConfigurationError) as error:
            self._audit.stranger("refused to admit", who, error)
            self.proxy.logged(context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the hub does not admit this machine: {error}")
        told = self._run.read_bytes() if self._run.exists() else b""
        return ADMITTED.pack(len(certificate), len(trusted), len(told), self._elastic) + certificate + trusted + told


def opened_join(raw: bytes) -> tuple[bytes, bytes, str, bytes]:
    """Invitation, secret, name and request. Raises `PacketError`, `ConfigurationError`."""
    if not JOIN_HEAD.size < len(raw) <= JOIN_NBYTES:
        raise PacketError(
            f"the request to join has {len(raw)} bytes; {JOIN_HEAD.size + 1} to {JOIN_NBYTES} are needed; {SAME_RELEASE}"
        )
    invitation, secret, name, request = JOIN_HEAD.unpack_from(raw)
    if len(raw) != JOIN_HEAD.size + name + request:
        raise PacketError(
            f"the request to join has {len(raw)} bytes, and its header declares {JOIN_HEAD.size + name + request}; {SAME_RELEASE}"
        )
    begin = JOIN_HEAD.size + name
    return invitation, secret, check_name(raw[JOIN_HEAD.size : begin].decode("ascii", "replace")), raw[begin:]
