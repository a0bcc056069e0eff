"""A member's connection to the hub. It reconnects whenever the connection breaks, and no message is lost.

One channel carries control and small messages, the others carry the chunks of long messages. Each is a separate TCP connection, so
control never waits behind bulk in a socket's buffers. Everything runs in one thread (`LoopThread`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Any

import grpc
import grpc.aio

from thinwire.comm.pacing import connections, pace
from thinwire.comm.sockets import keep_from_children, outcome
from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.net import frames
from thinwire.net.calls import Refused, explain, read, welcomed, written
from thinwire.net.channels import BULK, CONTROL, dial
from thinwire.net.enrol import Enrolment
from thinwire.net.frames import Frame, Welcome
from thinwire.net.messages import InFlight
from thinwire.net.posted import Pull
from thinwire.net.state import REDUCER
from thinwire.net.tasks import run_until_one_ends
from thinwire.net.versions import agreed_with_hub, stated, stating_run
from thinwire.version import PROTOCOLS

CHANNELS = 2  # for bulk
SILENT_SECONDS = 20.0  # see `HubLink`; the default
PAYLOAD = 0.93  # share of the rate for chunks; the rest is for headers (TCP, TLS, HTTP/2), ACKs and control
LATE_SECONDS = 10.0  # after this wait, a packet is sent to the receivers that have requested it, without the others
ANSWERS = 4096  # control frames that wait to be sent, with which a peer that floods this member gets no more answers
CONNECTED = "is connected to the hub"  # the state of a link
_REVOKED = (
    "Another replica takes its place (thinwire docs secure); then start all replicas again from their last checkpoints."
)
_REDUCER_GONE = "Its log is reducer.txt in the hub's folder; start the hub again if the reducer's process has ended."
AWAY_SECONDS = 3.0  # a member, or the hub, that is away for so long is named
_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)  # seconds before the next attempt; a restarted hub waits for `ELASTIC_PATIENCE`


class HubLink:
    """This process's connection to the hub, and the messages in flight over it.

    Args:
        enrolment: this member's name and key.
        label: SHA-256 of the settings that must be the same on all members of a group.
        size: number of members of the group.
        bits_per_second: the highest rate of chunks to the hub; None: no limit.
        advice: what to do when a member is gone, for messages.
        place: ranks are in the order of places; equal places are in the order of names.
        process: 16 bytes that no other process of this name has; random if not given.
        silent: seconds within which this member notices that nothing reaches the hub, although no connection has ended.
        insists: whether it connects again if the connection ends before the group is formed.
        say: called in the loop's thread with each new state until the group is complete, such as "waits for 1 of 3 members; here: bern, oslo".
        run: `frames.run_digest` of a fixed group; "": the hub does not look whether others ask for a group of another size.
    """

    def __init__(
        self, enrolment: Enrolment, label: bytes, size: int, bits_per_second: float | None = None, advice: str = "",
        place: int = 0, process: bytes = b"", silent: float = SILENT_SECONDS, insists: bool = True,
        say: Callable[[str], object] = lambda state: None, run: str = "",
    ) -> None:  # fmt: skip
        self._run, self._advice, self._insists, self._say_state = run, advice, insists, say
        self.enrolment, self._size, self._rate, self._silent = enrolment, size, bits_per_second, silent
        self._hello = frames.packed(
            frames.HELLO, process or os.urandom(16), label, size, place, str(PROTOCOLS).encode()
        )
        self._version = 0  # of the frames of the present connection
        self._place: Welcome | None = None
        self._placed: Future[Welcome] = Future()
        self._task: asyncio.Task[None] | None = None
        self.messages = InFlight(size, self)
        self._why_gone = ""  # about the member because of which others close their groups
        self._control: deque[tuple[int, int, bytes]] = deque()  # kind, rank, body
        self._connections: dict[int, int] = {}  # connections of connected peers, by rank
        self._woken = asyncio.Event()  # set when there may be frames to send
        self._changed = asyncio.Event()  # set when `leave` must look again at what is unfinished
        self._leaving = False
        self._free_at = 0.0  # the time at which the uplink may take the next chunk
        self.state = "is connecting to the hub"
        self.here: tuple[str, ...] = ()  # the members that have joined, until all have
        self.waited = False  # whether the others did not join in time, or the hub ended the wait
        self.uploaded = 0  # bytes of frames sent to the hub
        self.warn: Callable[[str], object] = lambda text: (
            None
        )  # called in the loop's thread when the hub, or a member, has been away for long
        self._watching: asyncio.Task[None] | None = None

    @property
    def rank(self) -> int:
        """The rank in the group, which must be complete."""
        assert self._place
        return self._place.rank

    def present(self, peer: int) -> bool:
        """Whether the hub reports `peer` as connected."""
        return peer in self._connections

    async def begin(self) -> None:
        """Connect, and stay connected until `leave`."""
        self._task = asyncio.create_task(self._serve())
        self._watching = asyncio.create_task(self._watch())

    def place(self, seconds: float) -> Welcome:
        """Wait until all members have joined; return this member's place in the group. Call it from another thread. Raises `LinkError`."""
        try:
            return outcome(self._placed, seconds)
        except TimeoutError:
            self.waited = True
            raise LinkError(
                f"{self.enrolment.name} {self.state}; not all have joined within {seconds:g} s. Start all {self._size}, "
                "with the same run and number of replicas."
            ) from None

    async def _serve(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                await self._connected()
                return  # it has left
            except (Refused, PacketError, ConfigurationError) as error:
                self.waited = self.waited or self._place is None
                self._lose(LinkError(str(error)))
                return
            except LinkError as error:
                self.enrolment.told(error)
                if self._place is None and not self._insists:
                    self._lose(error)
                    return
                self._now(f"is not connected to {self.enrolment.token.where} ({error})")
            finally:
                self._disconnected()
            if self._leaving:
                return
            failures = 0 if time.monotonic() - began > 5.0 else failures + 1
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])

    def wake(self) -> None:
        """Check again for frames to send."""
        self._woken.set()

    async def leave(self, seconds: float) -> None:
        """Wait at most `seconds` until all messages that peers requested have arrived, then leave the group permanently."""
        try:
            async with asyncio.timeout(seconds):
                while self._place and self._going and (self.messages.unfinished or self._control):
                    self._changed.clear()
                    await self._changed.wait()
                if self._place and self._task and self._going:
                    self._leaving = True
                    self._say(frames.LEAVE, 0)
                    await asyncio.wait([self._task])  # the hub ends the streams when it has received this
        except TimeoutError:
            pass
        for task in (self._task, self._watching):
            if task:
                task.cancel()
                await asyncio.wait([task])

    async def _watch(self) -> None:
        """Say once of each outage that the hub, or a member, has been away for `AWAY_SECONDS`: until the group ends for it, nothing else would."""
        since: dict[str, float] = {}
        while self._task and not self._task.done():
            away = self._away()
            since = {name: since.get(name, time.monotonic()) for name in away}  # inf: it was named
            for name, began in since.items():
                if time.monotonic() - began >= AWAY_SECONDS:
                    since[name] = inf
                    self.warn(f"{time.strftime('%H:%M:%S')} {name} {away[name]}")
            await asyncio.sleep(AWAY_SECONDS / 6)

    def _away(self) -> dict[str, str]:
        """Who is without the hub, and what is said of it."""
        if self._place is None or self._leaving:
            return {}
        if self.state != CONNECTED:  # then it does not know of the others
            return {self.enrolment.name: f"{self.state}; it dials again"}
        return {
            name: "is not connected to the hub; after a minute it counts as lost"
            for peer, name in enumerate(self._place.names)
            if peer not in (self.rank, *self._connections, *self.messages.gone)
        }

    @property
    def _going(self) -> bool:
        return self._task is not None and not self._task.done()

    def _lose(self, error: LinkError) -> None:
        """Called when the hub has refused this member permanently."""
        self.state = f"was refused: {error}"
        self.messages.fail(error)
        if not self._placed.done():
            self._placed.set_exception(error)

    # Control messages to peers.

    def pull(self, peer: int, pull: Pull) -> None:
        """See `Teller`."""
        self._say_to(frames.PULL, peer, *pull)

    def acknowledge(self, peer: int, receive: int, nbytes: int) -> None:
        """See `Teller`."""
        self._say_to(frames.ACK, peer, receive, nbytes)

    def refuse(self, peer: int, receive: int, nbytes: int) -> None:
        """See `Teller`."""
        self._say_to(frames.REFUSE, peer, receive, nbytes)

    def _say_to(self, kind: int, peer: int, *fields: int | bytes) -> None:
        """Send a control frame, if the peer is connected; otherwise it is sent when the peer is back."""
        flooded = kind == frames.REFUSE and len(self._control) >= ANSWERS
        if peer in self._connections and not flooded:
            self._say(kind, peer, *fields)

    def _say(self, kind: int, peer: int, *fields: int | bytes) -> None:
        self._control.append((kind, peer, frames.packed(kind, *fields)))
        self.wake()

    # One connection.

    async def _connected(self) -> None:
        """One connection, from dialling to its end. Raises `LinkError`; returns after `leave`."""
        admitted = await self.enrolment.admitted()
        token, own = self.enrolment.token, admitted.credentials
        of_hub = token.host, token.port, own.authorities, own
        # The control connection detects silence for all, because no bulk is queued before its pings.
        channels = [dial(*of_hub, silent=self._silent), *(dial(*of_hub) for _ in range(CHANNELS))]
        renewals: asyncio.Task[None] | None = None
        try:
            control = channels[0].stream_stream(CONTROL)(metadata=stating_run(self._run))
            self._version = await agreed_with_hub(control, self._silent)
            renewals = asyncio.create_task(self._renewals(channels[0]))
            welcome, sequence = await self._greeted(control)
            before = connections(token.port)
            bulk = [channel.stream_stream(BULK)(metadata=stated()) for channel in channels[1:]]
            for stream in bulk:  # before the hub has identified the connection, it takes few bytes of it
                await agreed_with_hub(stream, self._silent)
                attach = frames.packed(frames.ATTACH, welcome.connection)
                await written(stream, frames.head(frames.ATTACH, 0, 0, self._version) + attach)
            for connection in connections(token.port) - before:
                pace({connection}, self._rate)  # each to the whole rate, because chunks leave one after the other
            keep_from_children(connections(token.port))
            await self._carry(control, sequence, bulk, renewals)
        except grpc.aio.AioRpcError as error:
            raise explain(error) from None
        finally:
            if renewals:
                renewals.cancel()
                await asyncio.gather(renewals, return_exceptions=True)
            for channel in channels:
                await channel.close(None)

    def _hear_who_waits(self, here: tuple[str, ...]) -> None:
        self.here, missing = here, self._size - len(here)
        what = f"{missing} of {self._size} members" if missing else "the hub, whose disk has no room for the group"
        self._now(f"waits for {what}; here: {', '.join(here)}")

    def _now(self, state: str) -> None:
        if self._place is None and state != self.state:
            self._say_state(state)
        self.state = state

    async def _greeted(self, control: Any) -> tuple[Welcome, int]:
        await written(control, frames.head(frames.HELLO, 0, 0, self._version) + self._hello)
        self.state = f"waits for the group: {self._size} members are needed"
        welcome, sequence = await welcomed(control, self._version, self._hear_who_waits)
        if len(welcome.names) != self._size:
            raise Refused(
                f"the hub has a group of {len(welcome.names)} members; {self._size} were expected; give all the same number of replicas"
            )
        if self._place is not None and (welcome.group, welcome.rank) != (self._place.group, self._place.rank):
            again = "; start all replicas again from their last checkpoints" * self._insists
            raise Refused(f"the hub does not know this group: it was started from an older copy of its folder{again}")
        self._place, self.state = welcome, CONNECTED
        for rank, connection in welcome.present:
            self._there(rank, connection)
        if not self._placed.done():
            self._placed.set_result(welcome)
        return welcome, sequence

    async def _renewals(self, channel: grpc.aio.Channel) -> None:
        while True:
            await self.enrolment.renewed(channel)

    async def _carry(self, control: Any, sequence: int, bulk: list[Any], renewals: asyncio.Task[None]) -> None:
        """Carry frames both ways until a stream ends."""
        reads = [*(self._hear(stream, 0) for stream in bulk), self._hear(control, sequence)]
        writes = self._speak([control], True), self._speak(bulk, False)
        for error in await run_until_one_ends(*reads, *writes, _ended(renewals)):
            if not (self._leaving and isinstance(error, LinkError)):
                raise error

    def _disconnected(self) -> None:
        self._connections.clear()
        self._control.clear()
        self.messages.away.update(range(self._size))
        self._changed.set()

    def _there(self, rank: int, connection: int) -> None:
        """Tell a newly connected peer which messages this member waits for."""
        self._connections[rank] = connection
        pulls = self.messages.open_pulls(rank)
        self._say(frames.SYNC, rank, connection, len(pulls))
        for pull in pulls:
            self.pull(rank, pull)

    async def _hear(self, stream: Any, sequence: int) -> None:
        control = sequence > 0  # its first frame was the welcome
        kinds = (*frames.PASSED_ON, frames.BACK, frames.AWAY, frames.GONE, frames.DATA) if control else (frames.DATA,)
        while True:
            frame = frames.opened(await read(stream), sequence, kinds, self._version)
            if not 0 <= frame.rank < self._size:
                raise PacketError(
                    f"a frame came from member {frame.rank}, and the group has members 0 to {self._size - 1}; {frames.SAME_RELEASE}"
                )
            self._heard(frame)
            self._changed.set()
            sequence += 1
            self.wake()

    def _heard(self, frame: Frame) -> None:
        messages, peer, number = self.messages, frame.rank, frame.number
        if frame.kind == frames.DATA:
            receive, offset, chunk = frames.opened_passed(frame.body)
            messages.data(peer, receive, offset, chunk)
        elif frame.kind == frames.PULL:
            messages.pull(peer, Pull(*map(number, range(4))))
        elif frame.kind == frames.ACK:
            messages.acknowledged(peer, number(0), number(1))
        elif frame.kind == frames.REFUSE:
            messages.refused(peer, number(0), number(1))
        elif frame.kind == frames.SYNC:
            messages.sync(peer, number(1))
        elif frame.kind == frames.BACK:
            self._there(peer, number(0))
        elif frame.kind == frames.AWAY:
            self._connections.pop(peer, None)
            messages.away.add(peer)
        else:  # GONE
            self._connections.pop(peer, None)
            messages.leave(peer, self._gone(peer, number(0)))

    def _gone(self, peer: int, reason: int) -> LinkError:
        """The error of messages to and from a member that is gone. One that closes its group after another is gone does so because of that."""
        why = frames.REASONS.get(reason, "is gone")
        if reason == frames.REVOKED and self._advice:
            self._advice = _REVOKED
        if not self._why_gone or reason != frames.LEFT:
            what = f"replica {peer} ({self._name(peer)}) {why}."
            if self._name(peer) == REDUCER:
                what = f"the hub's reducer {why}. {_REDUCER_GONE}"
            self._why_gone = f"{what} {self._advice}".strip()
        error = LinkError(self._why_gone)
        error.peer, error.advice = peer, self._advice
        return error

    def _name(self, peer: int) -> str:
        return self._place.names[peer] if self._place else str(peer)

    async def _speak(self, streams: list[Any], small: bool) -> None:
        """Write the control frames and `small` messages to one stream, or the chunks of long messages round robin to several. A task for
        each, so that control waits neither for the pause after a chunk nor until gRPC has taken it.
        """
        sequences, turn = [1] * len(streams), 0
        late_at: float | None = None
        while True:
            while small and self._control:
                kind, rank, body = self._control.popleft()
                await self._written(streams[0], frames.head(kind, rank, sequences[0], self._version) + body)
                sequences[0] += 1
            late = late_at is not None and time.monotonic() >= late_at
            chunk = self.messages.chunk(small, late)
            if chunk is None:
                late_at = (late_at or time.monotonic() + LATE_SECONDS) if self.messages.waiting_for_late else None
                await self._sleep(None if late_at is None or late else late_at - time.monotonic())
                continue
            body = frames.packed_data(chunk.offset, chunk.receivers, chunk.data)  # a copy: its poster may get it back
            if not small:
                await self._paced(len(chunk.data))
            turn = (turn + 1) % len(streams)
            head = frames.head(frames.DATA, 0, sequences[turn], self._version)
            await self._written(streams[turn], head + body)
            sequences[turn] += 1

    async def _sleep(self, seconds: float | None) -> None:
        """Wait for `wake`, at most `seconds`."""
        self._woken.clear()
        self._changed.set()
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _paced(self, nbytes: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        begin = max(now, self._free_at)
        self._free_at = begin + 8 * nbytes / (PAYLOAD * self._rate)
        if begin > now:
            await asyncio.sleep(begin - now)

    async def spare(self, nbytes: int) -> None:
        """See `upload.SpareLink`: wait until every message that others requested has arrived."""
        while self._going and self.messages.unfinished:
            self._changed.clear()
            await self._changed.wait()
        await self._paced(nbytes)

    async def _written(self, stream: Any, frame: bytes) -> None:
        await written(stream, frame)
        self.uploaded += len(frame)


async def _ended(task: asyncio.Task[None]) -> None:
    await task
