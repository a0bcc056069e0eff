"""The lighthouse: where replicas that come and go find each other. One process, one port; needs no torch.

It knows who is heard, who calls, and what they write for each other (ballots, and how a group is connected). Packets
never pass through it. It keeps nothing that a round after this one needs, so it may die and start again: replicas that
hold a group keep it and call again. What it hears has a MAC (channel.py): of one without the run secret it reads 152
bytes, for five seconds at most, and tells once that it was there.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import LinkError, PacketError
from thinwire.membership.channel import (
    ANSWER,
    FRAME,
    FULL,
    HELLO,
    INCARNATION,
    INTRODUCTION,
    MAGIC,
    MOST_ASKED,
    MOST_MEMBERS,
    MOST_PRESENCE,
    NAME,
    OTHER_SECRET,
    OTHER_VERSION,
    PORT,
    PROOF,
    TAKEN,
    VERSION,
    WELCOME,
    Seal,
    at,
    family,
    mac,
    same,
)

JOIN = 0.5  # seconds from the first call, after which most are enough; the grace is the memberships' own
HEARTBEAT_TIMEOUT = 5.0
_TICK = 0.05
_MOST_STRANGERS = 64  # connections that have not shown the secret yet; of one address a quarter
_MOST_CONNECTIONS = 4  # of one replica
_MOST_KEY, _MOST_VALUE, _MOST_WRITTEN = 256, 1 << 16, 1 << 26  # bytes: a key, what it holds, all together
_DAY = 86_400.0


def quorum(calling: Mapping[str, float], heard: Iterable[str], previous: set[str], now: float, join: float) -> set[str]:
    """Who is called together, of those `calling` (since when) and `heard`; nobody yet: empty. The rule of torchft 0.2.0.

    All of the previous ones, with whoever else calls; else more than half of those heard, when all of them call or
    the first has waited for `join`.

    >>> heard, previous = {"a", "b", "c"}, {"a", "b", "c"}
    >>> sorted(quorum({"a": 0.0, "b": 9.0, "c": 9.0}, heard, previous, now=9.0, join=10.0))
    ['a', 'b', 'c']
    >>> sorted(quorum({"a": 0.0, "b": 9.0}, heard, previous, now=9.0, join=10.0))
    []
    >>> sorted(quorum({"a": 0.0, "b": 9.0}, heard, previous, now=10.0, join=10.0))
    ['a', 'b']
    """
    heard = set(heard)
    here = calling.keys() & heard
    if previous and previous <= here:
        return here
    if 2 * len(here) <= len(heard):
        return set()
    waited = now - min(calling[incarnation] for incarnation in here) >= join
    return here if here == heard or waited else set()


class _Refused(Exception):
    """A stranger; the text says why."""


@dataclass(eq=False)
class _Line:
    """A connection; with a name and seals once it has shown the secret."""

    address: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str = ""
    incarnation: str = ""
    says: Seal = field(init=False)
    hears: Seal = field(init=False)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), ANSWER)

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether `future` is done within `seconds`. Raises `ConnectionError` if the other side goes before."""
        gone = asyncio.ensure_future(self.reader.read(1))
        done, _ = await asyncio.wait({future, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            raise ConnectionError
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        return future in done


@dataclass
class _Replica:
    """One incarnation of a replica that was heard. `calls`: since when it waits for the others, and what it says of itself."""

    name: str
    heard: float
    silent: bool = True
    calls: tuple[float, str | None] | None = None
    answer: asyncio.Future[list[list[str]]] | None = None


class Lighthouse:
    """Listens at `host`:`port` (0: one that is free) in a thread of this process, until `close`.

    `host` is an address of this machine that the replicas reach. With a `secret` only those who hold it are heard.
    `tell` hears a line for every join, leave and refusal. Raises `LinkError` if the port is taken or the address is not
    of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int = PORT,
        heartbeat_timeout: float = HEARTBEAT_TIMEOUT,
        secret: bytes = b"",
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        try:
            listener = socket.create_server((host, port), family=family(host))
        except (OSError, OverflowError) as error:
            raise LinkError(
                f"cannot listen at {at(host, port)} ({error}). Give an address of this machine, and a free port."
            ) from None
        self.host, self.port = host, int(listener.getsockname()[1])
        self._heartbeat_timeout, self._secret, self._tell = heartbeat_timeout, secret, tell
        self._replicas: dict[str, _Replica] = {}  # by incarnation
        self._previous: set[str] = set()
        self._written: dict[str, str] = {}
        self._nbytes = 0  # of what is written
        self._waits: dict[asyncio.Future[None], list[str]] = {}  # for keys
        self._strangers: dict[asyncio.Task[Any], str] = {}  # oldest first, with their addresses
        self._lines: dict[str, list[asyncio.Task[Any]]] = {}  # by incarnation, oldest first
        self._told: OrderedDict[str, None] = OrderedDict()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="thinwire-lighthouse", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """As replicas are told it."""
        return at(self.host, self.port)

    def close(self) -> None:
        """Stop listening, and end all connections. Idempotent."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # ---- in its own thread

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._shine(listener))

    async def _shine(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=listener)
        while not self._stop.is_set():
            self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TICK)
        server.close()
        tasks = [*self._strangers, *(task for tasks in self._lines.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        """Forget who is silent, and answer those who are called together."""
        now = time.monotonic()
        for incarnation, replica in list(self._replicas.items()):
            if now - replica.heard >= self._heartbeat_timeout:
                self._left(replica, f"not heard for {self._heartbeat_timeout:g} s")
                if replica.answer is None:  # else it may only be frozen, and still waits
                    del self._replicas[incarnation]
        heard = {incarnation for incarnation, replica in self._replicas.items() if not replica.silent}
        calling = {incarnation: replica.calls[0] for incarnation, replica in self._replicas.items() if replica.calls}
        chosen = quorum(calling, heard, self._previous, now, JOIN) if calling else set()
        if not chosen:
            return
        said = [(incarnation, self._replicas[incarnation].calls) for incarnation in sorted(chosen)]
        present = [
            [self._replicas[incarnation].name, incarnation, calls[1]]
            for incarnation, calls in said
            if calls and calls[1] is not None
        ]
        for incarnation in chosen:
            replica = self._replicas[incarnation]
            if replica.answer and not replica.answer.done():
                replica.answer.set_result(present)
            replica.calls = replica.answer = None
        self._previous = chosen

    def _left(self, replica: _Replica, why: str) -> None:
        if not replica.silent:
            replica.silent = True
            self._say(f"left: {replica.name} ({why})")

    def _say(self, line: str) -> None:
        self._tell(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    # ---- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        line = _Line(str((writer.get_extra_info("peername") or ["somewhere"])[0]), reader, writer)
        try:
            self._make_room(line.address)
            self._strangers[task] = line.address
            async with asyncio.timeout(ANSWER):
                await self._meet(line)
            del self._strangers[task]
            own = self._lines.setdefault(line.incarnation, [])
            own.append(task)
            if len(own) > _MOST_CONNECTIONS:
                own[0].cancel()
            while True:
                length, tag = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > MOST_ASKED:
                    raise PacketError(f"a message of {length:,} bytes, at most {MOST_ASKED:,} are allowed")
                said = line.hears.open(tag, await reader.readexactly(length))
                await line.send(line.says.pack(await self._answer(line, said)))
        except (_Refused, PacketError, TimeoutError) as error:
            self._refuse(line, str(error) or f"it said nothing, or read nothing, for {ANSWER:g} s")
        except (OSError, EOFError, asyncio.CancelledError):  # it has gone; or made room for another, or for the end
            pass
        finally:
            self._strangers.pop(task, None)
            if task in (own := self._lines.get(line.incarnation, [])):
                own.remove(task)
                if not own:
                    del self._lines[line.incarnation]
            writer.transport.abort()

    def _make_room(self, address: str) -> None:
        """Who has not shown the secret makes room for the next, those of one address first."""
        alike = [task for task, other in self._strangers.items() if other == address]
        if 4 * len(alike) >= _MOST_STRANGERS:
            alike[0].cancel()
        elif len(self._strangers) >= _MOST_STRANGERS:
            next(iter(self._strangers)).cancel()

    def _refuse(self, line: _Line, why: str) -> None:
        """Tell it once. Of many addresses the oldest are forgotten."""
        text = f"refused: {line.name or 'somebody'} at {line.address} ({why})"
        if text not in self._told:
            self._told[text] = None
            self._say(text)
        self._told.move_to_end(text)
        if len(self._told) > 1024:
            self._told.popitem(last=False)

    async def _meet(self, line: _Line) -> None:
        """The handshake. Raises `_Refused`."""
        hello = HELLO.pack(MAGIC, VERSION, secrets.token_bytes(32))
        await line.send(hello)
        first = await line.reader.readexactly(8)
        if first[:4] != MAGIC:
            raise _Refused("it speaks another protocol")
        said = first + await line.reader.readexactly(INTRODUCTION.size - 8)
        _, version, name, incarnation, _, proof = INTRODUCTION.unpack(said)
        if version != VERSION:
            await line.send(WELCOME.pack(OTHER_VERSION, 0.0, bytes(PROOF)))
            raise _Refused("it is of another version of Thinwire")
        if not same(proof, mac(self._secret, "replica", hello, said[:-PROOF])):
            await line.send(WELCOME.pack(OTHER_SECRET, 0.0, bytes(PROOF)))
            raise _Refused("it does not hold this run's secret")
        called, born = name.rstrip(b"\0").decode(errors="replace"), incarnation.decode(errors="replace")
        if not NAME.fullmatch(called) or not INCARNATION.fullmatch(born):
            raise _Refused("its name is not allowed")
        line.name, line.incarnation = called, born
        if born not in self._replicas and len(self._replicas) >= MOST_MEMBERS:
            await line.send(WELCOME.pack(FULL, 0.0, bytes(PROOF)))
            raise _Refused(f"{MOST_MEMBERS} replicas are there already")
        talk = hello + said[:-PROOF]
        line.says, line.hears = Seal(self._secret, "lighthouse", talk), Seal(self._secret, "replica", talk)
        self._hear(line)
        welcome = struct.pack("<Id", TAKEN, self._heartbeat_timeout)
        await line.send(welcome + mac(self._secret, "lighthouse", hello, said[:-PROOF], welcome))

    def _hear(self, line: _Line) -> _Replica:
        replica = self._replicas.setdefault(line.incarnation, _Replica(line.name, 0.0))
        if replica.silent:
            replica.silent = False
            self._say(f"joined: {line.name} at {line.address}")
        replica.heard = time.monotonic()
        return replica

    # ---- what is asked

    async def _answer(self, line: _Line, said: dict[str, Any]) -> dict[str, Any]:
        match said:
            case {"do": "beat"}:
                self._hear(line)
            case {"do": "leave"}:
                self._left(self._hear(line), "it said so")
                del self._replicas[line.incarnation]
            case {"do": "call", "presence": str(text), "seconds": int() | float() as seconds}:
                return await self._call(line, text, seconds)
            case {"do": "put", "key": str(key), "value": str(value)}:
                return self._put(key, value)
            case {"do": "settle", "key": str(key), "value": str(value)}:
                refused = {} if key in self._written else self._put(key, value)
                return refused or {"value": self._written[key]}
            case {"do": "look", "keys": [*keys], "seconds": int() | float() as seconds} if all(
                type(k) is str for k in keys
            ):
                return await self._look_up(line, keys, seconds)
            case {"do": "forget", "keys": [*keys]}:
                for key in keys:
                    if type(key) is str and key in self._written:
                        self._nbytes -= len(key) + len(self._written.pop(key))
            case _:
                return {"error": "this is not asked of a lighthouse; run the same version of Thinwire everywhere"}
        return {}

    async def _call(self, line: _Line, text: str, seconds: float) -> dict[str, Any]:
        """Who calls with it, and what they say; none where nobody does in time."""
        if len(text) > MOST_PRESENCE or not text.isascii():
            return {
                "error": f"{len(text)} bytes were said of one replica, at most {MOST_PRESENCE} are allowed, all ASCII"
            }
        replica, came = self._hear(line), self._loop.create_future()
        replica.calls, replica.answer = (time.monotonic(), text), came
        self._look()
        try:
            if await line.came(came, min(max(0.0, seconds), _DAY)):
                return {"present": came.result()}
        except BaseException:
            if replica.answer is came:
                replica.calls = None
            raise
        finally:
            if replica.answer is came:
                replica.answer = None
        if replica.calls:
            replica.calls = replica.calls[0], None  # it is there, but takes no part
        return {"present": None}

    def _put(self, key: str, value: str) -> dict[str, Any]:
        """Write; what was wrong, if anything."""
        more = len(key) + len(value) - (len(key) + len(self._written[key]) if key in self._written else 0)
        if len(key) > _MOST_KEY or len(value) > _MOST_VALUE or self._nbytes + more > _MOST_WRITTEN:
            return {"error": "what was to be written is too large, or all that was written is"}
        self._written[key], self._nbytes = value, self._nbytes + more
        for future, keys in self._waits.items():
            if not future.done() and all(k in self._written for k in keys):
                future.set_result(None)
        return {}

    async def _look_up(self, line: _Line, keys: list[str], seconds: float) -> dict[str, Any]:
        """What is written under `keys`, as soon as all are; none where they are not in time."""
        if seconds > 0 and not all(key in self._written for key in keys):
            future = self._loop.create_future()
            self._waits[future] = keys
            try:
                await line.came(future, min(seconds, _DAY))
            finally:
                del self._waits[future]
        values = [self._written.get(key) for key in keys]
        return {"values": None if None in values else values}
