"""Requests of members of elastic runs to the hub, and its responses: JSON, one at a time on a gRPC stream for them alone.

The hub passes them to a `MemberRegistry` (membership/registry.py), which keeps the members and their shared keys.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from concurrent.futures import CancelledError
from typing import Any, Protocol

import grpc
import grpc.aio

from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.net import frames
from thinwire.net.calls import read, written
from thinwire.net.channels import ANSWER_NBYTES, MEET, dial
from thinwire.net.enrol import ANSWER_SECONDS, Enrolment
from thinwire.net.keys import check_name
from thinwire.net.limits import MemberRates
from thinwire.net.loop import LoopThread
from thinwire.net.state import KeptRun
from thinwire.net.versions import agreed_with_hub, stated


class HubRequester:
    """The member that sent a request. Its incarnation is the name of its process."""

    def __init__(self, name: str, process: bytes, address: str) -> None:
        self.name, self.incarnation, self.address = name, process.decode("ascii", "replace"), address

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Wait at most `seconds`; return whether `future` is done. Cancelled when the stream ends."""
        done, _ = await asyncio.wait({future}, timeout=seconds)
        return bool(done)


class RequestHandler(Protocol):
    """Answers the requests."""

    reported: Any  # called with a name, and what this member says of others
    lost: Any  # called with name and incarnation of a member whose heartbeats have stopped

    @property
    def empty(self) -> bool:
        """Whether no replica is alive or expected."""

    def remember(self, kept: KeptRun) -> None:
        """Load the hub's state, and write changes to it."""

    def revoke(self, names: Collection[str]) -> None:
        """Called with the names of all revoked members."""

    def tick(self) -> None:
        """Called regularly."""

    def nobody_comes(self, waiting: Collection[str]) -> bool:
        """Whether processes of this run that wait to form a group wait in vain."""

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Called when all streams of an incarnation of `name` have ended."""

    async def answer(self, requester: HubRequester, said: dict[str, Any]) -> dict[str, Any]:
        """The response. Raises `PacketError` for a request that is not allowed."""


async def serving_requests(
    context: Any, registry: RequestHandler, requester: HubRequester, version: int, rates: MemberRates
) -> None:
    """Run on the hub for each stream of requests. Raises `PacketError`."""
    sequence = 1
    while (raw := await context.read()) is not grpc.aio.EOF:
        await rates.spend(requester.name)
        answer = await registry.answer(requester, _opened(frames.opened(raw, sequence, [frames.ASK], version)))
        await context.write(frames.head(frames.ANSWER, 0, sequence - 1, version) + _packed(answer))
        sequence += 1


def opened_meet(frame: frames.Frame) -> tuple[bytes, str]:
    """The process, and the name of its run. Raises `PacketError`."""
    try:
        run = frame.data(1).rstrip(b"\0").decode("ascii")
        return frame.data(0), check_name(run) if run else ""
    except (UnicodeDecodeError, ConfigurationError):
        raise PacketError(
            "the name of the run is not allowed; 1 to 63 small letters, digits and hyphens are needed"
        ) from None


class _Stream:
    """A stream of requests. `renewals` keeps the certificate fresh, and ends only if the hub refuses that."""

    def __init__(self, channel: grpc.aio.Channel, call: Any, version: int, renewals: asyncio.Task[None]) -> None:
        self._channel, self._call, self._version, self.renewals, self._sequence = channel, call, version, renewals, 1

    async def ask(self, question: bytes) -> dict[str, Any]:
        await written(self._call, frames.head(frames.ASK, 0, self._sequence, self._version) + question)
        frame = frames.opened(await read(self._call), self._sequence - 1, [frames.ANSWER], self._version)
        self._sequence += 1
        return _opened(frame)

    async def close(self) -> None:
        self.renewals.cancel()
        await asyncio.gather(self.renewals, self._channel.close(None), return_exceptions=True)


class HubChannel:
    """A member's end of the stream, over which its certificate is renewed. For one thread at a time, except `close`. After its
    first `LinkError` make a new one.

    Args:
        enrolment: this replica's name and key at the hub.
        process: 16 random letters, new at every start.
        run: name of the run; "" for the run without a name.
        thread: runs gRPC.
        silent: seconds within which a silent connection ends.

    Raises:
        Refused: the hub refuses this replica permanently.
        LinkError: the hub does not answer.
    """

    def __init__(self, enrolment: Enrolment, process: str, run: str, thread: LoopThread, silent: float) -> None:
        self._thread, self._enrolment, self._at, self._silent = thread, enrolment, (process, run), silent
        self._stream: _Stream | None = None
        self._stream = self._done(self._opened(), ANSWER_SECONDS)
        told = self.ask("beat")
        self.heartbeat_timeout, self.begun = float(told["heartbeat_timeout"]), bool(told.get("begun"))

    def ask(self, do: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """The hub's response to a request that may take `seconds`. Raises `LinkError`."""
        question = _packed({"do": do, "seconds": seconds, **fields})
        answer: dict[str, Any] = self._done(self._asked(question), seconds + ANSWER_SECONDS)
        if "error" in answer:
            raise LinkError(f"the hub reports: {str(answer['error'])[:200]}")
        return answer

    def close(self) -> None:
        """Close the stream. Idempotent; thread-safe. A waiting request raises `LinkError`."""
        stream, self._stream = self._stream, None
        if stream:
            self._thread.run(stream.close())

    def _done(self, work: Any, seconds: float) -> Any:
        try:
            return self._thread.run(work, seconds)
        except TimeoutError:
            self.close()
            raise LinkError(f"the hub did not answer within {seconds:g} s") from None
        except (grpc.aio.AioRpcError, LinkError) as error:
            self.close()
            raise self._enrolment.told(error) from None
        except PacketError as error:
            self.close()
            raise LinkError(str(error)) from None
        except CancelledError:
            self.close()
            raise LinkError("the connection to the hub was closed") from None

    async def _opened(self) -> _Stream:
        admitted = await self._enrolment.admitted()
        token, own = self._enrolment.token, admitted.credentials
        channel = dial(token.host, token.port, own.authorities, own, ANSWER_NBYTES, self._silent)
        try:
            call = channel.stream_stream(MEET)(metadata=stated())
            version = await agreed_with_hub(call, self._silent)
            meet = frames.packed(frames.MEET, *(each.encode("ascii") for each in self._at))
            await written(call, frames.head(frames.MEET, 0, 0, version) + meet)
        except BaseException:
            await channel.close(None)
            raise
        return _Stream(channel, call, version, asyncio.create_task(self._renewals(channel)))

    async def _renewals(self, channel: grpc.aio.Channel) -> None:
        while True:
            await self._enrolment.renewed(channel)

    async def _asked(self, question: bytes) -> dict[str, Any]:
        if (stream := self._stream) is None:
            raise LinkError("the connection to the hub is closed")
        if stream.renewals.done():
            await stream.renewals  # raises why
        return await stream.ask(question)


def _packed(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode()


def _opened(frame: frames.Frame) -> dict[str, Any]:
    """Parse the JSON of a frame. Raises `PacketError`."""
    try:
        said = json.loads(frame.body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise PacketError(f"a request or an answer is not a JSON object; {frames.SAME_RELEASE}")
    return said
