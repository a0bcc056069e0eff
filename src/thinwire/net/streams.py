"""The hub's end of gRPC's streams: frames are read and written in order; a frame that is not allowed ends the call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from thinwire.errors import LinkError, PacketError
from thinwire.net import frames
from thinwire.net.audit import AuditLog
from thinwire.net.calls import Outdated
from thinwire.net.limits import MemberRates
from thinwire.net.proxy import TcpProxy
from thinwire.net.relay import Pipe, flatten

STREAMS_OF_ALL = 1024  # open at a time
STREAMS_OF_MEMBER = 128  # of these; a member needs a few, and more for a while after its link was cut
_LONG_NBYTES = frames.CHUNK_NBYTES // 2
# A PULL asks for a message, or its refusal. A message is acknowledged, and its buffer asks for the next.
_ANSWERS = {frames.PULL: 1, frames.DATA: 3, frames.BACK: 8}
HELLO_SECONDS = 30.0  # most seconds until an authenticated member sends its first frame

Handle = Callable[[frames.Frame], None]
Serve = Callable[[Any, Any], Awaitable[None]]  # a stream's first request or iterator, and its context


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


class Refusing:
    """A context in which a `PacketError`, `LinkError`, or error of the hub's disk is written to the audit log, and ends the call with its text."""

    def __init__(self, audit: AuditLog, context: Any, proxy: TcpProxy) -> None:
        self._audit, self._context, self._proxy = audit, context, proxy

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, PacketError | LinkError):
            self._proxy.logged(self._context.peer())
        if isinstance(error, PacketError):
            self._audit.stranger("refused frames of", self._who(), error)
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{self._name()}: {error}")
        if isinstance(error, Outdated):
            await self._context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if isinstance(error, LinkError):
            self._audit.stranger("refused", self._who(), error)
            await self._context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if isinstance(error, sqlite3.Error):  # no refusal: it is served when there is room
            self._audit.stranger("cannot serve", self._who(), f"{error}; make room on its disk")
            told = f"the hub cannot write its state ({error}); make room on its disk"
            await self._context.abort(grpc.StatusCode.ABORTED, told)
        return isinstance(error, asyncio.TimeoutError)

    def _name(self) -> str:
        names = self._context.auth_context().get("x509_common_name", [])
        return b" ".join(names).decode(errors="replace")

    def _who(self) -> str:
        return f"{self._proxy.remote_address(self._context.peer())} {self._name()}"


class Counted:
    """A context that tells the proxy of each message, so that its bytes count as such."""

    def __init__(self, context: Any, proxy: TcpProxy) -> None:
        self._context, self._proxy = context, proxy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        if (raw := await self._context.read()) is not grpc.aio.EOF:
            self._proxy.message(self._context.peer(), len(raw))
        return raw


class Bounded:
    """Serves at most `STREAMS_OF_MEMBER` streams of one member at a time, so that it cannot take those of the others."""

    def __init__(self, audit: AuditLog, proxy: TcpProxy) -> None:
        self._audit, self._proxy, self._open = audit, proxy, Counter[str]()

    def __call__(self, serve: Serve) -> Serve:
        async def some(given: Any, context: Any) -> None:
            (name,) = context.auth_context().get("x509_common_name", [b""])  # TLS has checked the certificate
            who = name.decode(errors="replace")
            if self._open[who] >= STREAMS_OF_MEMBER:
                why = f"{who} has {STREAMS_OF_MEMBER} open streams, and a member may have no more"
                self._audit.stranger("refused", who, why)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            self._open[who] += 1
            try:
                await serve(given, Counted(context, self._proxy))
            finally:
                self._open[who] -= 1

        return some


async def first(context: Any) -> bytes:
    async with asyncio.timeout(HELLO_SECONDS):
        raw = await context.read()
    if raw is grpc.aio.EOF:
        raise PacketError("the stream ended before its first frame")
    return bytes(raw)


async def reading(context: Any, handles: dict[int, Handle], version: int, rates: MemberRates, name: str) -> None:
    """Read the frames of the member `name`, not faster than it may send them."""
    kinds: Sequence[int] = tuple(handles)
    sequence = 1
    while (raw := await context.read()) is not grpc.aio.EOF:
        frame = frames.opened(raw, sequence, kinds, version)
        if frame.kind != frames.DATA or len(frame.body) < _LONG_NBYTES:
            await rates.spend(name)
        handles[frame.kind](frame)
        sequence += 1


async def writing(context: Any, pipe: Pipe, version: int, rates: MemberRates, name: str) -> None:
    """Write the frames in `pipe` to the member `name`, and let it answer those that ask for an answer."""
    sequence = 0
    while True:
        frame = await pipe.get()
        if answers := _ANSWERS.get(frame.kind):
            rates.earn(name, answers)
        await context.write(flatten(frame, sequence, version))
        sequence += 1
