"""Straight streams between members that reach each other. Control, membership and small messages stay at the hub.

A member that listens tells the others its address over the hub, and they dial it. Each stream has mutual TLS by the hub's authority,
and both ends check that the other is the member of their group with that name, and is connected to the hub now. The chunks on it are those that
the hub would forward, with the same requests and acknowledgements, which go over the hub. So a stream that ends in the middle of a
message costs only what was not acknowledged: that is sent again by the hub, and the receiver ignores chunks that it has.

A member that dials begins with one more stream, which carries no chunk (heartbeats.py). When it ends, because nothing comes from the other end or
for any reason, both ends end the others that were dialled with it.

A message takes straight streams if the closed forms with the announced measurements say so (star_or_mesh.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol

import grpc
import grpc.aio

from thinwire.comm.pacing import connections, pace
from thinwire.errors import LinkError, PacketError
from thinwire.net import frames, measuring
from thinwire.net.audit import AuditLog
from thinwire.net.calls import Broken, explain, read, written
from thinwire.net.channels import LIVE, STRAIGHT, dial
from thinwire.net.enrol import ANSWER_SECONDS, Enrolment
from thinwire.net.frames import Frame, Welcome
from thinwire.net.heartbeats import live
from thinwire.net.keys import Credentials, member_dns
from thinwire.net.limits import TokenBucket
from thinwire.net.listening import Greeted, Listen, MemberServer, dialable
from thinwire.net.measuring import Measuring, Says
from thinwire.net.posted import Posted
from thinwire.net.star_or_mesh import Measured, explained_choice
from thinwire.net.tasks import run_until_one_ends
from thinwire.net.versions import agreed_with_hub, stated

STREAMS = 2  # to each peer that listens
ACCEPTED = 8  # most streams from one peer
DIALS_AT_ONCE, DIALS_PER_SECOND = 8, 0.1  # to the addresses that one peer names, however often it names another
_PAUSES = (0.1, 0.5, 2.0, 10.0, 30.0)  # seconds before the next attempt to dial


class HubConnection(Says, Protocol):
    """What `Straight` needs of the member's connection to the hub."""

    rate: float | None

    @property
    def welcome(self) -> Welcome | None: ...

    def present(self, peer: int) -> bool: ...

    async def sleep(self, seconds: float | None) -> None: ...

    async def paced(self, nbytes: int) -> None: ...


class PeerStreams:
    """Streams that were dialled together: they end with `end`, and each frame of the peer sets `heard`."""

    def __init__(self) -> None:
        self.end, self.heard = asyncio.Event(), asyncio.Event()


class Path:
    """One straight stream, whichever side has dialled."""

    def __init__(self, greeted: Greeted, kept: PeerStreams) -> None:
        self.peer, self.version, self.read, self.write = greeted.peer, greeted.version, greeted.read, greeted.write
        self.said: deque[tuple[int, int]] = deque(maxlen=16)  # PING or PONG, and its number
        self.kept = kept


