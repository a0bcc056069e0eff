"""The hub's service for followers, which only receive: the newest list of published versions, and objects by their SHA-256.

A request is one byte and its argument; the response is a stream of bytes. A member whose name begins with `FOLLOWER` cannot join
a group; every member may fetch.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from thinwire.errors import DataError, PacketError
from thinwire.net.calls import Outdated, explain
from thinwire.net.channels import ANSWER_NBYTES, FOLLOW, dial
from thinwire.net.enrol import ANSWER_SECONDS, Enrolment
from thinwire.net.frames import SAME_RELEASE
from thinwire.net.loop import LoopThread
from thinwire.net.token import Token
from thinwire.net.versions import FOLLOWING, agreed_with_hub, stated

FOLLOWER = "follower-"
LIST, OBJECT = b"L", b"O"
LIST_NBYTES = 64 << 20
_OBJECT = struct.Struct("<32sQ")  # SHA-256 of the object, and the offset at which to begin


class Published(Protocol):
    """The published versions on the hub's machine."""

    def newest(self) -> bytes | None:
        """The newest list. Raises `DataError`."""

    def read(self, digest: str, offset: int) -> Iterator[bytes]:
        """An object from `offset` on. Raises `DataError` if it was deleted."""


async def serve(question: bytes, published: Published) -> AsyncIterator[bytes]:
    """The hub's response. Raises `PacketError` for an invalid request, `DataError` for a deleted object.

    It begins with an empty chunk: gRPC may lose the metadata of a call that ends without a message, and the hub's range with it.
    """
    yield b""
    if question[:1] == LIST and len(question) == 33:
        text = await asyncio.to_thread(published.newest) or b""
        if hashlib.sha256(text).digest() != question[1:]:
            for begin in range(0, len(text), 1 << 20):
                yield text[begin : begin + (1 << 20)]
    elif question[:1] == OBJECT and len(question) == 1 + _OBJECT.size:
        digest, offset = _OBJECT.unpack(question[1:])
        if offset >= 1 << 62:
            raise PacketError(
                f"a follower asks for an object from byte {offset} on; less than 2^62 is needed; {SAME_RELEASE}"
            )
        chunks = published.read(digest.hex(), offset)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk
    else:
        raise PacketError(f"the request of a follower has {len(question)} bytes and cannot be read; {SAME_RELEASE}")


class HubClient:
    """A member that calls its hub, over one connection that is made again with each new certificate. Use it in one thread, and close it.

    Args:
        enrolment: the member's name and key at the hub.
        most_nbytes: of one message that it takes.
    """

    def __init__(self, enrolment: Enrolment, most_nbytes: int) -> None:
        self._enrolment, self._most_nbytes, self._thread = enrolment, most_nbytes, LoopThread.shared()
        self._channel: grpc.aio.Channel | None = None
        self._used: object = None  # the channel's credentials

    def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel:
            self._thread.run(channel.close(None))
        self._thread.release()

    async def _dialled(self) -> grpc.aio.Channel:
        admitted = await self._enrolment.admitted()
        token, own = self._enrolment.token, admitted.credentials
        if self._channel is None or self._used is not own:
            if self._channel:
                await self._channel.close(None)
            self._channel = dial(token.host, token.port, own.authorities, own, self._most_nbytes)
            self._used = own
        return self._channel


class PublishedAtHub(HubClient):
    """The published versions at the hub of `token`. Use it in one thread, and close it.

    Args:
        token: an invitation, best for this one name: thinwire hub invite --name follower-oslo.
        name: the name of this follower; a name that begins with follower- permits nothing else at the hub.
        folder: keeps its key.

    Raises:
        ConfigurationError: the token or the name is not valid.
    """

    def __init__(self, token: str, name: str, folder: Path) -> None:
        super().__init__(Enrolment(Token.read(token), name, folder), ANSWER_NBYTES)
        self._list = b""

    def newest(self) -> bytes | None:
        """The newest list; an unchanged list is not sent again. Raises `LinkError`."""
        text = b"".join(self._answer(LIST + hashlib.sha256(self._list).digest(), LIST_NBYTES))
        self._list = text or self._list
        return self._list or None

    def read(self, digest: str, offset: int) -> Iterator[bytes]:
        """An object from `offset` on. Raises `DataError` if it was deleted, `LinkError` if the connection breaks."""
        return self._answer(OBJECT + _OBJECT.pack(bytes.fromhex(digest), offset), 1 << 62)

    def __enter__(self) -> PublishedAtHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, question: bytes, most: int) -> Iterator[bytes]:
        call, nbytes = self._thread.run(self._asked(question)), 0
        try:
            while (chunk := self._thread.run(_next(call))) is not None:
                nbytes += len(chunk)
                if nbytes > most:
                    raise PacketError(
                        f"the hub sent more than {most} bytes, which are the most for this request; {SAME_RELEASE}"
                    )
                yield chunk
        finally:
            self._thread.loop.call_soon_threadsafe(call.cancel)

    async def _asked(self, question: bytes) -> Any:
        call = (await self._dialled()).unary_stream(FOLLOW)(question, metadata=stated(FOLLOWING))
        try:
            await agreed_with_hub(call, ANSWER_SECONDS, FOLLOWING)
        except (grpc.aio.AioRpcError, Outdated) as error:
            raise self._enrolment.told(error) from None
        except BaseException:
            call.cancel()
            raise
        return call


async def _next(call: Any) -> bytes | None:
    """The next chunk; None at the end. Raises `DataError`, `LinkError`."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            chunk = await call.read()
    except TimeoutError:
        raise DataError(
            f"the hub sent nothing for {ANSWER_SECONDS:g} s; check that it runs, and the link to it"
        ) from None
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise DataError(f"the hub reports: {error.details()}") from None
        raise explain(error) from None
    return None if chunk is grpc.aio.EOF else bytes(chunk)
