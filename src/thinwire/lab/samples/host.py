"""Runs a peer's thread. It gives messages and timers to the protocol (sampled_peer.py), sends its messages, and gives work to the training thread.

A replica leaves in two steps: it announces that it has the final model, and it goes when all others have announced so or are lost. So the
final model stays available to each replica that still has to ask for it.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.attached import TAG
from thinwire.drivers.unequal.peer_streams import PeerReceiver, PeerSender
from thinwire.errors import PacketError, PeerError
from thinwire.lab.samples.messages import Kind, PeerMessage, SampleMessages
from thinwire.lab.samples.peer import SampledPeer
from thinwire.lab.samples.rules import Done, Send, Train, Wake

Work = Train | Done | PeerError
_HAS_END, _GOES = 0, 1  # the round of a BYE
MOST_AHEAD = 1 << 20  # rounds between two messages; a replica says every `hello` seconds which round it knows


class PeerHost:
    """Runs `peer` in `group`. `work` holds the work of the training thread; `tell(message)` is called with warnings, on this thread."""

    def __init__(
        self, group: Group, wire: SampleMessages, peer: SampledPeer, clock: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.work: queue.Queue[Work] = queue.Queue()
        self._group, self._wire, self._peer, self._clock, self._tell = group, wire, peer, clock, tell
        self._events: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._timers: list[tuple[float, int, tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._lost, self._ended, self._gone = set[int](), set[int](), set[int]()
        self._others = {other for other in range(group.size) if other != group.rank}
        self._done = self._going = False
        self._senders: dict[int, PeerSender] = {}
        self._thread = threading.Thread(target=self._run, name="thinwire-peer", daemon=True)

    def start(self) -> None:
        for other in sorted(self._others):
            PeerReceiver(self._group, other, TAG, self._wire.buffer, self._deliver)
            self._senders[other] = PeerSender(self._group, other, TAG, self._lose)
        self._thread.start()

    def trained(self, round_: int, step: int, model: Tensor, stop: bool) -> None:
        """Give the protocol the model that was trained from the model of `round_`."""
        self._events.put(lambda: self._peer.trained(round_, step, model, stop))

    def wait(self) -> None:
        """Wait until all others have the final model, or are lost."""
        self._thread.join()

    def close(self) -> None:
        """End its threads at once, even if others still need this replica."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join()
        for sender in self._senders.values():
            sender.end()

    # ---- on the threads of the carrier

    def _deliver(self, other: int, heard: Tensor | PeerError) -> bool:
        """Queue a message from `other`; return whether it was its last one."""
        if isinstance(heard, PeerError):
            self._lose(other, heard)
            return True
        try:
            message = self._wire.read(heard, other)
            self._check(message)
        except PacketError as error:
            self._lose(other, PeerError(str(error)))
            return True
        self._events.put(lambda: self._hear(message))
        return message.kind == Kind.BYE and message.round == _GOES

    def _check(self, message: PeerMessage) -> None:
        """Raise `PacketError` for a round that cannot be: later models would count as old, and all replicas would wait for a newer one."""
        newest, known = max(message.round, message.known), self._peer.known
        if newest - known > MOST_AHEAD:
            raise PacketError(
                f"replica {message.sender} knows of round {newest}, and this one of round {known}; check that replica."
            )

    def _lose(self, other: int, why: PeerError) -> None:
        self._events.put(lambda: self._miss(other, why))

    # ---- on its own thread

    def _hear(self, message: PeerMessage) -> None:
        if message.kind == Kind.BYE and message.round == _GOES:
            self._gone.add(message.sender)
            return
        if message.kind == Kind.BYE:
            self._ended.add(message.sender)
        self._peer.heard(message)

    def _miss(self, other: int, why: PeerError) -> None:
        if other not in self._lost and other not in self._gone:
            self._lost.add(other)
            self._tell(f"replica {other} was lost, the others continue: {why.cause}")
            self._peer.lost(other)

    def _run(self) -> None:
        try:
            self._carry_out()
            while not self._over():
                until = self._timers[0][0] - self._clock() if self._timers else None
                try:
                    event = self._events.get(True, None if until is None else max(0.0, until))
                except queue.Empty:
                    self._peer.woken(heapq.heappop(self._timers)[2])
                else:
                    if event is None:
                        return
                    event()
                self._carry_out()
        except BaseException as error:
            self.work.put(PeerError(f"the peer's thread has failed: {type(error).__name__}: {error}"))
        for sender in self._senders.values():
            sender.end()

    def _carry_out(self) -> None:
        for action in self._peer.take():
            if isinstance(action, Send):
                self._send(action.to, action.message)
            elif isinstance(action, Wake):
                heapq.heappush(self._timers, (self._clock() + action.seconds, next(self._number), action.key))
            else:
                self._done |= isinstance(action, Done)
                self.work.put(action)

    def _send(self, to: int, message: PeerMessage) -> None:
        if to not in self._lost and not self._going:
            self._senders[to].send(self._wire.write(message))

    def _over(self) -> bool:
        """Whether no other replica needs this one any more. Sends the messages of leaving when they are due."""
        own = self._group.rank
        if self._done and own not in self._ended:
            self._ended.add(own)
            for other in sorted(self._others):
                self._send(other, PeerMessage(Kind.BYE, own, _HAS_END))
        if self._done and not self._going and self._others <= self._ended | self._lost:
            for other in sorted(self._others):
                self._send(other, PeerMessage(Kind.BYE, own, _GOES))
            self._going = True
        return self._going and self._others <= self._gone | self._lost
