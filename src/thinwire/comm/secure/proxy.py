"""A TCP proxy in front of the hub's gRPC server: it bounds and logs connections that have not been authenticated.

gRPC listens on this machine only and does the TLS; the proxy forwards bytes and does not read them. A connection counts as
authenticated from the first call that the hub has identified. There are at most `STRANGERS` others, for at most `seconds` each.
When one more arrives, one of them is closed: the oldest of the address that has most of them. So who opens many ends its own, and nobody
else's. An honest member needs less than a second.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from ipaddress import IPv6Address, ip_address, ip_network

from thinwire.comm.pacing import keep_window
from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.tasks import run_until_one_ends
from thinwire.errors import LinkError

STRANGERS = 256  # connections at once without authentication: 64 members reconnect with three each
CLOSING = 64  # additional connections, which this proxy is closing
HANDSHAKE_NBYTES = 4096  # most bytes of a machine that only fetches the authority's certificate
_READ_NBYTES = 1 << 16
BACKLOG = 1024  # connections that wait until they are accepted, or that asyncio accepts at once
FLUSH_SECONDS = 5.0  # most seconds until the last bytes of a connection were sent to who may not read them
_ENDED = "it ended without authentication"


class _Proxied:
    def __init__(self, host: str, port: int, task: asyncio.Task[None]) -> None:
        self.address, self.source, self.task = f"{host}:{port}", _source(host), task
        self.authenticated, self.logged, self.nbytes, self.reason = False, False, 0, _ENDED


class TcpProxy:
    """Listens at a public port, and forwards connections to gRPC's own port.

    Args:
        audit: logs connections that ended without authentication.
        inner: gRPC's port on this machine.
        seconds: a connection must authenticate within this time.
        stays: whether a connection may last longer after that; if not, it lasts for `seconds` at most.
        owner: what listens here, for messages.
    """

    def __init__(self, audit: AuditLog, inner: int, seconds: float, stays: bool, owner: str = "the hub") -> None:
        self._owner, self._audit, self._inner, self._seconds, self._stays = owner, audit, inner, seconds, stays
        self._by_port: dict[int, _Proxied] = {}  # by the local port that gRPC sees
        self._strangers: dict[_Proxied, None] = {}  # not authenticated yet, oldest first
        self._of_source: Counter[str] = Counter()  # the number of them
        self._tasks: set[asyncio.Task[None]] = set()
        self._authenticated = 0  # the number of tasks that serve authenticated connections

    async def open(self, host: str, port: int) -> int:
        """Begin to listen, and return the port. Raises `LinkError` if it is taken."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_READ_NBYTES, backlog=BACKLOG)
        except OSError as error:
            # A number below 0: no such host.
            told = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise LinkError(
                f"{self._owner} cannot listen at {host}:{port} ({told}). Give --listen an address of this machine, and a "
                "free port."
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close the port and all connections."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def remote_address(self, peer: str) -> str:
        """The remote address of the connection that gRPC calls `peer`."""
        connection = self._by_port.get(_port(peer))
        return connection.address if connection else peer

    def received(self, peer: str) -> int:
        """Bytes that have come so far over the connection that gRPC calls `peer`."""
        connection = self._by_port.get(_port(peer))
        return connection.nbytes if connection else 0

    def authenticated(self, peer: str) -> None:
        """Count `peer` as authenticated: the hub has identified it."""
        if connection := self._by_port.get(_port(peer)):
            self._authenticated += not connection.authenticated
            connection.authenticated = True
            self._remove(connection)

    def logged(self, peer: str) -> None:
        """Log nothing when the connection `peer` ends: the audit log has its line."""
        if connection := self._by_port.get(_port(peer)):
            connection.logged = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        host, port = (writer.get_extra_info("peername") or ("nobody", 0))[:2]
        connection = _Proxied(host, port, task)
        if len(self._tasks) - self._authenticated >= STRANGERS + CLOSING:
            self._audit.stranger("refused a connection from", connection.address, "too many others connect")
            writer.transport.abort()
            return
        self._tasks.add(task)
        keep_window(writer.get_extra_info("socket"))
        if len(self._strangers) >= STRANGERS:
            self._evict(self._dispensable(), f"{STRANGERS} others connected, and it did not authenticate")
        self._strangers[connection] = None
        self._of_source[connection.source] += 1
        timer = asyncio.get_running_loop().call_later(self._seconds, self._late, connection)
        try:
            await self._forward(connection, reader, writer)
        except OSError as error:
            connection.reason = str(error)
        except asyncio.CancelledError:
            pass  # closed by this proxy: the task ends here
        finally:
            timer.cancel()
            self._tasks.discard(task)
            self._authenticated -= connection.authenticated
            self._forget(connection)
            writer.transport.abort()

    async def _forward(self, connection: _Proxied, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._inner, limit=_READ_NBYTES)
        port = far_writer.get_extra_info("sockname")[1]
        self._by_port[port] = connection
        try:
            await run_until_one_ends(self._copy(connection, reader, far_writer), self._copy(None, far_reader, writer))
            await _flush(writer, far_writer)
        finally:
            del self._by_port[port]
            far_writer.transport.abort()

    async def _copy(
        self, connection: _Proxied | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_NBYTES):
                if connection:
                    connection.nbytes += len(data)
                writer.write(data)
                await writer.drain()

    def _late(self, connection: _Proxied) -> None:
        if not (connection.authenticated and self._stays):
            self._evict(connection, f"it did not authenticate in {self._seconds:g} s")

    def _dispensable(self) -> _Proxied:
        """The oldest of the address that has most of those without authentication."""
        most = max(self._of_source.values())
        return next(one for one in self._strangers if self._of_source[one.source] == most)

    def _remove(self, connection: _Proxied) -> bool:
        """Whether `connection` was one without authentication, and no longer is."""
        if connection not in self._strangers:
            return False
        del self._strangers[connection]
        self._of_source[connection.source] -= 1
        if not self._of_source[connection.source]:
            del self._of_source[connection.source]
        return True

    def _evict(self, connection: _Proxied, why: str) -> None:
        connection.reason = why
        connection.task.cancel()
        self._forget(connection)  # now, because its task may run later

    def _forget(self, connection: _Proxied) -> None:
        if self._remove(connection):
            # It fetched the authority's certificate, as a machine that joins does first.
            only_handshake = connection.reason == _ENDED and not self._stays and connection.nbytes <= HANDSHAKE_NBYTES
            if not connection.logged and not only_handshake:
                why = f"{connection.reason} ({connection.nbytes} bytes)"
                self._audit.stranger("refused a connection from", connection.address, why)


async def _flush(*writers: asyncio.StreamWriter) -> None:
    """Send what waits in `writers`, for `FLUSH_SECONDS` at most: a machine that does not read would keep its connection, outside all bounds."""
    for writer in writers:
        writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(FLUSH_SECONDS):
            for writer in writers:
                await writer.wait_closed()


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


def _port(peer: str) -> int:
    port = peer.rpartition(":")[2]
    return int(port) if port.isdigit() else -1
