"""Measures the straight streams of a member beside the hub, and announces the choice between star and mesh.

When the first straight stream to a peer stands, both sides measure once: round trips of small frames, by the hub and straight, and the
rates of `TRAIN` messages of `TRAIN_NBYTES` from the peer, by the hub and then straight. TCP's slow start is over after the first
message, so the rate is that of the others. They are two, because slow start often ends with a loss: the first message is late then, and the
second comes at once. By the hub a member sends its messages to all peers at once, as it sends packets: what the
hub's own uplink can carry is shared by all receivers. Straight it sends them to one peer after another. It reports to the member of rank
0, which announces the worst of all reports; from this announcement every member computes the same choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from secrets import randbits
from typing import Protocol

from thinwire.errors import ThinwireError
from thinwire.net import frames
from thinwire.net.frames import Frame
from thinwire.net.messages import InFlight
from thinwire.net.posted import Receive
from thinwire.net.star_or_mesh import Measured, parse_measured, worst

BY_HUB, STRAIGHT = (1 << 30) + 8, (1 << 30) + 9  # tags, above those of groups
TRAIN, TRAIN_NBYTES = 3, 1 << 19
TRIPS = 5  # round trips; the shortest counts
TURN_SECONDS = 60.0  # after this time the next peer has its turn


class Says(Protocol):
    """What `Measuring` needs of the member's connection to the hub."""

    messages: InFlight

    @property
    def rank(self) -> int: ...

    def wake(self) -> None: ...

    def say_to(self, kind: int, peer: int, *fields: int | bytes) -> None: ...


