"""The lighthouse, at which elastic replicas find each other. One process, one port; needs no torch.

It keeps a `MemberRegistry` (registry.py): live replicas, calls for views, and shared keys (ballots, and addresses of a group). Packets
do not pass through it, and it may die and restart. Its messages have a MAC (channel.py): from a peer without the run secret it reads
152 bytes, for five seconds at most, and reports its address once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import LinkError, PacketError
from thinwire.membership.channel import (
    ANSWER_SECONDS,
    FRAME,
    FULL,
    INCARNATION,
    INTRODUCTION,
    LIGHTHOUSE_PORT,
    MAGIC,
    MOST_ASKED,
    NAME,
    OTHER_SECRET,
    OTHER_VERSION,
    PROOF,
    SPOKEN,
    TAKEN,
    WELCOME,
    Seal,
    at,
    family,
    mac,
    same,
    spoken,
    unlike,
)
from thinwire.membership.registry import HEARTBEAT_TIMEOUT, TICK_SECONDS, MemberRegistry

_MOST_STRANGERS = 64  # connections that have not proved the secret yet; a quarter of them from one address
_MOST_CONNECTIONS = 4  # from one replica


class _Refused(Exception):
    """A refused stranger; the text is the reason."""


@dataclass(eq=False)
class _Line:
    """A connection; it has a name and seals after it has proved the secret."""

    address: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str = ""
    incarnation: str = ""
    says: Seal = field(init=False)
    hears: Seal = field(init=False)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(ANSWER_SECONDS):  # `wait_for` of Python 3.11 can lose a cancellation
            await self.writer.drain()

    async def came(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Whether `future` is done within `seconds`. Raises `ConnectionError` if the other side goes before."""
        gone = asyncio.ensure_future(self.reader.read(1))
        done, _ = await asyncio.wait({future, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            raise ConnectionError
        gone.cancel()
        await asyncio.wait({gone})
        return future in done


class Lighthouse:
    """Listens at `host`:`port` (0: a free port) in a thread of this process, until `close`.

    `host` is an address of this machine that the replicas reach. With a `secret` only replicas that hold it are accepted. `tell` is
    called with a line for every join, leave and refusal. Raises `LinkError` if the port is taken, or the address does not belong to this
    machine.
    """

    def __init__(
        self,
        host: str,
        port: int = LIGHTHOUSE_PORT,
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
        self._secret, self._tell = secret, tell
        self._registry = MemberRegistry(heartbeat_timeout, self._say)
        self._strangers: dict[asyncio.Task[Any], str] = {}  # oldest first, with their addresses
        self._lines: dict[str, list[asyncio.Task[Any]]] = {}  # by incarnation, oldest first
        self._told: OrderedDict[str, None] = OrderedDict()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listener,), name="thinwire-lighthouse", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """HOST:PORT, for replicas."""
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
            self._registry.tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._stop.wait()
        server.close()
        tasks = [*self._strangers, *(task for tasks in self._lines.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _say(self, line: str) -> None:
        with suppress(OSError):  # on a full disk the replicas need the lighthouse all the same
            self._tell(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}")

    # ---- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        line = _Line(str((writer.get_extra_info("peername") or ["somewhere"])[0]), reader, writer)
        try:
            self._make_room(line.address)
            self._strangers[task] = line.address
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._meet(line)
            del self._strangers[task]
            own = self._lines.setdefault(line.incarnation, [])
            own.append(task)
            if len(own) > _MOST_CONNECTIONS:
                own[0].cancel()
            while True:
                length, tag = FRAME.unpack(await reader.readexactly(FRAME.size))
                if length > MOST_ASKED:
                    raise PacketError(f"it announces a message of {length:,} bytes; at most {MOST_ASKED:,} are allowed")
                said = line.hears.open(tag, await reader.readexactly(length))
                await line.send(line.says.pack(await self._registry.answer(line, said)))
        except (_Refused, PacketError, TimeoutError) as error:
            self._refuse(line, str(error) or f"it said nothing, or read nothing, for {ANSWER_SECONDS:g} s")
        except (OSError, EOFError, asyncio.CancelledError):  # it disconnected, or was closed to make room or at the end
            pass
        finally:
            self._strangers.pop(task, None)
            if task in (own := self._lines.get(line.incarnation, [])):
                own.remove(task)
                if not own:
                    del self._lines[line.incarnation]
                    self._registry.disconnected(line.incarnation)
            writer.transport.abort()

    def _make_room(self, address: str) -> None:
        """Close the oldest connection that has not proved the secret, if there are too many; those of the same address first."""
        alike = [task for task, other in self._strangers.items() if other == address]
        if 4 * len(alike) >= _MOST_STRANGERS:
            alike[0].cancel()
        elif len(self._strangers) >= _MOST_STRANGERS:
            next(iter(self._strangers)).cancel()

    def _refuse(self, line: _Line, why: str) -> None:
        """Report a refusal once for each address and reason; only the newest of many are remembered."""
        text = f"refused: {line.name or 'somebody'} at {line.address} ({why})"
        if text not in self._told:
            self._told[text] = None
            self._say(text)
        self._told.move_to_end(text)
        if len(self._told) > 1024:
            self._told.popitem(last=False)

    async def _meet(self, line: _Line) -> None:
        """The handshake. Raises `_Refused`."""
        hello = spoken() + secrets.token_bytes(32)
        await line.send(hello)
        first = await line.reader.readexactly(SPOKEN.size)
        if not first.startswith(MAGIC):
            raise _Refused("it speaks another protocol")
        if other := unlike(first):
            with suppress(OSError):  # it may have gone: it knows
                await line.send(WELCOME.pack(OTHER_VERSION, 0.0, bytes(PROOF)))
            raise _Refused(f"it speaks {other}")
        said = first + await line.reader.readexactly(INTRODUCTION.size - SPOKEN.size)
        _, _, _, name, incarnation, _, proof = INTRODUCTION.unpack(said)
        if not same(proof, mac(self._secret, "replica", hello, said[:-PROOF])):
            await line.send(WELCOME.pack(OTHER_SECRET, 0.0, bytes(PROOF)))
            raise _Refused("it does not hold this run's secret")
        called, born = name.rstrip(b"\0").decode(errors="replace"), incarnation.decode(errors="replace")
        if not NAME.fullmatch(called) or not INCARNATION.fullmatch(born):
            raise _Refused("its name is not allowed")
        line.name, line.incarnation = called, born
        if full := self._registry.full(born, called):
            await line.send(WELCOME.pack(FULL, 0.0, bytes(PROOF)))
            raise _Refused(full)
        talk = hello + said[:-PROOF]
        line.says, line.hears = Seal(self._secret, "lighthouse", talk), Seal(self._secret, "replica", talk)
        self._registry.hear(line)
        welcome = struct.pack("<Id", TAKEN, self._registry.heartbeat_timeout)
        await line.send(welcome + mac(self._secret, "lighthouse", hello, said[:-PROOF], welcome))
