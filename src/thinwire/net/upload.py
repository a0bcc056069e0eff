"""Versions that a publisher sends to the hub, which serves them to followers.

The publisher offers the list of a version: its SHA-256 and its size. The hub answers with what it lacks, chunk by chunk: an object's SHA-256,
the list's first, and an offset. The publisher sends that chunk, and nothing unasked. So a cut upload continues where it was, the hub
holds one chunk, and one chunk at most stands before a round in the publisher's uplink. The hub ends with the list's SHA-256, when
followers get that version.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from thinwire.errors import DataError, LinkError, PacketError
from thinwire.net.audit import AuditLog
from thinwire.net.calls import Broken, Outdated, Refused, read, written
from thinwire.net.channels import PUBLISH
from thinwire.net.enrol import ANSWER_SECONDS, Enrolment
from thinwire.net.fetch import HubClient, Published
from thinwire.net.frames import CHUNK_NBYTES, LIMIT_NBYTES, SAME_RELEASE
from thinwire.net.streams import first
from thinwire.net.versions import PUBLISHING, agreed_with_hub, agreed_with_member, stated

PAUSE_SECONDS = 1.0  # between two versions of one publisher: a flood of lists takes little of the hub's time
SILENT_SECONDS = (
    300.0  # most seconds until a chunk, which waits for the publisher's rounds, or until the hub asks for the next
)
_LOOK_SECONDS = 0.2
_OFFER = struct.Struct("<32sQ")  # the list's SHA-256 and its bytes
_WANT = struct.Struct("<32sQ")  # SHA-256 of an object, and the offset of the chunk

T = TypeVar("T")


class Upload(Protocol):
    """A version on its way to the hub. Its methods are called one at a time."""

    def wanted(self) -> tuple[str, int] | None:
        """The SHA-256 and the offset of the next chunk; None when followers get the version. Raises `PacketError`, `DataError`, `OSError`."""

    def write(self, chunk: bytes) -> None:
        """Take the chunk. Raises `PacketError`, `DataError`, `OSError`."""


class Publishers(Published, Protocol):
    """The members that may publish, and their versions."""

    def takes(self, name: str) -> bool:
        """Whether this member may publish."""

    def forbid(self, names: Collection[str]) -> None:
        """Take no more versions from these members, and serve none of theirs."""

    def begin(self, name: str, digest: str, nbytes: int) -> Upload:
        """Begin a version, whose list has this SHA-256 and size. Another upload of that member ends. Raises `PacketError`."""


class SpareLink(Protocol):
    """A member's connection for rounds."""

    async def spare(self, nbytes: int) -> None:
        """Wait until the uplink, which rounds do not need now, may take so many bytes."""


