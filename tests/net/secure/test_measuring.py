"""What a member sends to measure: by the hub to all peers at once, straight to one after another."""

from __future__ import annotations

import asyncio

from thinwire.net import frames
from thinwire.net.measuring import BY_HUB, STRAIGHT, TRAIN, TRAIN_NBYTES, Measuring
from thinwire.net.messages import InFlight


class Link:
    """A connection to the hub that answers pings when it is told to, and keeps what is sent and said."""

    rank = 1

    def __init__(self) -> None:
        self.messages = InFlight(4, self)
        self.messages.send = lambda tag, data, peers, settled: self.sent.append((tag, list(peers)))
        self.messages.receive = lambda receive: self.receives.append(receive)
        self.sent, self.said, self.receives = [], [], []

    def wake(self) -> None:
        pass

    def say_to(self, kind, peer, *fields) -> None:
        self.said.append((kind, peer, *fields))
        if kind == frames.PING:
            self.pong(fields[0])

    def settle(self, tag: int, peer: int) -> None:
        for receive in self.receives:
            if (receive.tag, receive.peer) == (tag, peer):
                receive.settled(None)


async def idle() -> None:
    """Returns when all tasks wait."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_messages_by_the_hub_go_to_all_peers_at_once():
    """A peer whose round trips last longer is waited for; one that is gone is not."""

    async def play() -> None:
        link, held = Link(), []
        measuring = Measuring(link, lambda found, pairs: None)
        link.pong = measuring.pong
        measuring.begin(0, measuring.pong)
        measuring.begin(2, held.append)
        measuring.begin(3, measuring.pong)
        await idle()
        assert not link.sent and len(held) == 1
        while held:
            measuring.pong(held.pop())
            await idle()
        assert link.sent == [(BY_HUB, [0, 3, 2])] * TRAIN
        measuring.gone(3)
        for peer in (0, 2):
            link.settle(BY_HUB, peer)
            link.messages.arrived(BY_HUB, peer, 0)
        await idle()
        assert link.sent[TRAIN:] == [(STRAIGHT, [0])] * TRAIN
        for peer in (0, 2):
            link.messages.arrived(STRAIGHT, peer, 0)
            link.settle(STRAIGHT, peer)
            await idle()
        assert link.sent[2 * TRAIN :] == [(STRAIGHT, [2])] * TRAIN
        assert [said[:3] for said in link.said if said[0] == frames.MEASURED] == [
            (frames.MEASURED, 0, 0),
            (frames.MEASURED, 0, 2),
        ]
        assert all(receive.asked == TRAIN_NBYTES for receive in link.receives)
        await measuring.close()

    asyncio.run(play())
