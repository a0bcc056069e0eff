"""The hub's port for joining. It issues a certificate for the secret of an invitation, or for the key that belongs to a name."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.net.audit import AuditLog
from thinwire.net.frames import SAME_RELEASE
from thinwire.net.joining import ADMITTED, NOT_NOW, REFUSED, REQUEST_NBYTES
from thinwire.net.keys import Authorities, check_name, key_digest, member_dns, opened_request
from thinwire.net.proxy import Arrived
from thinwire.net.state import HubState

JOIN_HEAD = struct.Struct("<8s16sBH")  # invitation, secret, bytes of the name and of the request
# bytes of the certificate, of the authorities and of the run file; whether runs are elastic
ADMISSION = struct.Struct("<HHI?")


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
        self.lifetime, self._elastic = lifetime, elastic
        self.granted: Callable[[str], object] = lambda name: (
            None
        )  # called with each member that gets a certificate; set by the hub

    async def join(self, raw: bytes, connection: Arrived) -> tuple[int, bytes]:
        """Admit a member, or renew its certificate; see `JoinPort`."""
        try:
            invitation, secret, name, request = opened_join(raw)
            found = opened_request(request)
            if self._state.admit(name, key_digest(found), invitation, secret):
                self._audit("admitted", name, f"from {connection.address}")
            self.granted(name)
            return ADMITTED, self.issued(name, found)
        except sqlite3.Error as error:  # no refusal: it is admitted when there is room
            self._audit.stranger("cannot admit", connection.address, f"{error}; make room on its disk")
            return NOT_NOW, f"it cannot write its state ({error}); make room on its disk".encode()
        except (LinkError, PacketError, ConfigurationError) as error:
            self._audit.stranger("refused to admit", connection.address, error)
            connection.logged = True
            return REFUSED, f"the hub does not admit this machine: {error}".encode()

    def issued(self, name: str, request: x509.CertificateSigningRequest) -> bytes:
        """A fresh certificate for the key of `request` under a name that has this key, with what else a member is told. Raises `sqlite3.Error`."""
        issuer, trusted = self.authorities.issuer, self.authorities.trusted
        certificate = issuer.issue(request, member_dns(name), self.lifetime)
        self._state.issued(name, issuer.fingerprint)
        run = self._run.read_bytes() if self._run.exists() else b""
        return ADMISSION.pack(len(certificate), len(trusted), len(run), self._elastic) + certificate + trusted + run


def opened_join(raw: bytes) -> tuple[bytes, bytes, str, bytes]:
    """Invitation, secret, name and request. Raises `PacketError`, `ConfigurationError`."""
    if not JOIN_HEAD.size < len(raw) <= REQUEST_NBYTES:
        raise PacketError(
            f"the request to join has {len(raw)} bytes; {JOIN_HEAD.size + 1} to {REQUEST_NBYTES} are needed; {SAME_RELEASE}"
        )
    invitation, secret, name, request = JOIN_HEAD.unpack_from(raw)
    if len(raw) != JOIN_HEAD.size + name + request:
        raise PacketError(
            f"the request to join has {len(raw)} bytes, and its header declares {JOIN_HEAD.size + name + request}; {SAME_RELEASE}"
        )
    begin = JOIN_HEAD.size + name
    return invitation, secret, check_name(raw[JOIN_HEAD.size : begin].decode("ascii", "replace")), raw[begin:]