class Straight:
    """The straight streams of one member.

    Args:
        link: the connection to the hub.
        enrolment: this member's name and key.
        listen: where it listens; None: it opens no port, and dials those that do.
        silent: seconds within which both ends notice that nothing reaches the other, although no connection has ended.
    """

    def __init__(self, link: HubConnection, enrolment: Enrolment, listen: Listen | None, silent: float) -> None:
        self._link, self._enrolment, self._silent = link, enrolment, silent
        self._log: AuditLog | None = None
        carry = {STRAIGHT: self._accepted, LIVE: self._keep}
        self._server = MemberServer(listen, self.audit, self._admit, carry) if listen else None
        self._paths: dict[int, list[Path]] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._allowed: dict[int, TokenBucket] = {}  # dials, by peer: it may come back with another address each time
        self._kept: dict[int, PeerStreams] = {}  # by peer: the streams that it has dialled
        self._measuring = Measuring(link, self._chosen)
        self._found: tuple[Measured, int] | None = None  # as announced, and the number of measured pairs
        self._largest = 0, 0  # bytes and receivers of the largest message so far
        self.nbytes = 0  # sent straight, with the headers of frames
        self._reached: set[int] = set()  # peers to which a straight stream stood
        self._why: dict[int, str] = {}  # why a peer cannot be reached
        link.messages.straight = self.peers

    @property
    def audit(self) -> AuditLog:
        """This member's audit log, made at its first use."""
        if self._log is None:
            self._log = AuditLog(self._enrolment.folder / "audit.txt")
        return self._log

    async def begin(self, own: Credentials) -> None:
        """Listen, if this member does. Raises `ConfigurationError` if the port is taken."""
        if self._server:
            await self._server.begin(own)

    async def close(self) -> None:
        """End everything."""
        self.cut()
        await self._measuring.close()
        if self._server:
            await self._server.close()

    def peers(self, message: Posted) -> Collection[int]:
        """The peers to which this message goes straight."""
        if message.tag == measuring.STRAIGHT:
            return self._paths.keys()
        if not self._found or message.tag == measuring.BY_HUB:
            return ()
        self._largest = max(self._largest, (message.nbytes, message.receivers))
        return self._paths.keys() if self._found[0].straight(message.nbytes, message.receivers) else ()

    def describe(self) -> str:
        """Text on the straight streams, the choice, and its reason."""
        welcome = self._link.welcome
        if welcome is None:
            return ""
        there = ", ".join(welcome.names[peer] for peer in sorted(self._reached.copy()))
        told = "no straight streams: all packets go by the hub"
        if there:
            told = f"straight streams to {there}: {self.nbytes / 1e6:.3g} MB sent, measurements included"
        told += "".join(f"; {welcome.names[peer]}: {why}" for peer, why in sorted(self._why.copy().items()))
        return f"{told}. Chosen: {self._reason(*self._found)}" if self._found else told

    # What the hub reports.

    def there(self, peer: int) -> None:
        """Called when `peer` has connected to the hub."""
        if self._server:
            host, port = self._server.public
            self._link.say_to(frames.LISTENS, peer, port, host.encode())
        self._measuring.there(peer)

    def away(self, peer: int, why: str = "") -> None:
        """Called when `peer` has no connection to the hub any more: its streams end. `why`: it will not come back."""
        if task := self._dials.pop(peer, None):
            task.cancel()
        if why:
            self._measuring.gone(peer)
        if kept := self._kept.get(peer):
            kept.end.set()
        for path in self._paths.get(peer, []):
            path.kept.end.set()
        if why and self._paths.get(peer) and (welcome := self._link.welcome):
            self.audit("ended the straight streams of", welcome.names[peer], why)

    def cut(self) -> None:
        """End all streams: nothing tells this member who is in the group."""
        for peer in {*self._dials, *self._paths, *self._kept}:
            self.away(peer)

    def heard(self, frame: Frame) -> None:
        """A frame of another member, which may be anything: what is not possible is ignored."""
        try:
            if frame.kind == frames.LISTENS:
                self._listens(frame.rank, frame.data(1), frame.number(0))
            elif frame.kind == frames.PING:
                self._link.say_to(frames.PONG, frame.rank, frame.number(0))
            elif frame.kind == frames.PONG:
                self._measuring.pong(frame.number(0))
            else:
                self._measuring.heard(frame)
        except PacketError as error:
            self._why[frame.rank] = str(error)

    def _reason(self, found: Measured, pairs: int) -> str:
        nbytes, receivers = self._largest
        return explained_choice(found, pairs, nbytes or 1_000_000, receivers or len(self._link.messages.peers) - 1)

    def _chosen(self, found: Measured, pairs: int) -> None:
        self._found = found, pairs
        self.audit("chose", self._enrolment.name, self._reason(found, pairs))
        self._link.wake()

    # Streams.

    def _admit(self, name: str, method: str) -> tuple[int, int, int]:
        """See `MemberServer`."""
        welcome = self._link.welcome
        if welcome is None or name not in welcome.names or (peer := welcome.names.index(name)) == welcome.rank:
            raise LinkError(f"{name} is not in this member's group")
        if not self._link.present(peer):
            raise LinkError(f"{name} is not connected to the hub")
        if len(self._paths.get(peer, ())) >= ACCEPTED + STREAMS:
            raise LinkError(f"{name} has {ACCEPTED} streams already")
        if method == STRAIGHT and peer not in self._kept:
            raise LinkError(f"{name} has no stream that shows whether it is reached; it must dial that first")
        return peer, welcome.group, welcome.rank

    def _listens(self, peer: int, padded: bytes, port: int) -> None:
        host = padded.rstrip(b"\0").decode("ascii", "replace")
        if not dialable(host, port):
            raise PacketError("it sent an address that cannot be dialled; give it a public host with --address")
        known = self._dials.get(peer)  # a member keeps its address while it is connected
        if self._link.present(peer) and (known is None or known.done()):
            self._dials[peer] = asyncio.create_task(self._dial(peer, host, port))

    async def _dial(self, peer: int, host: str, port: int) -> None:
        """Keep streams to `peer`."""
        failures = 0
        allowed = self._allowed.setdefault(peer, TokenBucket(DIALS_PER_SECOND, DIALS_AT_ONCE))
        while True:
            while seconds := allowed.take(1):
                await asyncio.sleep(seconds)
            kept, stood = PeerStreams(), asyncio.Event()
            try:
                async with self._dialled(peer, host, port, LIVE) as greeted:
                    beats = live(greeted, self._link.rank, self._silent, kept.heard)
                    streams = [self._bulk(peer, host, port, kept, stood) for _ in range(STREAMS)]
                    for error in await run_until_one_ends(beats, *streams):
                        raise error
            except (LinkError, PacketError) as error:
                self._why[peer] = f"{host}:{port} cannot be used ({str(error).replace('the hub', 'it')})"
            failures = 0 if stood.is_set() else failures
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            failures += 1

    async def _bulk(self, peer: int, host: str, port: int, kept: PeerStreams, stood: asyncio.Event) -> None:
        """One stream that carries chunks, dialled when the peer is heard, to its end. Raises `LinkError`, `PacketError`."""
        await kept.heard.wait()
        before = connections(port) if self._link.rate else set()
        async with self._dialled(peer, host, port, STRAIGHT) as greeted:
            if self._link.rate:
                for connection in connections(port) - before:
                    pace({connection}, self._link.rate)
            self._why.pop(peer, None)
            stood.set()
            await self._carry(Path(greeted, kept))

    @asynccontextmanager
    async def _dialled(self, peer: int, host: str, port: int, method: str) -> AsyncIterator[Greeted]:
        """A context with a stream to `peer` over a connection of its own. Raises `LinkError`, `PacketError`."""
        welcome, own = self._link.welcome, (await self._enrolment.admitted()).credentials
        assert welcome
        dns = member_dns(welcome.names[peer])
        channel = dial(host, port, own.authorities, own, silent=inf, dns=dns)
        try:
            stream = channel.stream_stream(method)(metadata=stated())
            version = await agreed_with_hub(stream, ANSWER_SECONDS)
            greeting = frames.packed(frames.GREET, welcome.group)
            await written(stream, frames.head(frames.GREET, welcome.rank, 0, version) + greeting)
            async with asyncio.timeout(ANSWER_SECONDS):
                frame = frames.opened(await read(stream), 0, [frames.GREET], version)
            if (frame.rank, frame.number(0)) != (peer, welcome.group):
                raise PacketError("another member answers there, or one of another group")
            yield Greeted(peer, version, lambda: read(stream), lambda raw: written(stream, raw))
        except grpc.aio.AioRpcError as error:
            raise explain(error) from None
        except TimeoutError:
            raise Broken(f"it did not answer within {ANSWER_SECONDS:g} s") from None
        finally:
            await channel.close(None)

    async def _keep(self, greeted: Greeted) -> None:
        """Serve the stream without chunks of a peer that dials. Its other streams end with it. Raises `LinkError`, `PacketError`."""
        peer, kept = greeted.peer, PeerStreams()
        if not self._link.present(peer):
            return
        if former := self._kept.get(peer):
            former.end.set()  # it dials again, so its former streams have ended there
        self._kept[peer] = kept
        beats = live(greeted, self._link.rank, self._silent, kept.heard)
        try:
            for error in await run_until_one_ends(beats, kept.end.wait()):
                raise error
        finally:
            kept.end.set()
            if self._kept.get(peer) is kept:
                del self._kept[peer]

    async def _accepted(self, greeted: Greeted) -> None:
        """Serve a stream that carries chunks, dialled by a peer. Raises `LinkError`, `PacketError`."""
        if kept := self._kept.get(greeted.peer):
            await self._carry(Path(greeted, kept))

    async def _carry(self, path: Path) -> None:
        """Carry chunks both ways until the stream ends. Raises `LinkError`, `PacketError`."""
        peer = path.peer
        if not self._link.present(peer):
            return
        self._paths.setdefault(peer, []).append(path)
        self._reached.add(peer)
        self._measuring.begin(peer, lambda number: self._say(peer, frames.PING, number))
        self._link.wake()
        try:
            for error in await run_until_one_ends(self._hear(path), self._speak(path), path.kept.end.wait()):
                raise error
        finally:
            self._paths[peer].remove(path)
            if not self._paths[peer]:
                del self._paths[peer]
                self._measuring.broken(peer)
            self._link.messages.resume(peer)
            self._link.wake()

    def _say(self, peer: int, kind: int, number: int) -> None:
        for path in self._paths.get(peer, [])[:1]:
            path.said.append((kind, number))
        self._link.wake()

    async def _hear(self, path: Path) -> None:
        sequence = 1
        while True:
            frame = frames.opened(await path.read(), sequence, (frames.DATA, frames.PING, frames.PONG), path.version)
            if frame.rank != path.peer:
                raise PacketError(
                    f"a frame of member {frame.rank} came on the stream of member {path.peer}; {frames.SAME_RELEASE}"
                )
            path.kept.heard.set()
            if frame.kind == frames.DATA:
                receive, offset, chunk = frames.opened_passed(frame.body)
                self._link.messages.data(path.peer, receive, offset, chunk)
            elif frame.kind == frames.PING:
                path.said.append((frames.PONG, frame.number(0)))
            else:
                self._measuring.pong(frame.number(0))
            sequence += 1
            self._link.wake()

    async def _speak(self, path: Path) -> None:
        sequence, rank = 1, self._link.rank
        while True:
            if path.said:
                kind, number = path.said.popleft()
                body = frames.packed(kind, number)
            elif chunk := self._link.messages.chunk(False, False, path.peer):
                kind, ((_, receive),) = frames.DATA, chunk.receivers
                body = frames.packed_passed(receive, chunk.offset, chunk.data)
                await self._link.paced(len(chunk.data))
            else:
                await self._link.sleep(None)
                continue
            await path.write(frames.head(kind, rank, sequence, path.version) + body)
            self.nbytes += len(body) + frames.HEADER.size
            sequence += 1
