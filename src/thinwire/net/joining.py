"""The port at which machines join: one request and one answer over TLS, and nothing else.

It is not gRPC, because a machine without any key reaches it: HTTP/2 would let it ask for work without end (pings, settings, resets, headers), which
the bounds on bytes alone do not hold.

    machine → hub   magic, versions, bytes of the request; the request
    hub → machine   magic, versions, verdict, bytes of the answer; the answer, or the reason
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Awaitable, Callable

from thinwire.errors import LinkError
from thinwire.net.audit import AuditLog
from thinwire.net.calls import Refused
from thinwire.net.frames import SAME_RELEASE
from thinwire.net.keys import HUB
from thinwire.net.proxy import Arrived, Bounds, PublicPort
from thinwire.version import JOIN_REQUESTS, Protocols, newest_of_both

REQUEST_NBYTES = 8192  # most bytes of a request
ANSWER_NBYTES = 1 << 20  # most bytes of its answer, with a run file
_MAGIC = b"TWJN"
_ASKED = struct.Struct("<4s64sH")
_ANSWERED = struct.Struct("<4s64sBI")
ADMITTED, REFUSED, NOT_NOW, UNLIKE = range(4)
SPOKEN = str(JOIN_REQUESTS).encode()

Answer = Callable[[bytes, Arrived], Awaitable[tuple[int, bytes]]]


class JoinPort(PublicPort):
    """The port at which machines join. See `PublicPort`.

    Args:
        tls: the server's end of TLS, at each connection.
        answer: the verdict on a request and the answer, or the reason.
    """

    spoken = SPOKEN

    def __init__(
        self, audit: AuditLog, seconds: float, tls: Callable[[], ssl.SSLContext], answer: Answer, bounds: Bounds
    ) -> None:
        super().__init__(audit, seconds, stays=False, bounds=bounds)
        self._tls, self._answer = tls, answer

    async def serve(self, connection: Arrived) -> None:
        """Answer one request."""
        stream = _ServerTls(connection, self._tls())
        await stream.shake_hands()
        head = await stream.read(_ASKED.size)
        if not head:
            return  # it has looked at the certificate
        magic, versions, nbytes = _ASKED.unpack(head)
        if magic != _MAGIC or nbytes > REQUEST_NBYTES:
            connection.reason, connection.aborted = "it sent no request to join", True
            return
        if why := _unlike("the hub speaks", versions, "the machine"):
            self._audit.stranger("refused to admit", connection.address, why)
            connection.logged = True
            verdict, answer = UNLIKE, f"the hub does not admit this machine: {why}".encode()
        else:
            verdict, answer = await self._answer(await stream.read(nbytes), connection)
            if verdict == ADMITTED:
                self._authenticated(connection)
        await stream.write(_ANSWERED.pack(_MAGIC, self.spoken, verdict, len(answer)) + answer)


class _ServerTls:
    """TLS over a connection whose bytes are bounded before TLS sees them."""

    def __init__(self, connection: Arrived, context: ssl.SSLContext) -> None:
        self._connection = connection
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_side=True)

    async def shake_hands(self) -> None:
        """Raises `OSError`, `TooManyBytesError`."""
        while True:
            try:
                self._tls.do_handshake()
                await self._send()
                return
            except ssl.SSLWantReadError:
                await self._send()
                if not await self._receive():
                    raise ConnectionResetError("it ended without authentication") from None
            except ssl.SSLError as error:
                await self._send()  # the alert
                raise OSError(f"TLS failed: {error.reason or error}") from None

    async def read(self, nbytes: int) -> bytes:
        """The next `nbytes`; b"" if it ends before them."""
        data = b""
        while len(data) < nbytes:
            try:
                if not (more := self._tls.read(nbytes - len(data))):
                    return b""
                data += more
            except ssl.SSLWantReadError:
                if not await self._receive():
                    return b""
        return data

    async def write(self, data: bytes) -> None:
        self._tls.write(data)
        await self._send()

    async def _send(self) -> None:
        if data := self._goes.read():
            await self._connection.write(data)

    async def _receive(self) -> bool:
        data = await self._connection.read()
        self._came.write(data)
        return bool(data)


def server_tls() -> ssl.SSLContext:
    """A server's end of TLS, without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no connection comes twice
    return context


async def ask_to_join(
    host: str, port: int, authority: bytes, request: bytes, seconds: float, spoken: bytes = SPOKEN
) -> bytes:
    """The hub's answer to a request to join, from a hub with this authority (PEM), within so many seconds. `spoken` names the versions that this
    machine speaks. Raises `Refused`; `LinkError` if the hub admits nobody now; `OSError`, `EOFError` if it does not answer.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode("ascii"))
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=HUB)
        try:
            writer.write(_ASKED.pack(_MAGIC, spoken, len(request)) + request)
            await writer.drain()
            magic, versions, verdict, nbytes = _ANSWERED.unpack(await reader.readexactly(_ANSWERED.size))
            if magic != _MAGIC or nbytes > ANSWER_NBYTES:
                raise LinkError(f"the hub's answer cannot be read; {SAME_RELEASE}")
            answer = await reader.readexactly(nbytes)
        finally:
            writer.transport.abort()
    if why := _unlike("this machine speaks", versions, "the hub"):
        raise Unlike(why)
    if verdict == UNLIKE:
        raise Unlike(answer.decode(errors="replace"))
    if verdict == REFUSED:
        raise Refused(answer.decode(errors="replace"))
    if verdict == NOT_NOW:
        raise LinkError(f"the hub at {host}:{port} admits nobody now: {answer.decode(errors='replace')}")
    return answer


class Unlike(Refused):
    """The hub and this machine have no version of requests to join in common."""


def _unlike(here: str, versions: bytes, there: str) -> str:
    """Why the sides have no version in common; "" if they have one."""
    theirs = Protocols.parse(versions.rstrip(b"\0").decode("ascii", "replace"))
    if theirs and newest_of_both(JOIN_REQUESTS, theirs):
        return ""
    return (
        f"{here} requests to join {JOIN_REQUESTS}, {there} {theirs or 'states none'}. Install one release on both, or one that speaks a "
        "version of each, and start them again"
    )
