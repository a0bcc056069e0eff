"""The hub, which all members dial. It admits them, forms groups, and forwards their messages.

It has two ports. One accepts only members with a certificate; at the other (joining.py) a new member sends the secret of an invitation and
gets a certificate, which it renews at the first. A killed hub that starts again continues where it was: its state is in its folder
(`HubState`), and members send messages again that were in flight.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import Any

import grpc
import grpc.aio

from thinwire.errors import DataError, LinkError, PacketError
from thinwire.net import audit, frames
from thinwire.net.admission import Admission
from thinwire.net.audit import AuditLog
from thinwire.net.callers import Callers
from thinwire.net.calls import Outdated
from thinwire.net.channels import (
    BULK,
    CONTROL,
    FOLLOW,
    MEET,
    OF_MEMBERS,
    PUBLISH,
    RENEW,
    server_credentials,
)
from thinwire.net.fetch import Published, serve
from thinwire.net.grouping import GroupRequest, HubGroups
from thinwire.net.invitations import invite
from thinwire.net.joining import JoinPort, server_tls
from thinwire.net.keys import Authorities, Credentials, opened_request, private_folder
from thinwire.net.limits import MemberRates
from thinwire.net.loop import LoopThread
from thinwire.net.proxy import Bounds, PublicPort, TcpProxy
from thinwire.net.relay import LOOK_SECONDS, Connection, Pipe
from thinwire.net.requests import HubRequester, RequestHandler, opened_meet, serving_requests
from thinwire.net.runs import HubRuns
from thinwire.net.state import HubState
from thinwire.net.streams import (
    STREAMS_OF_ALL,
    Bounded,
    Handle,
    Handlers,
    Refusing,
    first,
    reading,
    writing,
)
from thinwire.net.tasks import run_until_one_ends
from thinwire.net.token import Token
from thinwire.net.upload import Publishers, Uploads
from thinwire.net.versions import FOLLOWING, agreed_with_member, stated_run

LIFETIME = timedelta(hours=1)  # lifetime of a member's certificate
OWN_LIFETIME = timedelta(days=7)  # lifetime of the hub's certificate
RENEWAL_FRAMES = 64  # what a certificate costs the hub, in frames
STREAMS = 8  # most bulk streams of each connection
STRANGER_SECONDS = 20.0  # most seconds until a connection authenticates, or joins
PATIENCE = 60.0  # seconds without a connection after which a member counts as gone
ELASTIC_PATIENCE = 2.0  # the same in elastic runs, where a member may join again at little cost


class Hub:
    """A hub that listens until `close`.

    Args:
        folder: its keys and its state, made when missing.
        host: the address of this machine to listen at; "": the folder's earlier one.
        port: number of the port that members dial; new members join at the next one. 0: the folder's earlier ports, or any free ones.
        reached_at: the host that members dial, if it is not `host`.
        lifetime: how long a member's certificate is valid.
        patience: seconds after which a member that is not connected counts as gone; None: `PATIENCE`, or `ELASTIC_PATIENCE` with a registry.
        published: the published versions for followers; None: followers are refused.
        publishers: the members that may send versions, which are served in place of `published`; None: nobody may.
        registry: makes the registry of members for each elastic run; None: groups are fixed.
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
        patience: float | None = None,
        registry: Callable[[], RequestHandler] | None = None,
        published: Published | None = None,
        publishers: Publishers | None = None,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.folder, self._published, self._publishers = private_folder(folder), publishers or published, publishers
        self._use(Authorities(folder))
        self._audit = AuditLog(folder / "audit.txt", say)
        self._state = HubState(folder)
        self._admission = Admission(folder, self._state, self._authorities, self._audit, lifetime, registry is not None)
        self._callers = Callers(self._state, self._authorities)
        self._rates = MemberRates(
            lambda name, number: self._audit.count(
                "delayed", name, "frames, which came faster than a member needs", number
            )
        )
        self._uploads = Uploads(publishers, self._audit)
        patience = patience or (ELASTIC_PATIENCE if registry else PATIENCE)
        self._groups = HubGroups(self._state, self._audit, patience, stays=registry is None)
        self._connections: dict[int, Connection] = {}
        self._closed = False
        self._server: Any = None
        self._ports: list[PublicPort] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._runs = HubRuns(registry, self._state, self._audit, self._lost) if registry else None
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
            everywhere = host in ("0.0.0.0", "::")  # these are no addresses to dial
            self._state.keep("host", reached_at or (socket.gethostname() if everywhere else host))
        self._state.keep("listen", self.host)
        self._state.keep("ports", f"{self.port} {self.join_port}")
        self.dialled = self._state.meta("host")  # the host in tokens

    def close(self) -> None:
        """Stop listening. Connected members wait until the hub is back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.run(self._stop())
            self._state.close()
            self._thread.release()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def invite(
        self, uses: int = 1, seconds: float = 86_400.0, name: str | None = None, runs: Collection[str] = ()
    ) -> Token:
        """See `invite`."""
        return invite(self.folder, uses, seconds, name, runs)

    async def _start(self, host: str, port: int) -> tuple[int, int]:
        before = (self._state.meta("ports") or "0 0").split()
        ports = (port, port + 1) if port else tuple(map(int, before))
        bounds = Bounds()  # of both ports together
        self._proxy = self._callers.proxy = TcpProxy(self._audit, STRANGER_SECONDS, bounds=bounds)
        joining = JoinPort(self._audit, STRANGER_SECONDS, lambda: self._tls, self._admission.join, bounds)
        self._ports = [self._proxy, joining]
        self._admission.granted = self._granted
        self._server = grpc.aio.server(
            handlers=(Handlers(self._of_members),), options=OF_MEMBERS, maximum_concurrent_rpcs=STREAMS_OF_ALL
        )
        self._server.add_secure_port(f"unix:{self._proxy.inner}", server_credentials(self._credentials))
        await self._server.start()
        bound = [await each.open(host, number) for each, number in zip(self._ports, ports)]
        self._tasks = [asyncio.create_task(self._look())]
        if self._runs:
            self._tasks.append(asyncio.create_task(self._runs.ticking(self._groups)))
        return bound[0], bound[1]

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:  # first, because no registry may record members as gone when this hub ends
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.end.set()
        ports, self._ports = self._ports, []
        for port in ports:
            await port.close()
        server, self._server = self._server, None  # gRPC's own thread ends with it
        if server:
            await server.stop(0)
        self._uploads.close()
        self._audit.flush()

    def _credentials(self) -> Credentials:
        """The hub's own credentials, renewed after half of their lifetime, and if the clock was set back: others compare it with theirs."""
        if not 0.0 <= time.time() - self._made <= OWN_LIFETIME.total_seconds() / 2:
            self._use(self._authorities)
        return self._own

    def _use(self, authorities: Authorities) -> None:
        """Present the authority in force, and trust all of them."""
        self._authorities = authorities
        self._own = authorities.own.hub_credentials(OWN_LIFETIME, authorities.trusted)
        self._tls, self._made = server_tls(), time.time()
        authorities.own.present_in(self._tls)

    def _look_at_authorities(self) -> None:
        """If the authorities have changed, close all connections; `Callers` asks members without a new certificate to get one."""
        found = Authorities(self.folder)
        if found.trusted != self._authorities.trusted:
            self._use(found)
            self._admission.authorities = self._callers.authorities = found
            self._audit("rotated", "the authority", "members take certificates of the new one")
            for connection in self._connections.values():
                connection.end.set()

    @property
    def _of_members(self) -> dict[str, grpc.RpcMethodHandler]:
        bounded = Bounded(self._audit, self._proxy)
        return {
            CONTROL: grpc.stream_stream_rpc_method_handler(bounded(self._control)),
            BULK: grpc.stream_stream_rpc_method_handler(bounded(self._bulk)),
            MEET: grpc.stream_stream_rpc_method_handler(bounded(self._meet)),
            FOLLOW: grpc.unary_stream_rpc_method_handler(bounded(self._follow)),
            PUBLISH: grpc.stream_stream_rpc_method_handler(bounded(self._publish)),
            RENEW: grpc.unary_unary_rpc_method_handler(self._renew),
        }

    # Members.

    async def _renew(self, raw: bytes, context: Any) -> bytes:
        """A fresh certificate for a member that is connected, which needs no connection for it."""
        async with Refusing(self._audit, context, self._proxy):
            name, _expires = self._callers.identify(context)
            await self._rates.spend(name, RENEWAL_FRAMES)
            found = opened_request(raw)
            self._callers.check_key(name, found)
            answer = self._admission.issued(name, found)
            self._granted(name)
        return answer

    def _granted(self, name: str) -> None:
        """Called when this member has a fresh certificate: its connections last as long."""
        for connection in self._connections.values():
            if connection.name == name:
                connection.expires = time.time() + self._admission.lifetime.total_seconds()

    async def _control(self, _: Any, context: Any) -> None:
        async with Refusing(self._audit, context, self._proxy):
            name, expires = self._callers.trainer(context)
            version = await agreed_with_member(context)
            frame = frames.opened(await first(context), 0, [frames.HELLO], version)
            process, label, of_run = frame.data(0), frame.data(1), stated_run(context.invocation_metadata())
            if self._runs is None:  # in an elastic run a label has the name of a view, which only its members know
                size = frame.number(2)
                self._callers.check_bound(
                    name,
                    lambda run: any(
                        label == frames.group_label(size, one) and of_run in ("", frames.run_digest(one))
                        for one in (run, frames.with_reducer(run))
                    ),
                )
            with self._connected(context, name, process, expires, None, label) as connection:
                await self._former_has_ended(connection)
                try:
                    self._groups.join(connection, GroupRequest.read(frame, of_run))
                    await self._serve(context, connection, connection.control, self._said(connection), version)
                finally:
                    self._groups.leave(connection, label)

    async def _meet(self, _: Any, context: Any) -> None:
        """Answer the requests of a member of an elastic run."""
        async with Refusing(self._audit, context, self._proxy):
            name, expires = self._callers.trainer(context)
            if self._runs is None:
                raise LinkError("groups at this hub are fixed; for elastic runs start it with --elastic")
            version = await agreed_with_member(context)
            process, run = opened_meet(frames.opened(await first(context), 0, [frames.MEET], version))
            self._callers.check_bound(name, lambda known: known == run)
            connected = self._connected(context, name, process, expires, run)
            with self._runs.used(run, name) as registry, connected as connection:
                await self._former_has_ended(connection)
                requester = HubRequester(name, process, self._proxy.remote_address(context.peer()))
                try:
                    await self._run_until_one_ends(
                        connection, [serving_requests(context, registry, requester, version, self._rates)]
                    )
                finally:
                    alike = [one for one in self._connections.values() if (one.name, one.process) == (name, process)]
                    if not any(one.run == run and one is not connection for one in alike):
                        registry.gone(name, requester.incarnation, "its connections have ended")

    async def _follow(self, question: bytes, context: Any) -> None:
        """Answer a follower. It is identified at each request, so a revoked one is refused."""
        async with Refusing(self._audit, context, self._proxy):
            _name, expires = self._callers.identify(context)
            if expires < time.time():
                raise Outdated("the certificate of this follower has expired")
            if self._published is None:
                raise LinkError("this hub does not serve followers; start it with --published RUN or --publishers NAME")
            await agreed_with_member(context, FOLLOWING)
            try:
                async for chunk in serve(question, self._published):
                    await context.write(chunk)
            except DataError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    async def _publish(self, _: Any, context: Any) -> None:
        """Take a version from a publisher. It is identified at each chunk, so a revoked one is refused."""
        async with Refusing(self._audit, context, self._proxy):
            await self._uploads.take(context, lambda: self._callers.trainer(context))

    @contextmanager
    def _connected(
        self, context: Any, name: str, process: bytes, expires: float, run: str | None, label: bytes = b""
    ) -> Iterator[Connection]:
        """A context in which this connection is registered. Raises `LinkError` at the end if it was revoked."""
        received = partial(self._proxy.received, context.peer())
        address = self._proxy.remote_address(context.peer())
        connection = Connection(randbits(64), name, process, expires, received, run, label, address)
        self._connections[connection.number] = connection
        try:
            yield connection
        finally:
            del self._connections[connection.number]
            connection.end.set()
        if connection.refusal:
            raise LinkError(connection.refusal)

    async def _former_has_ended(self, connection: Connection) -> None:
        """Wait until no other process of this member is in the same place. One that was killed has ended, or is silent and ends soon; raise
        `LinkError` if it lives: then the member's folder was copied, and the run of the former goes on.
        """
        for former in list(self._connections.values()):  # in the order in which they came
            if former is connection:
                return
            nbytes, looks = -1, 0
            while connection.takes_place_of(former) and not former.end.is_set():
                if (
                    looks > 1 and former.nbytes != nbytes
                ):  # what came before may have been on its way when its process ended
                    since = time.strftime("%H:%M:%S", time.gmtime(former.since))
                    raise LinkError(
                        f"{connection.name} trains already: a process with the same key is connected from {former.address} since {since} UTC, and "
                        f"lives; this one came from {connection.address}. Stop one of them. If this folder is a copy, delete its key, and join with "
                        "another token and --name"
                    )
                nbytes, looks = former.nbytes, looks + 1
                await asyncio.sleep(LOOK_SECONDS)

    def _lost(self, name: str, incarnation: str) -> None:
        """End the connections of a member that has been silent for too long."""
        for connection in self._connections.values():
            if (connection.name, connection.process) == (name, incarnation.encode()):
                connection.end.set()

    async def _bulk(self, _: Any, context: Any) -> None:
        async with Refusing(self._audit, context, self._proxy):
            name, _expires = self._callers.trainer(context)
            version = await agreed_with_member(context)
            frame = frames.opened(await first(context), 0, [frames.ATTACH], version)
            connection = self._connections.get(frame.number(0))
            if connection is None or connection.name != name or connection.relay is None:
                return  # the control stream has ended meanwhile
            if connection.streams >= STREAMS:
                raise PacketError(f"one connection opened more than {STREAMS} bulk streams; {frames.SAME_RELEASE}")
            connection.streams += 1
            relay = connection.relay
            try:
                handle = {frames.DATA: lambda frame: relay.data(connection.rank, frame)}
                await self._serve(context, connection, connection.bulk, handle, version)
            finally:
                connection.end.set()

    def _said(self, connection: Connection) -> dict[int, Handle]:
        def handle(frame: frames.Frame) -> None:
            if connection.relay is None:
                raise PacketError(f"a frame came before the group was formed; {frames.SAME_RELEASE}")
            if not connection.end.is_set():
                connection.relay.control(connection.rank, frame)

        return dict.fromkeys((*frames.PASSED_ON, frames.DATA, frames.LEAVE), handle)

    async def _serve(
        self, context: Any, connection: Connection, pipe: Pipe, handles: dict[int, Handle], version: int
    ) -> None:
        """Read and write until the stream or the connection ends. Raises `PacketError` for a frame that is not allowed."""
        await self._run_until_one_ends(
            connection,
            [
                reading(context, handles, version, self._rates, connection.name),
                writing(context, pipe, version, self._rates, connection.name),
            ],
        )

    async def _run_until_one_ends(self, connection: Connection, works: list[Coroutine[Any, Any, object]]) -> None:
        try:
            errors = await run_until_one_ends(*works, connection.end.wait())
        finally:
            connection.end.set()
        for error in errors:
            if isinstance(error, PacketError):
                raise error
            self._audit("lost a stream of", connection.name, repr(error))

    async def _look(self) -> None:
        """End the connections of members that are silent or were revoked, or whose certificates have expired."""
        version = -1
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with self._audit.repeated("the state of the hub"):
                version = self._looked(version)

    def _looked(self, before: int) -> int:
        """One look; returns the version of the state, which was `before` at the last one. What writes comes last: the disk may be full."""
        self._audit.flush(audit.SECONDS)
        for connection in list(self._connections.values()):
            if why := connection.why_over(time.time()):
                self._audit("ended", connection.name, why)
                connection.end.set()
        if before != (version := self._state.version):
            revoked = {member.name for member in self._state.members() if member.revoked}
            for connection in list(self._connections.values()):
                if connection.name in revoked:
                    connection.refusal = f"{connection.name} is revoked"
                    connection.end.set()
            if self._runs:
                self._runs.revoke(revoked)
            if self._publishers:
                self._publishers.forbid(revoked)
            self._look_at_authorities()
            self._groups.revoke(revoked)
        self._groups.remove_absent(time.monotonic())
        self._groups.form()
        return version
