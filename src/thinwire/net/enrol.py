"""Enrolment of a machine: it makes a key, checks the hub's authority by its fingerprint, and gets a certificate for its name.

The token pins the authority before anything is trusted: the machine compares the certificate that the hub presents at its join port
with the fingerprint, over a connection on which nothing else is sent. Then it makes a second connection, on which TLS itself checks
the authority, and sends the secret over it. From then on the authority is known, and the key renews its
certificate without a secret until the hub revokes the name.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import grpc
import grpc.aio
from cryptography import x509

from thinwire.comm.private_files import read_private
from thinwire.errors import ConfigurationError, LinkError
from thinwire.net.admission import ADMISSION, JOIN_HEAD
from thinwire.net.calls import Outdated, Refused, Unanswered, cause, explain
from thinwire.net.channels import RENEW
from thinwire.net.frames import SAME_RELEASE
from thinwire.net.joining import SPOKEN, Unlike, ask_to_join
from thinwire.net.keys import (
    SKEW,
    Credentials,
    check_name,
    fingerprint,
    new_key,
    private,
    private_folder,
    request,
    write_private,
)
from thinwire.net.token import Token

ANSWER_SECONDS = 30.0  # most seconds of a hub's response
RETRY_SECONDS = 60.0  # most seconds until the next attempt to renew a certificate
_LONGEST = 1 << 14  # most bytes of a certificate, or of the authorities
_ADVICE = (
    "Ask the hub's owner for a new token; a name that is revoked, or that another key has, also needs another --name."
)


@dataclass(frozen=True)
class Admitted:
    """The result of an enrolment: the member's key with certificates, the hub's run file for its members ("" if it has none), and
    whether its runs are elastic.
    """

    credentials: Credentials
    run: str
    elastic: bool
    end: float  # of the certificate, in seconds since the epoch by this machine's clock
    due: float  # the time of renewal, first half-way to the end
    made: float  # by the monotonic clock


class Enrolment:
    """A member's name and key at one hub, in `folder`/NAME, made when they are missing.

    Args:
        token: the invitation; its secret is used only if the hub does not know the key yet.
        name: the name of this member.
        folder: keeps the key.

    Raises:
        ConfigurationError: `name` is no valid name, or the folder holds the key for another hub, or a damaged one.
    """

    def __init__(self, token: Token, name: str, folder: Path) -> None:
        self.token, self.name = token, check_name(name)
        self.folder = own = private_folder(folder / self.name)
        pinned, key = own / "authority.sha256", own / "key.pem"
        if not key.exists():
            write_private(key, new_key())
        if pinned.exists() and token.authority.hex().encode() not in pinned.read_bytes().split():
            raise ConfigurationError(
                f"{own} holds the key of {self.name} at another hub; choose another folder, or remove it if that hub is gone. "
                f"If the hub's authority was replaced while this machine was away, remove {own}/authority.* alone."
            )
        self._key, self._kept, self._pins = read_private(key, "this member's key"), own / "authority.pem", pinned
        private(self._key, key)
        self._admitted: Admitted | None = None

    async def admitted(self) -> Admitted:
        """Get a certificate that is not due for renewal, or if there is none now, the former one until it ends. Raises `Refused`, and
        `LinkError` while the hub cannot be reached.
        """
        former = self._admitted
        if former and time.time() <= former.due:
            return former
        try:
            found = await self._renewed()
        except LinkError as error:
            now, there = time.time(), self._admitted
            if there is None or isinstance(error, Refused) or now > there.end:
                raise
            if now > there.due:
                there = self._admitted = replace(there, due=min(now + RETRY_SECONDS, (now + there.end) / 2))
            return there
        there = self._admitted
        if there is None or (former and there.credentials is former.credentials):  # otherwise another task was faster
            there = self._admitted = found
        return there

    async def renewed(self, channel: grpc.aio.Channel) -> Admitted:
        """Wait until the certificate is due, and renew it over this connection to the hub, which goes on with it. So a renewal waits behind
        nobody who joins; if that fails, this machine joins again with its key. Raises like `admitted`.
        """
        while (there := self._admitted) is None or time.time() <= there.due:
            await asyncio.sleep(min(max(there.due - time.time(), 0.01), 60.0) if there else 1.0)
        try:
            raw = await channel.unary_unary(RENEW)(request(self._key, self.name), timeout=ANSWER_SECONDS)
            admitted = self._opened(bytes(raw))
            if admitted.credentials.authorities != there.credentials.authorities:
                self._learn(admitted.credentials.authorities)
        except (grpc.aio.AioRpcError, LinkError, OSError):
            return await self.admitted()
        self._admitted = admitted
        return admitted

    async def _renewed(self) -> Admitted:
        try:
            return await self._fresh()
        except OSError as error:
            raise LinkError(
                f"the keys in {self.folder} cannot be used ({error}); make room, or mend that folder"
            ) from None

    @property
    def run(self) -> str:
        """The run file of the hub; "" if it has none."""
        return self._admitted.run if self._admitted else ""

    def forget(self) -> None:
        """Request a fresh certificate the next time."""
        self._admitted = None

    def told(self, error: grpc.aio.AioRpcError | LinkError) -> LinkError:
        """Why a call to the hub has failed. If the hub asks for a certificate of its new authority, the next call gets one; also if the hub
        did not answer, but not at once again. The certificate may have ended by the hub's clock: one of both clocks was set, or stood still.
        """
        found = explain(error) if isinstance(error, grpc.aio.AioRpcError) else error
        there = self._admitted
        if isinstance(found, Outdated):
            self.forget()
        elif isinstance(found, Unanswered) and there and monotonic() - there.made > RETRY_SECONDS:
            self._admitted = replace(there, due=0.0, made=monotonic())
        return found

    async def _fresh(self) -> Admitted:
        authority = await self._authority()
        token, asked = self.token, request(self._key, self.name)
        head = JOIN_HEAD.pack(token.invitation, token.secret, len(self.name), len(asked))
        try:
            raw = await ask_to_join(
                token.host, token.join_port, authority, head + self.name.encode() + asked, ANSWER_SECONDS, SPOKEN
            )
        except Unlike as error:
            raise Refused(f"{error}.") from None
        except Refused as error:
            raise Refused(f"{error}. {_ADVICE}") from None
        except (OSError, EOFError) as error:
            raise LinkError(
                f"the hub at {token.host}:{token.join_port} does not answer ({_cause(error)}). Check that the token is whole, that the hub runs, "
                "and that this machine can reach that port. If its authority was rotated while this machine was away, ask the hub's owner for a "
                "new token."
            ) from None
        admitted = self._opened(bytes(raw))
        if admitted.credentials.authorities != authority:
            self._learn(admitted.credentials.authorities)
        return admitted

    def _learn(self, authorities: bytes) -> None:
        """Store another authority of the authenticated hub, by which it is known from now on, too."""
        found = {fingerprint(one).hex() for one in x509.load_pem_x509_certificates(authorities)}
        known = self._pins.read_text().split()
        write_private(self._pins, "".join(f"{one}\n" for one in [*known, *sorted(found.difference(known))]).encode())
        write_private(self._kept, authorities)

    def _opened(self, raw: bytes) -> Admitted:
        if len(raw) < ADMISSION.size:
            raise LinkError(f"the hub's answer cannot be read; {SAME_RELEASE}")
        certificate, authorities, run, elastic = ADMISSION.unpack_from(raw)
        if len(raw) != ADMISSION.size + certificate + authorities + run:
            raise LinkError(f"the hub's answer cannot be read; {SAME_RELEASE}")
        rest = raw[ADMISSION.size :]
        both = certificate + authorities
        own = Credentials(self._key, rest[:certificate], rest[certificate:both])
        try:
            made = x509.load_pem_x509_certificate(own.certificate)
            told = rest[both:].decode()
        except ValueError:
            raise LinkError(f"the hub's answer cannot be read; {SAME_RELEASE}") from None
        # Counted from now, because its times are those of the hub's clock.
        lifetime = (made.not_valid_after_utc - made.not_valid_before_utc - SKEW).total_seconds()
        now = time.time()
        return Admitted(own, told, elastic, now + lifetime, now + lifetime / 2, monotonic())

    async def _authority(self) -> bytes:
        """The authority's certificate as PEM: the stored one, or if it is missing or damaged the hub's, if it has the token's fingerprint."""
        with suppress(FileNotFoundError, ValueError):
            kept = self._kept.read_bytes()
            x509.load_pem_x509_certificates(kept)
            return kept
        pem = await _shown(self.token.host, self.token.join_port)
        if not _pinned(pem, self.token.authority):
            raise Refused(
                f"{self.token.host}:{self.token.join_port} is not the hub of this token: its authority has another fingerprint. "
                "Check that the whole token of this hub was given; otherwise somebody may have intercepted the connection. "
                "Nothing was sent to it."
            )
        if not self._pins.exists():  # not before the hub has shown it: a mistyped token must not bind the key to a hub
            write_private(self._pins, self.token.authority.hex().encode() + b"\n")
        write_private(self._kept, pem)
        return pem


def _pinned(pem: bytes, due: bytes) -> bool:
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))).digest() == due
    except ValueError:
        return False


def _cause(error: OSError | EOFError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return cause(error.verify_message)
    if isinstance(error, EOFError):
        return "it has ended the connection"
    number = 0 if isinstance(error, ssl.SSLError) else error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or f"nothing within {ANSWER_SECONDS:g} s"


async def _shown(host: str, port: int) -> bytes:
    """The certificate that the server at this address presents. It is not trusted, and nothing is sent. Raises `LinkError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its fingerprint is compared
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except OSError as error:
        raise LinkError(
            f"the hub at {host}:{port} does not answer ({_cause(error)}). Check that the token is whole, that the hub runs, and that this machine "
            "can reach that port. If it has another address here, its owner starts it with --address, and makes a new token."
        ) from None
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    if not shown or len(shown) > _LONGEST:
        raise LinkError(f"{host}:{port} shows no certificate, and a hub shows one; check that the hub listens there")
    return ssl.DER_cert_to_PEM_cert(shown).encode()
