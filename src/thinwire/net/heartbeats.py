"""Heartbeats between two members with straight streams, over a connection that carries nothing else.

gRPC's own pings do not tell: an answer is late if it stands behind bulk in the buffers of its connection, and gRPC ends the connection
although other bytes arrive. Here no heartbeat waits for bulk, none needs an answer, and a chunk on another stream counts as well. A member counts
its own beats without a frame from the other, so a process that has stood still does not take its own pause for the other's silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count

from thinwire.errors import PacketError
from thinwire.net import frames
from thinwire.net.calls import Broken
from thinwire.net.listening import Greeted
from thinwire.net.tasks import run_until_one_ends

BEATS = 10  # heartbeats in the seconds of a bound
MISSED = 6  # beats without any frame, after which the other is not reached: within 0.7 of the bound


async def live(
    greeted: Greeted,
    rank: int,
    silent: float,
    heard: asyncio.Event,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Beat, and hear the beats of the other, until one of them ends.

    Args:
        greeted: a stream without any other frames.
        rank: that of this member.
        silent: both ends notice within so many seconds that nothing reaches the other.
        heard: set whenever the other has been heard. Whoever hears it on another stream may set it, too; it is cleared at each beat.
        sleep: waits for a beat.

    Raises:
        Broken: nothing was heard for that long, or the stream has ended.
        PacketError: a frame that is not a beat of the other.
    """

    async def hear() -> None:
        for sequence in count(1):
            frame = frames.opened(await greeted.read(), sequence, (frames.PING,), greeted.version)
            if frame.rank != greeted.peer:
                raise PacketError(f"a frame of member {frame.rank} on the stream of member {greeted.peer}")
            heard.set()

    async def say() -> None:
        body = frames.packed(frames.PING, 0)
        for sequence in count(1):
            await greeted.write(frames.head(frames.PING, rank, sequence, greeted.version) + body)
            await sleep(silent / BEATS)

    async def watch() -> None:
        missed = 0
        while missed < MISSED:
            heard.clear()
            await sleep(silent / BEATS)
            missed = 0 if heard.is_set() else missed + 1
        raise Broken(f"nothing has come from it for {MISSED / BEATS * silent:.3g} s")

    for error in await run_until_one_ends(hear(), say(), watch()):
        raise error
