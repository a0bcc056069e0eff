"""The ports that anybody can reach: they bound, and log, connections that have not been authenticated.

A connection counts as authenticated once the hub has identified it. Until then it is a stranger's, and bounded in everything that it costs:

- there are at most `STRANGERS` of them, for at most `seconds` each. When one more arrives, one of them is closed: the oldest of the address that has
  most of them. So who opens many ends its own, and nobody else's;
- so many are accepted a second, and of these so many are served, for each address and together (`Bounds`). The others wait in their order;
- each may send `STRANGER_NBYTES`, and all together `BYTES_PER_SECOND`. What is over that is not read, so TCP holds the sender back.

An honest member sends less than 8 kB and needs less than a second. `TcpProxy` forwards to gRPC, which listens at a Unix socket in a folder that
nobody else can enter, and does the TLS; it does not read what it forwards. So of a member it bounds the bytes that have not come out of gRPC as
messages (`BareBytes`).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import struct
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from itertools import count
from pathlib import Path

from thinwire.comm.pacing import keep_window
from thinwire.errors import LinkError
from thinwire.net.audit import AuditLog
from thinwire.net.limits import BareBytes, FairBucket, TokenBucket
from thinwire.net.tasks import run_until_one_ends

STRANGERS = 256  # connections at once without authentication: 64 members reconnect with three each
STRANGER_NBYTES = 1 << 14  # most bytes of a connection without authentication
HANDSHAKE_NBYTES = 4096  # most bytes of a machine that only fetches the authority's certificate
ACCEPTED_PER_SECOND, ACCEPTED_AT_ONCE = 200, 512  # connections that are taken from the kernel
SERVED_PER_SECOND, SERVED_AT_ONCE = 64, 256  # TLS handshakes, at about two milliseconds of a core each
SERVED_OF_SOURCE, SERVED_OF_SOURCE_AT_ONCE = 16, 128  # of one address
BYTES_PER_SECOND, BYTES_AT_ONCE = 1 << 19, 1 << 21  # of all strangers together
BYTES_OF_SOURCE, BYTES_OF_SOURCE_AT_ONCE = 1 << 17, 1 << 20  # of one address: 64 members that come back from one
BACKLOG = 1024  # connections that the kernel holds until they are accepted
_STRANGER_READ, _READ_NBYTES = 2048, 1 << 16
_SOCKETS = "thinwire-sockets-"  # folders of living proxies, each of which locks its own
_AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER
_ENDED = "it ended without authentication"


class Bounds:
    """What all strangers together, and those of one address, may cost the ports that share it."""

    def __init__(self) -> None:
        self.accepted = TokenBucket(ACCEPTED_PER_SECOND, ACCEPTED_AT_ONCE)
        self.served = FairBucket(
            lambda: TokenBucket(SERVED_OF_SOURCE, SERVED_OF_SOURCE_AT_ONCE),
            TokenBucket(SERVED_PER_SECOND, SERVED_AT_ONCE),
        )
        self.read = FairBucket(
            lambda: TokenBucket(BYTES_OF_SOURCE, BYTES_OF_SOURCE_AT_ONCE), TokenBucket(BYTES_PER_SECOND, BYTES_AT_ONCE)
        )


class TooManyBytesError(Exception):
    """A connection has sent all that one without authentication may send."""


class Arrived:
    """A connection that has arrived at a port. `read` keeps the bounds as long as it is not authenticated."""

    def __init__(self, socket: socket.socket, host: str, port: int, bounds: Bounds) -> None:
        self.socket, self.address, self.source, self._bounds = socket, f"{host}:{port}", _source(host), bounds
        self.task: asyncio.Task[None] | None = None
        self.authenticated, self.logged, self.aborted = False, False, False
        self.nbytes, self.reason, self._first = 0, _ENDED, b""
        self.spend: Callable[[int], Awaitable[None]] | None = None  # waits until this member may send so many bytes

    async def begin(self) -> None:
        """Wait for the first bytes, which the next `read` returns, and for this connection's turn: one that says nothing takes nobody's. Raises
        `OSError`.
        """
        self._first = await self.read()
        await self._bounds.served.take(self.source, 1)

    async def read(self) -> bytes:
        """The next bytes; b"" at the end. Raises `TooManyBytesError`, `OSError`."""
        if data := self._first:
            self._first = b""
            return data
        loop = asyncio.get_running_loop()
        left = STRANGER_NBYTES - self.nbytes
        if not self.authenticated and left <= 0:
            raise TooManyBytesError
        data = await loop.sock_recv(self.socket, _READ_NBYTES if self.authenticated else min(left, _STRANGER_READ))
        self.nbytes += len(data)
        if not self.authenticated:
            await self._bounds.read.take(self.source, len(data))
        elif self.spend:
            await self.spend(len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Send `data`. Raises `OSError`."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)


class PublicPort(ABC):
    """Listens at a public port, and serves the connections that arrive within the bounds.

    Args:
        audit: logs connections that ended without authentication.
        seconds: a connection must authenticate within this time.
        stays: whether a connection may last longer after that; if not, it lasts for `seconds` at most.
        bounds: those that this port shares with others; None: its own.
    """

    def __init__(self, audit: AuditLog, seconds: float, stays: bool, bounds: Bounds | None = None) -> None:
        self._audit, self._seconds, self._stays = audit, seconds, stays
        self._bounds = bounds or Bounds()
        self._strangers: dict[Arrived, None] = {}  # not authenticated yet, oldest first
        self._of_source: Counter[str] = Counter()  # the number of them
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []

    @abstractmethod
    async def serve(self, connection: Arrived) -> None:
        """Serve a connection until it ends."""

    async def open(self, host: str, port: int) -> int:
        """Begin to listen, and return the port. Raises `LinkError` if it is taken."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                listening = socket.socket(family, kind, protocol)
                self._listening.append(listening)
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listening.bind(address)
                listening.listen(BACKLOG)
                listening.setblocking(False)
        except OSError as error:
            await self.close()
            # A number below 0: no such host.
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise LinkError(
                f"the hub cannot listen at {host}:{port} ({why}). Give --listen an address of this machine, and a free port."
            ) from None
        for listening in self._listening:
            loop.add_reader(listening, self._ready, listening)
        return int(self._listening[0].getsockname()[1])

    async def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        listening, self._listening = self._listening, []
        for each in listening:
            asyncio.get_running_loop().remove_reader(each)
            each.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ready(self, listening: socket.socket) -> None:
        """Accept what waits, within the bound; then look again when it allows more."""
        for _ in range(16):  # others get their turn in between
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file is free, for example
                self._audit.stranger("cannot accept", "a connection", error)
                self._pause(listening, 1.0)
                return
            self._arrived(accepted, *address[:2])
            if seconds := self._bounds.accepted.take(1):
                self._pause(listening, seconds)
                return

    def _pause(self, listening: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def again() -> None:
            if listening in self._listening:
                loop.add_reader(listening, self._ready, listening)

        loop.call_later(seconds, again)

    def _arrived(self, accepted: socket.socket, host: str, port: int) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Arrived(accepted, host, port, self._bounds)
        if len(self._strangers) >= STRANGERS:
            self._evict(self._dispensable(), f"{STRANGERS} others connected, and it did not authenticate")
        self._strangers[connection] = None
        self._of_source[connection.source] += 1
        connection.task = task = asyncio.create_task(self._served(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._ended(connection))  # also of a task that was canceled before it began

    async def _served(self, connection: Arrived) -> None:
        timer = asyncio.get_running_loop().call_later(self._seconds, self._late, connection)
        try:
            await connection.begin()
            keep_window(connection.socket)
            await self.serve(connection)
        except TooManyBytesError:
            connection.aborted = True
            connection.reason = (
                f"it sent {connection.nbytes} bytes without authentication, and {STRANGER_NBYTES} are the most"
            )
        except (BrokenPipeError, ConnectionResetError):
            pass  # one side has ended it, as by b"": which of the two is noticed first is chance, and not a reason
        except OSError as error:
            connection.reason = str(error)
        finally:
            timer.cancel()

    def _ended(self, connection: Arrived) -> None:
        self._forget(connection)
        if connection.aborted:  # at once: nothing stays in the kernel for a machine that reads nothing
            with suppress(OSError):
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        connection.socket.close()

    def _authenticated(self, connection: Arrived) -> None:
        connection.authenticated = True
        self._remove(connection)

    def _late(self, connection: Arrived) -> None:
        if not (connection.authenticated and self._stays):
            self._evict(connection, f"it did not authenticate in {self._seconds:g} s")

    def _dispensable(self) -> Arrived:
        """The oldest of the address that has most of those without authentication."""
        most = max(self._of_source.values())
        return next(each for each in self._strangers if self._of_source[each.source] == most)

    def _remove(self, connection: Arrived) -> bool:
        """Whether `connection` was one without authentication, and no longer is."""
        if connection not in self._strangers:
            return False
        del self._strangers[connection]
        self._of_source[connection.source] -= 1
        if not self._of_source[connection.source]:
            del self._of_source[connection.source]
        return True

    def _evict(self, connection: Arrived, why: str) -> None:
        connection.reason, connection.aborted = why, True
        if connection.task:
            connection.task.cancel()
        self._forget(connection)  # now, because its task may run later

    def _forget(self, connection: Arrived) -> None:
        if self._remove(connection):
            # It fetched the authority's certificate, as a machine that joins does first.
            only_handshake = connection.reason == _ENDED and not self._stays and connection.nbytes <= HANDSHAKE_NBYTES
            if not connection.logged and not only_handshake:
                why = f"{connection.reason} ({connection.nbytes} bytes)"
                self._audit.stranger("refused a connection from", connection.address, why)


class TcpProxy(PublicPort):
    """A public port in front of a gRPC server at a Unix socket, `inner`. See `PublicPort`."""

    def __init__(self, audit: AuditLog, seconds: float, bounds: Bounds | None = None) -> None:
        super().__init__(audit, seconds, stays=True, bounds=bounds)
        self._folder, self._lock = _socket_folder()
        self.inner = self._folder / "grpc"
        self._numbers = count()
        self._by_name: dict[str, Arrived] = {}  # by the name under which gRPC knows the connection
        self._members: dict[Arrived, str] = {}
        self._bare = BareBytes(
            lambda name, number: audit.count("delayed", name, "bytes, which carry no message", number)
        )

    async def close(self) -> None:
        await super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remote_address(self, peer: str) -> str:
        """The remote address of the connection that gRPC calls `peer`."""
        connection = self._by_name.get(peer)
        return connection.address if connection else "an-ended-connection:0"

    def received(self, peer: str) -> int:
        """Bytes that have come so far over the connection that gRPC calls `peer`."""
        connection = self._by_name.get(peer)
        return connection.nbytes if connection else 0

    def authenticated(self, peer: str, name: str) -> None:
        """Count `peer` as authenticated: the hub has identified it as the member `name`."""
        if connection := self._by_name.get(peer):
            self._members[connection] = name
            connection.spend = partial(self._bare.spend, name)
            self._authenticated(connection)

    def message(self, peer: str, nbytes: int) -> None:
        """A message of so many bytes has come over the connection that gRPC calls `peer`."""
        if (connection := self._by_name.get(peer)) and (name := self._members.get(connection)):
            self._bare.received(name, nbytes)

    def logged(self, peer: str) -> None:
        """Log nothing when the connection `peer` ends: the audit log has its line."""
        if connection := self._by_name.get(peer):
            connection.logged = True

    async def serve(self, connection: Arrived) -> None:
        loop, name = asyncio.get_running_loop(), self._folder / str(next(self._numbers))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as inner:
            inner.setblocking(False)
            inner.bind(str(name))  # so that gRPC can tell connections apart
            self._by_name[f"unix:{name}"] = connection
            try:
                await loop.sock_connect(inner, str(self.inner))
                name.unlink()
                for error in await run_until_one_ends(_upload(connection, inner), self._download(connection, inner)):
                    raise error
            finally:
                name.unlink(missing_ok=True)
                del self._by_name[f"unix:{name}"]
                self._members.pop(connection, None)

    async def _download(self, connection: Arrived, inner: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(inner, _READ_NBYTES):
            await connection.write(data)
            if name := self._members.get(connection):
                self._bare.sent(name, len(data))
            await asyncio.sleep(0)


async def _upload(connection: Arrived, inner: socket.socket) -> None:
    while data := await connection.read():
        await asyncio.get_running_loop().sock_sendall(inner, data)
        await asyncio.sleep(0)  # a socket that is always ready lets no other task run


def _socket_folder() -> tuple[Path, int | None]:
    """A new folder that only its owner can enter, and its lock, which this process holds. Folders whose process was killed, which nobody locks, are
    removed.
    """
    made = Path(tempfile.mkdtemp(prefix="thinwire-new-"))  # no folder of `_SOCKETS` until it is locked
    if (lock := _locked(made)) is None:
        return made, None
    folder = made.rename(made.with_name(_SOCKETS + made.name.rpartition("-")[2]))
    for left in folder.parent.glob(_SOCKETS + "*"):
        if (ended := _locked(left)) is not None:
            if os.fstat(ended).st_uid == os.geteuid():
                shutil.rmtree(left, ignore_errors=True)
            os.close(ended)
    return folder, lock


def _locked(folder: Path) -> int | None:
    """A file that holds the lock of `folder`; None if another process holds it, or nobody can."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _source(host: str) -> str:
    """What one machine can have many of counts as one: of IPv6 the network of 64 bits.

    >>> _source("192.0.2.7"), _source("2001:db8::1:2"), _source("nobody")
    ('192.0.2.7', '2001:db8::/64', 'nobody')
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ip_network((address, 64), strict=False)) if isinstance(address, IPv6Address) else host
