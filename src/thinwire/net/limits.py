"""Bounds on what strangers, and what each member, may cost: token buckets, and turns in which nobody waits behind many of another.

Whatever is over a bound is not refused but read later: TCP then holds its sender back, and the kernel's buffers are the only place where it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress

FRAMES_PER_SECOND, FRAMES_AT_MOST, FRAMES_AT_ONCE = 400, 2000, 2048  # of one member
BARE_PER_SECOND, BARE_AT_ONCE = 1 << 17, 1 << 20  # bytes of one member that carry no message; some are on their way
_LATE_SECONDS = 0.5  # a wait that is longer is no wait for a message that is on its way
_AROUND_NBYTES = 256  # of TLS and HTTP/2 around a small message, with what answers it
_AROUND_SHARE = 1 / 32  # of the bytes of long messages, either way: their headers, and acknowledgements of what came


class TokenBucket:
    """Allows `burst` at once and `rate` a second in the long run. `now` is the clock."""

    def __init__(self, rate: float, burst: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._now = rate, burst, now
        self._tokens, self._since = burst, now()

    def take(self, number: float) -> float:
        """Take `number` tokens if they are there, and return 0.0; otherwise take none, and return the seconds until they will be."""
        self._fill()
        if self._tokens >= number:
            self._tokens -= number
            return 0.0
        return (number - self._tokens) / self._rate

    def give(self, number: float) -> None:
        """Add tokens, at most up to the burst."""
        self._fill()
        self._tokens = min(self._burst, self._tokens + number)

    def _fill(self) -> None:
        now = self._now()
        self._tokens = min(self._burst, self._tokens + (now - self._since) * self._rate)
        self._since = now


class FairBucket:
    """A token bucket for all, in front of which each source has a bucket of its own, and at most one waiting request. So a source with
    many requests waits behind itself, and delays another by one request at a time.

    Args:
        each: makes the bucket of a source.
        all: the bucket of all together.
        sources: most sources that are remembered; the longest unused are forgotten first.
    """

    def __init__(self, each: Callable[[], TokenBucket], all: TokenBucket, sources: int = 4096) -> None:
        self._each, self._all, self._most = each, all, sources
        self._turn = asyncio.Lock()
        self._sources: OrderedDict[Hashable, tuple[asyncio.Lock, TokenBucket]] = OrderedDict()

    async def take(self, source: Hashable, number: float) -> None:
        """Wait until `source` may use `number` tokens."""
        turn, own = self._source(source)
        async with turn:
            await _taken(own, number)
            async with self._turn:
                await _taken(self._all, number)

    def _source(self, source: Hashable) -> tuple[asyncio.Lock, TokenBucket]:
        found = self._sources.setdefault(source, (asyncio.Lock(), self._each()))
        self._sources.move_to_end(source)
        while len(self._sources) > self._most:
            self._sources.popitem(last=False)
        return found


async def _taken(bucket: TokenBucket, number: float) -> None:
    while seconds := bucket.take(number):  # taken at the end of the wait: one that is given up costs nothing
        await asyncio.sleep(seconds)


class MemberRates:
    """Bounds the frames and requests of each member: `FRAMES_PER_SECOND`, and more for those that answer what others send to it, at most
    `FRAMES_AT_MOST` a second. Chunks of long messages are free, because a receiver asks for them. Frames over the bound are read later.

    Args:
        count: called with a name and a number of frames that waited.
    """

    def __init__(self, count: Callable[[str, int], object]) -> None:
        self._count = count
        self._buckets: dict[str, tuple[TokenBucket, TokenBucket]] = {}

    async def spend(self, name: str, number: int = 1) -> None:
        """Wait until `name` may send so many frames."""
        counted = False
        for bucket in self._of(name):
            while seconds := bucket.take(number):
                if not counted:
                    self._count(name, number)
                counted = True
                await asyncio.sleep(seconds)

    def earn(self, name: str, number: int) -> None:
        """Allow `name` so many more frames: something came to it that asks for an answer."""
        self._of(name)[0].give(number)

    def _of(self, name: str) -> tuple[TokenBucket, TokenBucket]:
        if name not in self._buckets:
            self._buckets[name] = (
                TokenBucket(FRAMES_PER_SECOND, FRAMES_AT_ONCE),
                TokenBucket(FRAMES_AT_MOST, FRAMES_AT_ONCE),
            )
        return self._buckets[name]


class BareBytes:
    """Bounds what each member sends besides messages. HTTP/2 has frames without any that cost the receiver work, such as pings, settings, empty
    headers and resets. A proxy in front of TLS sees bytes alone, so it counts all that come, and takes off those that have come out as messages.
    The rest is bounded to `BARE_PER_SECOND`, and read later.

    Args:
        count: called with a name and a number of bytes that waited.
    """

    def __init__(self, count: Callable[[str, int], object]) -> None:
        self._count = count
        self._members: dict[str, tuple[TokenBucket, asyncio.Event]] = {}

    async def spend(self, name: str, nbytes: int) -> None:
        """Wait until so many bytes of `name` may be read."""
        bucket, given = self._of(name)
        began = time.monotonic()
        while seconds := bucket.take(nbytes):
            given.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await given.wait()
        if time.monotonic() - began > _LATE_SECONDS:
            self._count(name, nbytes)

    def received(self, name: str, nbytes: int) -> None:
        """A message of so many bytes has come from `name`."""
        self._give(name, nbytes * (1 + _AROUND_SHARE) + _AROUND_NBYTES)

    def sent(self, name: str, nbytes: int) -> None:
        """So many bytes go to `name`, which acknowledges them."""
        self._give(name, nbytes * _AROUND_SHARE)

    def _give(self, name: str, nbytes: float) -> None:
        bucket, given = self._of(name)
        bucket.give(nbytes)
        given.set()

    def _of(self, name: str) -> tuple[TokenBucket, asyncio.Event]:
        if name not in self._members:
            self._members[name] = TokenBucket(BARE_PER_SECOND, BARE_AT_ONCE), asyncio.Event()
        return self._members[name]
