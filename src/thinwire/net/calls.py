"""A member's end of gRPC's streams: frames are read and written whole, and all failures become one of three errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from thinwire.errors import LinkError
from thinwire.net import frames

_NOT_NOW = ("certificate has expired", "certificate is not yet valid")  # of gRPC


class Refused(LinkError):
    """The hub refuses this member; another attempt does not help."""


class Broken(LinkError):
    """The connection has ended; a new one continues where it was."""


class Unanswered(Broken):
    """Nothing answers there, or it takes no certificate of this member: behind a proxy, gRPC does not tell these apart."""


class Outdated(Broken):
    """The authority of the certificate is being replaced: get a new certificate and connect again; nothing is lost."""


async def read(stream: Any) -> bytes:
    """The next frame. Raises `Refused`, `Broken`."""
    raw = await stream.read()
    if raw is grpc.aio.EOF:
        code, details = await stream.code(), await stream.details()
        raise _refusal(code, details)
    return bytes(raw)


async def welcomed(stream: Any, version: int, waits: Callable[[tuple[str, ...]], object]) -> tuple[frames.Welcome, int]:
    """The hub's welcome, and the number of frames up to it. Before that, `waits` is called with the names of all who wait, at each change.
    Raises `Refused`, `Broken`, `PacketError`.
    """
    sequence = 0
    while True:
        frame = frames.opened(await read(stream), sequence, (frames.WELCOME, frames.WAITING), version)
        sequence += 1
        if frame.kind == frames.WELCOME:
            return frames.opened_welcome(frame.body), sequence
        waits(frames.opened_names(frame.body))


async def check_open(stream: Any) -> None:
    """Wait until the hub answers or ends the call. Raises `Refused`, `Broken` if it has ended it with an error."""
    if await stream.read() is grpc.aio.EOF and (code := await stream.code()) is not grpc.StatusCode.OK:
        raise _refusal(code, await stream.details())


async def written(stream: Any, frame: bytes) -> None:
    """Write a frame. Raises `Refused`, `Broken`."""
    try:
        await stream.write(frame)
    except asyncio.InvalidStateError:  # the call is over
        raise _refusal(await stream.code(), await stream.details()) from None


def cause(details: str | None) -> str:
    """The last part of gRPC's text about a connection that failed, which names the cause.

    >>> cause("failed to connect; last error: UNKNOWN: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK")
    'certificate has expired; compare the clocks of this machine and of the hub'
    >>> cause("DNS resolution failed: [A: Domain name not found]")
    'Domain name not found'
    >>> cause("failed to connect to all addresses; last error: UNKNOWN: ipv4:192.0.2.7:29531: tcp handshaker shutdown")
    'nothing came back'
    >>> cause("Stream removed (recvmsg:Connection reset by peer (104))")
    'Connection reset by peer'
    """
    text = str(details).removesuffix(": OK").rpartition(": ")[2]
    text = text if "[" in text else text.rstrip("]")  # the end of a list of errors
    text = "nothing came back" if text == "tcp handshaker shutdown" else text  # within gRPC's own 20 s
    if of_system := re.search(r"recvmsg:([^()]*[^() ])", text):
        text = of_system[1]
    clocks = "; compare the clocks of this machine and of the hub" * (text in _NOT_NOW)
    return text + clocks


def explain(error: grpc.aio.AioRpcError) -> LinkError:
    """The error as `Refused` or `Broken`."""
    return _refusal(error.code(), error.details())


def _refusal(code: grpc.StatusCode, details: str | None) -> LinkError:
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return Refused(f"the hub has ended the connection: {details}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Outdated(details)
    if details and code is grpc.StatusCode.UNAVAILABLE:
        return Unanswered(f"the hub does not answer: {cause(details)}")
    return Broken(details or "the hub has ended the connection")
