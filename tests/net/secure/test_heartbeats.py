"""Beats between two members, in virtual time: silence is noticed within its bound, and a pause of one's own is none."""

from __future__ import annotations

import asyncio

import pytest

from thinwire.errors import PacketError
from thinwire.net import frames
from thinwire.net.calls import Broken
from thinwire.net.heartbeats import BEATS, MISSED, live
from thinwire.net.listening import Greeted

VERSION = 5


class Ends:
    """Two ends of a stream, which beat when `beat` says so. What member r sends goes to `ways[r]`."""

    def __init__(self) -> None:
        self.ways = asyncio.Queue(), asyncio.Queue()
        self.lost = False
        self._asleep: dict[int, list[asyncio.Future[None]]] = {0: [], 1: []}
        self.heard = asyncio.Event(), asyncio.Event()
        self.tasks = [asyncio.create_task(self._live(rank)) for rank in range(2)]

    async def _live(self, rank: int) -> None:
        async def write(frame: bytes) -> None:
            if not self.lost:
                self.ways[rank].put_nowait(frame)

        async def sleep(seconds: float) -> None:
            assert seconds * BEATS == 20.0
            self._asleep[rank].append(asyncio.get_running_loop().create_future())
            await self._asleep[rank][-1]

        other = 1 - rank
        greeted = Greeted(other, VERSION, self.ways[other].get, write)
        await live(greeted, rank, 20.0, self.heard[rank], sleep)

    async def beat(self, *ranks: int, times: int = 1) -> list[bool]:
        """Returns which ends have ended after `times` beats of `ranks`."""
        for _ in range(times):
            for rank in ranks:
                asleep, self._asleep[rank] = self._asleep[rank], []
                for one in asleep:
                    if not one.done():
                        one.set_result(None)
            for _ in range(50):
                await asyncio.sleep(0)
        return [task.done() for task in self.tasks]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def play(part) -> None:
    async def whole() -> None:
        ends = Ends()
        try:
            await part(ends)
        finally:
            await ends.end()

    asyncio.run(whole())


def test_both_ends_notice_silence_within_the_bound():
    async def part(ends: Ends) -> None:
        assert await ends.beat(0, 1, times=5 * BEATS) == [False, False]
        ends.lost = True
        await ends.beat(0, 1, times=MISSED - 1)
        assert await ends.beat(0, 1) != [True, True]
        assert await ends.beat(0, 1) == [True, True] and MISSED + 1 <= 0.7 * BEATS
        with pytest.raises(Broken, match="nothing has come from it for 12 s"):
            ends.tasks[0].result()

    play(part)


def test_an_end_that_stood_still_goes_on_and_the_other_does_not_wait_for_it():
    async def part(ends: Ends) -> None:
        await ends.beat(0, 1)
        assert await ends.beat(1, times=MISSED - 2) == [False, False]
        assert await ends.beat(0, 1, times=BEATS) == [False, False]
        # The first has not beaten, and counts its own beats.
        assert await ends.beat(1, times=MISSED + 1) == [False, True]

    play(part)


def test_whatever_else_is_heard_of_the_other_counts():
    async def part(ends: Ends) -> None:
        await ends.beat(0, 1)
        ends.lost = True
        for _ in range(2 * BEATS):
            ends.heard[0].set()
            ended = await ends.beat(0, 1)
        assert ended == [False, True]

    play(part)


def test_only_beats_of_the_other_are_taken():
    async def part(ends: Ends) -> None:
        await ends.beat(0, 1)
        ends.ways[1].put_nowait(frames.head(frames.PING, 0, 2, VERSION) + frames.packed(frames.PING, 0))
        await ends.beat()
        with pytest.raises(PacketError, match="a frame of member 0 on the stream of member 1"):
            ends.tasks[0].result()

    play(part)
