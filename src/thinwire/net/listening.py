"""The server of a member that listens: other members of its group connect to it, and nobody else."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import grpc
import grpc.aio
from cryptography import x509

from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.net import frames
from thinwire.net.audit import AuditLog
from thinwire.net.calls import Broken
from thinwire.net.channels import LIVE, STRAIGHT, check_tls, of_members, server_credentials
from thinwire.net.keys import Credentials, member_name
from thinwire.net.proxy import TcpProxy
from thinwire.net.streams import Counted, Handlers, Refusing, first
from thinwire.net.versions import agreed_with_member

STRANGER_SECONDS = 20.0  # most seconds until a connection has greeted
_HOST = re.compile(rf"[A-Za-z0-9._:-]{{1,{frames.HOST_NBYTES}}}", re.ASCII)
_EVERYWHERE = ("", "0.0.0.0", "::")  # no addresses to dial


def dialable(host: str, port: int) -> bool:
    """Whether this is an address that a member may send to the others."""
    return bool(_HOST.fullmatch(host)) and host not in _EVERYWHERE and 0 < port < 1 << 16


@dataclass(frozen=True)
class Listen:
    """Where a member listens, and where the others reach it; port 0 is any free port, and a public port 0 is the same port.

    >>> Listen.parse("0.0.0.0:29540", "oslo.example")
    Listen(host='0.0.0.0', port=29540, public_host='oslo.example', public_port=0)
    """

    host: str
    port: int
    public_host: str
    public_port: int

    @classmethod
    def parse(cls, listen: str, address: str = "") -> Listen:
        """Parse HOST:PORT, and HOST or HOST:PORT where others reach it. Raises `ConfigurationError`."""
        host, port = _pair(listen)
        public, public_port = (host, 0) if not address else _pair(address) if _has_port(address) else (address, 0)
        if port is None or public_port is None:
            raise ConfigurationError(
                f"listen={listen!r}, address={address!r}: HOST:PORT is needed, such as 0.0.0.0:29540."
            )
        if not dialable(public, public_port or 1):
            raise ConfigurationError(
                f"listen={listen!r}, address={address!r}: others need a host that they can dial; give --address, such as oslo.example."
            )
        return cls(host, port, public, public_port)


def _has_port(text: str) -> bool:
    return text.count(":") == 1 or "]:" in text


def _pair(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    valid = bool(colon) and port.isascii() and port.isdigit() and int(port) < 1 << 16
    return host.strip("[]"), int(port) if valid else None


@dataclass(frozen=True)
class Greeted:
    """An accepted stream: the peer's rank, and how to read and write frames of this version."""

    peer: int
    version: int
    read: Callable[[], Awaitable[bytes]]
    write: Callable[[bytes], Awaitable[None]]


class MemberServer:
    """Accepts straight streams from other members of the group.

    Args:
        listen: where it listens.
        audit: gets a line for each refusal.
        admit: the rank of a connected member by its name and the method that it calls, and this member's group and rank. Raises `LinkError`
            for anybody else.
        carry: serves an accepted stream until it ends, by its method.
    """

    def __init__(
        self,
        listen: Listen,
        audit: AuditLog,
        admit: Callable[[str, str], tuple[int, int, int]],
        carry: Mapping[str, Callable[[Greeted], Awaitable[None]]],
    ) -> None:
        self._listen, self._audit, self._admit, self._carry = listen, audit, admit, carry
        self._own: Credentials | None = None
        self._server: Any = None
        self.public = listen.public_host, listen.public_port

    async def begin(self, own: Credentials) -> None:
        """Listen, with these credentials from the next handshake on. Raises `LinkError` if the port is taken."""
        self._own = own
        if self._server:
            return
        handlers = {
            method: grpc.stream_stream_rpc_method_handler(partial(self._serve, method)) for method in (STRAIGHT, LIVE)
        }
        server = grpc.aio.server(handlers=(Handlers(handlers),), options=of_members(inf), maximum_concurrent_rpcs=256)
        proxy = TcpProxy(self._audit, STRANGER_SECONDS, owner="this member")
        server.add_secure_port(f"unix:{proxy.inner}", server_credentials(self._credentials))
        await server.start()
        try:
            port = await proxy.open(self._listen.host, self._listen.port)
        except LinkError as error:
            await server.stop(0)
            raise ConfigurationError(str(error)) from None
        self._proxy, self._server = proxy, server
        self.public = self._listen.public_host, self._listen.public_port or port

    async def close(self) -> None:
        """Close the port and all streams. Idempotent."""
        server, self._server = self._server, None
        if server:
            await self._proxy.close()
            self._audit.flush()
            await server.stop(0)

    def _credentials(self) -> Credentials:
        assert self._own
        return self._own

    async def _serve(self, method: str, _: Any, context: Any) -> None:
        context = Counted(context, self._proxy)
        async with Refusing(self._audit, context, self._proxy):
            peer, group, rank = self._admit(name := _named(context), method)
            self._proxy.authenticated(context.peer(), name)
            version = await agreed_with_member(context)
            frame = frames.opened(await first(context), 0, [frames.GREET], version)
            if (frame.rank, frame.number(0)) != (peer, group):
                raise PacketError(
                    f"the greeting names member {frame.rank} of group {frame.number(0)}; member {peer} of group {group} was expected"
                )
            await context.write(frames.head(frames.GREET, rank, 0, version) + frames.packed(frames.GREET, group))

            async def read() -> bytes:
                if (raw := await context.read()) is grpc.aio.EOF:
                    raise Broken("the member has ended the stream")
                return bytes(raw)

            try:
                await self._carry[method](Greeted(peer, version, read, context.write))
            except PacketError:
                raise
            except Exception as error:  # of a broken stream, as gRPC names it
                self._audit("lost a straight stream of", name, error)


def _named(context: Any) -> str:
    """The name in the caller's certificate, which the handshake has checked. Raises `LinkError`."""
    check_tls(context)
    (pem,) = context.auth_context().get("x509_pem_cert", [b""])
    try:
        return member_name(x509.load_pem_x509_certificate(pem))
    except ValueError:
        raise LinkError("no certificate was presented") from None