class Uploads:
    """The hub's end. All of its work on the disk is done by one thread, in order, also after a call has ended.

    Args:
        publishers: None: nobody may publish.
        audit: the hub's.
    """

    def __init__(self, publishers: Publishers | None, audit: AuditLog) -> None:
        self._publishers, self._audit = publishers, audit
        self._disk = ThreadPoolExecutor(1, "thinwire-uploads")
        self._free_at: dict[str, float] = {}  # the time from which a publisher may send its next version

    def close(self) -> None:
        """End the thread."""
        self._disk.shutdown()

    async def take(self, context: Any, identify: Callable[[], tuple[str, float]]) -> None:
        """Take one version. `identify` returns the caller's name and the end of its certificate. Raises `LinkError`, `PacketError`."""
        name, _ = identify()
        if self._publishers is None or not self._publishers.takes(name):
            raise LinkError(
                f"{name} is no publisher of this hub, whose owner names them: thinwire hub --publishers {name}"
            )
        await agreed_with_member(context, PUBLISHING)
        offer = await first(context)
        if len(offer) != _OFFER.size:
            raise PacketError(
                f"the offer of a version has {len(offer)} bytes, {_OFFER.size} are needed; {SAME_RELEASE}"
            )
        digest, nbytes = _OFFER.unpack(offer)
        at = max(time.monotonic(), self._free_at.get(name, 0.0))
        self._free_at[name] = at + PAUSE_SECONDS
        await asyncio.sleep(at - time.monotonic())
        try:
            upload = await self._on_disk(self._publishers.begin, name, digest.hex(), nbytes)
            while (want := await self._on_disk(upload.wanted)) is not None:
                await context.write(_WANT.pack(bytes.fromhex(want[0]), want[1]))
                async with asyncio.timeout(SILENT_SECONDS):
                    chunk = await context.read()
                if chunk is grpc.aio.EOF:
                    return
                if identify()[1] < time.time():
                    raise Outdated("the certificate of this publisher has expired")
                await self._on_disk(upload.write, bytes(chunk))
        except (DataError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            self._audit.stranger("did not take a version of", name, error)
            await context.abort(grpc.StatusCode.ABORTED, f"the hub did not take the version: {error}")
        await context.write(digest)

    async def _on_disk(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *given)


class HubUploader(HubClient):
    """A publisher's end, which sends versions to its hub in the pauses of its rounds. Use it in one thread, and close it.

    Args:
        enrolment: the replica's name and key at the hub.
        link: its present connection for rounds; None: it has none now.
    """

    def __init__(self, enrolment: Enrolment, link: Callable[[], SpareLink | None]) -> None:
        super().__init__(enrolment, LIMIT_NBYTES)
        self._link = link
        self.state = "has sent no version"

    def send(self, folder: Path, over: Callable[[], bool]) -> bool:
        """Send the version in `folder`. Returns whether followers get it now; if not, the link was cut, which `state` describes, or it was
        `over`. Raises `LinkError` if the hub refuses it.
        """
        sending = asyncio.run_coroutine_threadsafe(self._sent(folder), self._thread.loop)
        while not wait([sending], _LOOK_SECONDS).done:
            if over():
                sending.cancel()
                return False
        error = sending.exception()
        if isinstance(error, LinkError) and not isinstance(error, Refused):
            self.state = str(error)
            return False
        if error:
            raise error
        return True

    async def _sent(self, folder: Path) -> None:
        listed = (folder / "list.json").read_bytes()
        digest = hashlib.sha256(listed).digest()
        call = None
        try:
            call = (await self._dialled()).stream_stream(PUBLISH)(metadata=stated(PUBLISHING))
            await agreed_with_hub(call, ANSWER_SECONDS, PUBLISHING)
            await written(call, _OFFER.pack(digest, len(listed)))
            while (want := await _read(call)) != digest:
                chunk = _chunk(folder, digest, listed, want)
                if link := self._link():
                    await link.spare(len(chunk))
                await written(call, chunk)
        except (grpc.aio.AioRpcError, Outdated) as error:
            raise self._enrolment.told(error) from None
        finally:
            if call:
                call.cancel()


async def _read(call: Any) -> bytes:
    try:
        async with asyncio.timeout(SILENT_SECONDS):
            return await read(call)
    except TimeoutError:
        raise Broken(f"the hub sent nothing for {SILENT_SECONDS:g} s") from None


def _chunk(folder: Path, digest: bytes, listed: bytes, want: bytes) -> bytes:
    """The chunk that the hub asks for. Raises `Refused`."""
    if len(want) != _WANT.size:
        raise Refused(f"the hub's request for a chunk has {len(want)} bytes; {SAME_RELEASE}")
    of, offset = _WANT.unpack(want)
    if of == digest:
        return listed[offset : offset + CHUNK_NBYTES]
    try:
        with (folder / "objects" / of.hex()).open("rb") as file:
            file.seek(offset)
            return bytes(file.read(CHUNK_NBYTES))
    except (OSError, ValueError) as error:
        raise Refused(f"the hub asks for an object of this version that cannot be read ({error})") from None