class Measuring:
    """The measurements of one member, and at rank 0 those of all. Used in one thread.

    Args:
        link: sends control frames.
        chosen: called with each new announcement.
    """

    def __init__(self, link: Says, chosen: Callable[[Measured, int], None]) -> None:
        self._link, self._chosen = link, chosen
        self._pongs: dict[int, asyncio.Future[None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()  # peers that get, or got, their messages
        self._preparing: set[int] = set()  # peers with round trips in progress
        self._prepared = asyncio.Event()
        self._due: list[int] = []  # peers that get their messages by the hub next, all at once
        self._hub_turn, self._turn = asyncio.Lock(), asyncio.Lock()
        self._awaited: dict[tuple[int, int], asyncio.Future[None]] = {}  # by tag and peer
        self._pairs: dict[int, Measured] = {}  # this member's, by peer
        self._reported: dict[tuple[int, int], Measured] = {}  # all members', at rank 0
        link.messages.arrived = self._arrived

    def begin(self, peer: int, ping: Callable[[int], None]) -> None:
        """Measure, unless that was done; `ping` sends a PING on the straight stream."""
        if peer not in self._begun and peer not in self._tasks:
            self._preparing.add(peer)
            self._tasks[peer] = asyncio.create_task(self._measure(peer, ping))

    def broken(self, peer: int) -> None:
        """Called when no straight stream to `peer` is left: measure later, unless the messages are on their way."""
        if peer not in self._begun and (task := self._tasks.pop(peer, None)):
            task.cancel()
            self._ready(peer)

    def gone(self, peer: int) -> None:
        """Called when `peer` will not come back."""
        if task := self._tasks.get(peer):
            task.cancel()
            self._ready(peer)
        for (_, other), waiting in self._awaited.items():
            if other == peer and not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """End all measurements."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def there(self, peer: int) -> None:
        """Called when `peer` has connected to the hub: repeat what it may have missed."""
        if peer == 0:
            for other in self._pairs:
                self._report(other)
        elif self._link.rank == 0:
            self._announce([peer])

    def pong(self, number: int) -> None:
        """Called with the number of a PONG."""
        if (waiting := self._pongs.get(number)) and not waiting.done():
            waiting.set_result(None)

    def heard(self, frame: Frame) -> None:
        """A MEASURED or a CHOSEN. Raises `PacketError`."""
        first, *fields = (frame.number(place) for place in range(5))
        found = parse_measured(fields)
        if frame.kind == frames.MEASURED and self._link.rank == 0 and first in self._link.messages.peers:
            if (frame.rank, first) not in self._reported:  # a pair measures once, and may report it again
                self._reported[frame.rank, first] = found
                self._announce(None)
        elif frame.kind == frames.CHOSEN and frame.rank == 0:
            self._chosen(found, first)

    async def _measure(self, peer: int, ping: Callable[[int], None]) -> None:
        straight = await self._trip(ping)
        hub = await self._trip(lambda number: self._link.say_to(frames.PING, peer, number))
        self._begun.add(peer)
        self._ready(peer)
        rates = [self._rate(peer, tag) for tag in (BY_HUB, STRAIGHT)]
        await self._sent_by_hub(peer)
        async with self._turn:
            await self._sent([peer], STRAIGHT)
        by_hub, by_straight = await asyncio.gather(*rates)
        self._pairs[peer] = Measured(hub, by_hub, straight, by_straight)
        self._report(peer)

    async def _trip(self, say: Callable[[int], None]) -> int:
        """The shortest of some round trips, in microseconds."""
        trips = []
        for _ in range(TRIPS):
            number = randbits(63)
            waiting = self._pongs[number] = asyncio.get_running_loop().create_future()
            began = time.monotonic()
            say(number)
            try:
                await waiting
            finally:
                del self._pongs[number]
            trips.append(time.monotonic() - began)
        return max(1, round(1e6 * min(trips)))

    def _rate(self, peer: int, tag: int) -> asyncio.Future[int]:
        """Open receives for the messages of `peer`; the result is their rate in bits per second."""
        times: list[float] = []
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def settled(error: ThinwireError | None) -> None:
            times.append(time.monotonic())
            if error:
                result.cancel()
            elif len(times) == TRAIN and not result.done():
                nbytes = (TRAIN - 1) * TRAIN_NBYTES
                result.set_result(max(1, round(8 * nbytes / max(times[-1] - times[0], 1e-6))))

        for _ in range(TRAIN):
            self._link.messages.receive(Receive(peer, tag, TRAIN_NBYTES, None, settled))
        return result

    def _ready(self, peer: int) -> None:
        """Called when nobody must wait for the round trips to `peer` any more."""
        self._preparing.discard(peer)
        self._prepared.set()

    async def _sent_by_hub(self, peer: int) -> None:
        """Send by the hub to `peer`, and with it to all others that are ready."""
        self._due.append(peer)
        try:
            async with self._hub_turn:
                if peer not in self._due:
                    return  # it went with others
                await self._all_ready()
                peers, self._due = self._due, []
                await self._sent(peers, BY_HUB)
        finally:
            if peer in self._due:
                self._due.remove(peer)

    async def _all_ready(self) -> None:
        """Wait for round trips in progress, but not for a peer that does not answer."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                while self._preparing:
                    self._prepared.clear()
                    await self._prepared.wait()
        except TimeoutError:
            self._preparing.clear()

    async def _sent(self, peers: list[int], tag: int) -> None:
        """Send the messages to all of `peers`, and wait until they have them."""
        loop = asyncio.get_running_loop()
        waiting = {(tag, peer): loop.create_future() for peer in peers}
        self._awaited.update(waiting)
        data = memoryview(bytes(TRAIN_NBYTES))
        for _ in range(TRAIN):
            self._link.messages.send(tag, data, peers, lambda peer, error: None)
        self._link.wake()
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await asyncio.gather(*waiting.values())
        except TimeoutError:
            pass
        finally:
            for key in waiting:
                del self._awaited[key]

    def _arrived(self, tag: int, peer: int, left: int) -> None:
        """Called when `peer` has a message of this member; `left`: messages to it under this tag that it does not have."""
        waiting = self._awaited.get((tag, peer))
        if waiting and not waiting.done() and not left:
            waiting.set_result(None)

    def _report(self, peer: int) -> None:
        if self._link.rank == 0:
            self._reported[0, peer] = self._pairs[peer]
            self._announce(None)
        else:
            self._link.say_to(frames.MEASURED, 0, peer, *self._pairs[peer])

    def _announce(self, peers: list[int] | None) -> None:
        """Tell `peers` the worst of all reports; None: all, this member too."""
        if not self._reported:
            return
        count, found = len(self._reported), worst(self._reported.values())
        for peer in self._link.messages.peers if peers is None else peers:
            self._link.say_to(frames.CHOSEN, peer, count, *found)
        if peers is None:
            self._chosen(found, count)
