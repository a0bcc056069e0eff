"""The door of a hub: strangers are counted, timed and written down before gRPC hears of them.

gRPC does the TLS, behind the door on this machine; the door passes bytes on and reads none of them. It knows a visitor from
the first call that the hub has identified. Until then it is one of at most `STRANGERS`, and stays for at most `seconds`. When
too many come, the stranger who has been here longest is sent away: an honest member needs less than a second.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from thinwire.comm.secure.audit import AuditLog
from thinwire.errors import LinkError

STRANGERS = 256  # connections at once that have not shown who they are: 64 members come back with three each
CLOSING = 64  # beside them, those that were sent away and are not closed yet
_READ_NBYTES = 1 << 16
_BACKLOG = 1024
_ENDED = "it ended without showing who it is"


class _Visitor:
    def __init__(self, who: str, task: asyncio.Task[None]) -> None:
        self.who, self.task = who, task
        self.known, self.told, self.nbytes, self.ended = False, False, 0, _ENDED


class Door:
    """Listens at a public port, and passes connections on to gRPC's own port.

    Args:
        audit: logs visitors that left without having shown who they are.
        inner: gRPC's port on this machine.
        seconds: within which a visitor must show who it is.
        stays: whether it may stay after that; if not, its connection lasts for `seconds` at most.
    """

    def __init__(self, audit: AuditLog, inner: int, seconds: float, stays: bool) -> None:
        self._audit, self._inner, self._seconds, self._stays = audit, inner, seconds, stays
        self._by_port: dict[int, _Visitor] = {}  # of this machine, as gRPC sees it
        self._strangers: dict[_Visitor, None] = {}  # in the order of coming
        self._tasks: set[asyncio.Task[None]] = set()
        self._members = 0  # of them, those who are known

    async def open(self, host: str, port: int) -> int:
        """Begin to listen, and return the port. Raises `LinkError` if it is taken."""
        try:
            self._server = await asyncio.start_server(self._visited, host, port, limit=_READ_NBYTES, backlog=_BACKLOG)
        except OSError as error:
            raise LinkError(
                f"the hub cannot listen at {host}:{port} ({error.strerror or error}). End what holds that port, or choose "
                "another with --listen."
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Send everybody away."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def who(self, peer: str) -> str:
        """The address of the visitor whose connection gRPC calls `peer`."""
        visitor = self._by_port.get(_port(peer))
        return visitor.who if visitor else peer

    def known(self, peer: str) -> None:
        """Take `peer` off the list of strangers: the hub has identified it."""
        if visitor := self._by_port.get(_port(peer)):
            self._members += not visitor.known
            visitor.known = True
            self._strangers.pop(visitor, None)

    def told(self, peer: str) -> None:
        """Log nothing when the connection `peer` ends: the audit log has a line for it already."""
        if visitor := self._by_port.get(_port(peer)):
            visitor.told = True

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        host, port = (writer.get_extra_info("peername") or ("nobody", 0))[:2]
        visitor = _Visitor(f"{host}:{port}", task)
        if len(self._tasks) - self._members >= STRANGERS + CLOSING:
            self._audit.stranger("refused a connection from", visitor.who, "too many others come and go")
            writer.transport.abort()
            return
        self._tasks.add(task)
        if len(self._strangers) >= STRANGERS:
            self._send_away(next(iter(self._strangers)), f"{STRANGERS} others came, and it did not show who it is")
        self._strangers[visitor] = None
        timer = asyncio.get_running_loop().call_later(self._seconds, self._late, visitor)
        try:
            await self._pass_on(visitor, reader, writer)
        except OSError as error:
            visitor.ended = str(error)
        except asyncio.CancelledError:
            pass  # sent away: the task ends here
        finally:
            timer.cancel()
            self._tasks.discard(task)
            self._members -= visitor.known
            self._forget(visitor)
            writer.close()

    async def _pass_on(self, visitor: _Visitor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._inner, limit=_READ_NBYTES)
        port = far_writer.get_extra_info("sockname")[1]
        self._by_port[port] = visitor
        ways = [
            asyncio.create_task(self._one_way(visitor, reader, far_writer)),
            asyncio.create_task(self._one_way(None, far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            del self._by_port[port]
            far_writer.close()

    async def _one_way(
        self, visitor: _Visitor | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_NBYTES):
                if visitor:
                    visitor.nbytes += len(data)
                writer.write(data)
                await writer.drain()

    def _late(self, visitor: _Visitor) -> None:
        if not (visitor.known and self._stays):
            self._send_away(visitor, f"it did not show who it is in {self._seconds:g} s")

    def _send_away(self, visitor: _Visitor, why: str) -> None:
        visitor.ended = why
        visitor.task.cancel()
        self._forget(visitor)  # now: its task may not run for a while

    def _forget(self, visitor: _Visitor) -> None:
        if visitor in self._strangers:
            del self._strangers[visitor]
            only_looked = (
                visitor.ended == _ENDED and not self._stays
            )  # at the authority, as a machine that joins does first
            if not visitor.told and not only_looked:
                why = f"{visitor.ended} ({visitor.nbytes} bytes)"
                self._audit.stranger("refused a connection from", visitor.who, why)


def _port(peer: str) -> int:
    port = peer.rpartition(":")[2]
    return int(port) if port.isdigit() else -1
