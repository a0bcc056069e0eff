"""The hub's end of gRPC's streams: frames are read and written in order; a frame that is not allowed ends the call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from thinwire.comm.secure import frames
from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.calls import Outdated
from thinwire.comm.secure.proxy import TcpProxy
from thinwire.comm.secure.relay import Pipe, flattened
from thinwire.errors import LinkError, PacketError

HELLO_SECONDS = 30.0  # most seconds until an authenticated member sends its first frame

Handle = Callable[[frames.Frame], None]


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
        self._handlers = handlers

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        return self._handlers.get(details.method)


class Refusing:
    """A context in which a `PacketError` or `LinkError` is written to the audit log, and ends the call with its text."""

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
        return isinstance(error, asyncio.TimeoutError)

    def _name(self) -> str:
        names = self._context.auth_context().get("x509_common_name", [])
        return b" ".join(names).decode(errors="replace")

    def _who(self) -> str:
        return f"{self._proxy.remote_address(self._context.peer())} {self._name()}"


def unary(method: Callable[[bytes, Any], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(method)


async def first(context: Any) -> bytes:
    raw = await asyncio.wait_for(context.read(), HELLO_SECONDS)
    if raw is grpc.aio.EOF:
        raise PacketError("a stream that ended before its first frame")
    return bytes(raw)


async def reading(context: Any, handles: dict[int, Handle], version: int) -> None:
    kinds: Sequence[int] = tuple(handles)
    sequence = 1
    while (raw := await context.read()) is not grpc.aio.EOF:
        frame = frames.opened(raw, sequence, kinds, version)
        handles[frame.kind](frame)
        sequence += 1


async def writing(context: Any, pipe: Pipe, version: int) -> None:
    sequence = 0
    while True:
        frame = await pipe.get()
        await context.write(flattened(frame, sequence, version))
        sequence += 1
