"""The hub: where all members dial in. It admits them, forms groups, and passes on what they send each other.

Two ports: at the one, who joins shows the secret of an invitation and gets a certificate; at the other nobody is heard
who has none. A hub that was killed goes on where it was: what it must not forget is in its folder (`HubState`), and what
was on the way is sent again by the members.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from secrets import randbits
from typing import Any

import grpc
import grpc.aio
from cryptography import x509

from thinwire.comm.secure import frames
from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.channels import (
    BULK,
    CONTROL,
    JOIN,
    JOIN_NBYTES,
    OF_JOINERS,
    OF_MEMBERS,
    TLS,
    server_credentials,
)
from thinwire.comm.secure.door import Door
from thinwire.comm.secure.invitations import invite
from thinwire.comm.secure.keys import (
    Authority,
    Credentials,
    check_name,
    key_digest,
    member_name,
    opened_request,
    private_folder,
)
from thinwire.comm.secure.loop import LoopThread
from thinwire.comm.secure.relay import Connection, Pipe, Relay, natural
from thinwire.comm.secure.state import HubState
from thinwire.comm.secure.streams import Handle, Handlers, Refusing, first, reading, unary, writing
from thinwire.comm.secure.token import Token
from thinwire.errors import ConfigurationError, LinkError, PacketError

LIFETIME = timedelta(hours=1)  # of a member's certificate
OWN_LIFETIME = timedelta(days=7)  # of the hub's
STREAMS = 8  # of bulk, for each connection
STRANGER_SECONDS = 20.0  # in which a visitor shows who it is, or joins
LOOK_SECONDS = 0.5  # between two looks at what the commands have changed
JOIN_HEAD = struct.Struct("<8s16sBH")  # invitation, secret, bytes of the name and of the request
ADMITTED = struct.Struct("<HHI")  # bytes of the certificate, of the authorities, of the run file


class Hub:
    """A hub that listens until `close`.

    Args:
        folder: its keys and its state, made when missing.
        host: the address of this machine to listen at; "": the one that the folder's hub had before.
        port: where members dial; the next port is for those who join. 0: the ports that the folder's hub had before, or any free ones.
        reached_at: the host that members dial, if it is not `host`.
        lifetime: how long a member's certificate is valid.
        say: called with each line of the audit log.

    Raises:
        LinkError: a port is taken.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        reached_at: str | None = None,
        lifetime: timedelta = LIFETIME,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.folder, self._lifetime = private_folder(folder), lifetime
        self._authority = Authority(folder)
        self._own = self._authority.hub_credentials(OWN_LIFETIME)
        self._made = time.monotonic()
        self._as_authority = self._authority.own_credentials()
        self._audit = AuditLog(folder / "audit.txt", say)
        self._state = HubState(folder)
        self._relays: dict[int, Relay] = {}
        self._waiting: dict[bytes, dict[str, tuple[Connection, int]]] = {}  # by label and name, with the size
        self._connections: dict[int, Connection] = {}
        self._closed = False
        self._servers: list[Any] = []
        self._doors: list[Door] = []
        self._looking: asyncio.Task[None] | None = None
        for group in self._state.groups():
            self._keep(group)
        self._thread = LoopThread.shared()
        try:
            self.host = host or self._state.meta("listen") or "127.0.0.1"
            self.port, self.join_port = self._thread.run(self._start(self.host, port))
        except BaseException:
            self._thread.run(self._stop())
            self._state.close()
            self._thread.release()
            raise
        if reached_at or host:
            everywhere = host in ("0.0.0.0", "::")  # no address to dial
            self._state.keep("host", reached_at or (socket.gethostname() if everywhere else host))
        self._state.keep("listen", self.host)
        self._state.keep("ports", f"{self.port} {self.join_port}")

    def close(self) -> None:
        """Stop listening. Members that are connected wait for the hub to come back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._stop())
            self._state.close()
            self._thread.release()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def invite(self, uses: int = 1, seconds: float = 86_400.0, name: str | None = None) -> Token:
        """See `invite`."""
        return invite(self.folder, uses, seconds, name)

    async def _start(self, host: str, port: int) -> tuple[int, int]:
        before = (self._state.meta("ports") or "0 0").split()
        ports = (port, port + 1) if port else tuple(map(int, before))
        bound = []
        for place, (options, handlers, own) in enumerate(
            (
                (OF_MEMBERS, self._of_members, self._credentials),
                (OF_JOINERS, {JOIN: unary(self._join)}, lambda: self._as_authority),
            )
        ):
            members = place == 0
            server = grpc.aio.server(handlers=(Handlers(handlers),), options=options, maximum_concurrent_rpcs=1024)
            self._servers.append(server)
            inner = server.add_secure_port("127.0.0.1:0", server_credentials(own, members))
            await server.start()
            door = Door(self._audit, inner, STRANGER_SECONDS, members)
            bound.append(await door.open(host, ports[place]))
            self._doors.append(door)
        self._looking = asyncio.create_task(self._look())
        return bound[0], bound[1]

    async def _stop(self) -> None:
        for connection in self._connections.values():
            connection.end.set()
        for door in self._doors:
            await door.close()
        servers, self._servers = self._servers, []  # gRPC's own thread ends with the last of them
        for server in servers:
            await server.stop(0)
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def _credentials(self) -> Credentials:
        """Of this hub, renewed now and then."""
        if time.monotonic() - self._made > OWN_LIFETIME.total_seconds() / 2:
            self._own, self._made = self._authority.hub_credentials(OWN_LIFETIME), time.monotonic()
        return self._own

    @property
    def _of_members(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            CONTROL: grpc.stream_stream_rpc_method_handler(self._control),
            BULK: grpc.stream_stream_rpc_method_handler(self._bulk),
        }

    # Joining.

    async def _join(self, raw: bytes, context: Any) -> bytes:
        """Admit a member, or renew its certificate."""
        try:
            self._check_tls(context)
            invitation, secret, name, request = _opened_join(raw)
            found = opened_request(request)
            new = self._state.admit(name, key_digest(found), invitation, secret)
            self._doors[1].known(context.peer())
        except (LinkError, PacketError, ConfigurationError) as error:
            self._audit.stranger("refused to admit", self._doors[1].who(context.peer()), error)
            self._doors[1].told(context.peer())
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the hub does not admit this machine: {error}")
        if new:
            self._audit("admitted", name, f"from {self._doors[1].who(context.peer())}")
        certificate = self._authority.issue(found, f"{name}.member.thinwire", self._lifetime)
        run = self.folder / "run.toml"
        told = run.read_bytes() if run.exists() else b""
        return ADMITTED.pack(len(certificate), len(self._authority.pem), len(told)) + (
            certificate + self._authority.pem + told
        )

    # Members.

    async def _control(self, _: Any, context: Any) -> None:
        async with Refusing(self._audit, context, self._doors[0]):
            name, expires = self._identify(context)
            frame = frames.opened(await first(context), 0, [frames.HELLO])
            process, label, size = frame.fields
            assert isinstance(process, bytes) and isinstance(label, bytes) and isinstance(size, int)
            connection = Connection(randbits(64), name, process, expires)
            self._connections[connection.number] = connection
            try:
                self._seat(connection, label, size)
                await self._serve(context, connection, connection.control, self._said(connection))
                if connection.refusal:
                    raise LinkError(connection.refusal)
            finally:
                self._unseat(connection, label)

    async def _bulk(self, _: Any, context: Any) -> None:
        async with Refusing(self._audit, context, self._doors[0]):
            name, _expires = self._identify(context)
            frame = frames.opened(await first(context), 0, [frames.ATTACH])
            connection = self._connections.get(frame.number(0))
            if connection is None or connection.name != name or connection.relay is None:
                return  # the control stream has ended meanwhile
            if connection.streams >= STREAMS:
                raise PacketError(f"more than {STREAMS} bulk streams of one connection")
            connection.streams += 1
            relay = connection.relay
            try:
                handle = {frames.DATA: lambda frame: relay.data(connection.rank, frame)}
                await self._serve(context, connection, connection.bulk, handle)
            finally:
                connection.end.set()

    def _said(self, connection: Connection) -> dict[int, Handle]:
        def handle(frame: frames.Frame) -> None:
            if connection.relay is None:
                raise PacketError("a frame before the group was there")
            if not connection.end.is_set():
                connection.relay.control(connection.rank, frame)

        return dict.fromkeys((*frames.PASSED_ON, frames.DATA, frames.LEAVE), handle)

    async def _serve(self, context: Any, connection: Connection, pipe: Pipe, handles: dict[int, Handle]) -> None:
        """Read and write until the stream or the connection ends. Raises `PacketError` for what must not be said."""
        tasks = [
            asyncio.create_task(work)
            for work in (reading(context, handles), writing(context, pipe), connection.end.wait())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.end.set()
            for task in tasks:
                task.cancel()
            told = await asyncio.gather(*tasks, return_exceptions=True)
        for error in told:
            if isinstance(error, PacketError):
                raise error
            if isinstance(error, Exception):
                self._audit("lost a stream of", connection.name, repr(error))

    def _seat(self, connection: Connection, label: bytes, size: int) -> None:
        """Give a process its place in a group, or let it wait for the others. Raises `LinkError`."""
        if not 1 <= size <= frames.MEMBERS:
            raise LinkError(f"a group of {size}; 1 to {frames.MEMBERS} members are possible")
        name, process = connection.name, connection.process
        for relay in list(self._relays.values()):
            for rank, (other, there) in enumerate(relay.group.members):
                if other != name or relay.group.label != label or rank in relay.gone:
                    continue
                if there == process:
                    self._audit("connected", name)
                    relay.connect(rank, connection)
                    return
                relay.leave(rank, frames.REPLACED)
                if old := relay.connections.get(rank):
                    old.refusal = f"another process has come as {name}, with the same key"
                    old.end.set()
        waiting = self._waiting.setdefault(label, {})
        if sizes := {other for _, other in waiting.values()} - {size}:
            raise LinkError(f"{name} expects a group of {size}, others of this run one of {sizes.pop()}")
        waiting[name] = connection, size
        self._audit("waits", name, f"{len(waiting)} of {size} are here")
        if len(waiting) == size:
            names = sorted(waiting, key=natural)
            group = self._state.form(label, tuple((each, waiting[each][0].process) for each in names))
            del self._waiting[label]
            relay = self._keep(group)
            self._audit("formed", f"group {group.number}", " ".join(names))
            for rank, each in enumerate(names):
                relay.connect(rank, waiting[each][0])

    def _unseat(self, connection: Connection, label: bytes) -> None:
        del self._connections[connection.number]
        connection.end.set()
        if connection.relay:
            connection.relay.disconnect(connection)
            self._audit("disconnected", connection.name)
            if len(connection.relay.gone) == connection.relay.size:
                self._relays.pop(connection.relay.group.number, None)
            return
        waiting = self._waiting.get(label, {})
        if waiting.get(connection.name, (None, 0))[0] is connection:
            del waiting[connection.name]
            if not waiting:
                del self._waiting[label]

    def _keep(self, group: Any) -> Relay:
        def gone(rank: int, reason: int) -> None:
            self._state.gone(group.number, rank, reason)
            self._audit("gone", group.members[rank][0], frames.REASONS[reason])

        self._relays[group.number] = relay = Relay(group, gone)
        return relay

    async def _look(self) -> None:
        """Put out who was revoked, and end the connections whose certificates have expired."""
        version = -1
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for connection in list(self._connections.values()):
                if connection.expires < time.time():
                    self._audit("ended", connection.name, "its certificate has expired")
                    connection.end.set()
            if version == (version := self._state.version):
                continue
            revoked = {member.name for member in self._state.members() if member.revoked}
            for connection in list(self._connections.values()):
                if connection.name in revoked:
                    connection.refusal = f"{connection.name} is revoked"
                    connection.end.set()
            for relay in list(self._relays.values()):
                for rank, (name, _) in enumerate(relay.group.members):
                    if name in revoked:
                        relay.leave(rank, frames.REVOKED)

    def _identify(self, context: Any) -> tuple[str, float]:
        """The name of the member that calls, and when its certificate ends. Raises `LinkError`."""
        self._check_tls(context)
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError:
            raise LinkError("no certificate was shown") from None
        name = member_name(certificate)
        known = self._state.member(name)
        if known is None or known.key != key_digest(certificate):
            raise LinkError(f"the name {name} belongs to another key")
        if known.revoked:
            raise LinkError(f"{name} is revoked")
        self._doors[0].known(context.peer())
        return name, certificate.not_valid_after_utc.timestamp()

    def _check_tls(self, context: Any) -> None:
        (version,) = context.auth_context().get("ssl_tls_version", [b"no TLS"])
        if version.decode() != TLS:
            raise LinkError(f"{version.decode()} was spoken; {TLS} is needed")


def _opened_join(raw: bytes) -> tuple[bytes, bytes, str, bytes]:
    """Invitation, secret, name and request. Raises `PacketError`, `ConfigurationError`."""
    if not JOIN_HEAD.size < len(raw) <= JOIN_NBYTES:
        raise PacketError(f"a request to join of {len(raw)} bytes")
    invitation, secret, name, request = JOIN_HEAD.unpack_from(raw)
    if len(raw) != JOIN_HEAD.size + name + request:
        raise PacketError(
            f"a request to join of {len(raw)} bytes, where its header says {JOIN_HEAD.size + name + request}"
        )
    begin = JOIN_HEAD.size + name
    return invitation, secret, check_name(raw[JOIN_HEAD.size : begin].decode("ascii", "replace")), raw[begin:]
