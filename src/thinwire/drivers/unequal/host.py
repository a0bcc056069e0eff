"""The syncer's thread on replica 0: it receives deltas, holds rounds, and sends estimates to all replicas. rounds.py decides when,
syncer.py computes; this module has only queues and the clock.

In real time it handles messages as they arrive. In virtual time it handles them in the order of the timeline, whatever the order of
arrival. When one replica has taken all its steps, the syncer tells the others, and waits for each for the expected time of one more
delta, by its earlier arrivals. A later replica is left out, and named in a warning.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.drivers.unequal.composition import Composition
from thinwire.drivers.unequal.messages import (
    DELTA,
    DOWN,
    END,
    LEFT_OUT,
    REST,
    UP,
    Down,
    ReplicaReport,
    SyncerMessages,
    Up,
)
from thinwire.drivers.unequal.peer_streams import PeerReceiver, PeerSender
from thinwire.drivers.unequal.rounds import HeldRound, Quorum
from thinwire.drivers.unequal.syncer import Syncer
from thinwire.drivers.unequal.timeline import Timeline
from thinwire.errors import PacketError, PeerError

Heard = Tensor | PeerError
_GAIN = 0.25


class Host:
    """The syncer of `group`, on its replica 0. It calls `tell(event, **fields)` on its thread with the outcome of deltas.

    `lock` is held while the agreed state changes. `inbox` has the messages to replica 0 itself.
    """

    member = "replica"  # what a rank of `group` is, in messages

    def __init__(
        self, group: Group, messages: SyncerMessages, syncer: Syncer, method: Composition,
        clock: Callable[[], float], tell: Callable[..., None],
    ) -> None:  # fmt: skip
        self.group, self.messages, self.syncer = group, messages, syncer
        self.rounds = Quorum(group.size, method.quorum, method.grace, method.patience)
        self.timeline = method.timeline(len(messages.numels)) if method.slow else None
        self.clock, self.tell, self.lock = clock, tell, threading.RLock()
        self.inbox: queue.Queue[Heard] = queue.Queue()
        self.taken, self.seconds = [0] * group.size, [0.0] * group.size
        self._heard: queue.Queue[tuple[int, Heard] | None] = queue.Queue()
        self._mail: list[deque[Up]] = [deque() for _ in range(group.size)]
        self._ended: set[int] = set()
        # Replicas were told that one of them has taken all its steps: when, and the progress then.
        self._finish_announced_at: float | None = None
        self._final_progress = 0
        self._stopped = False
        self._senders: dict[int, PeerSender] = {}
        self._thread = threading.Thread(target=self._run, name="thinwire-syncer", daemon=True)

    def start(self) -> None:
        self.rounds.began = self.clock()
        left = self.messages.write_down(Down(END, left=True))
        for peer in range(1, self.group.size):
            PeerReceiver(self.group, peer, UP, lambda: self.messages.buffer(UP), self._deliver)
            self._senders[peer] = PeerSender(self.group, peer, DOWN, self._lose, len(self.messages.numels), left)
        self._thread.start()

    def give(self, packet: Tensor) -> None:
        """Take a message of replica 0, which is in the same process."""
        self._heard.put((0, packet))

    def close(self) -> None:
        """End its threads. A send to a peer that does not receive ends with the group."""
        self._heard.put(None)
        if self._thread.is_alive():
            self._thread.join()
        for sender in self._senders.values():
            sender.end()
        for sender in self._senders.values():
            sender.wait(self.rounds.patience)  # a left-out replica is told of the end too, if possible

    # ---- receiving

    def _deliver(self, peer: int, heard: Heard) -> bool:
        """Queue a message of `peer`; return whether it was the peer's last one."""
        self._heard.put((peer, heard))
        if isinstance(heard, PeerError):
            return True
        with suppress(PacketError):
            return self.messages.read_up(heard, peer).kind == END
        return True

    def _lose(self, peer: int, why: PeerError) -> None:
        self._heard.put((peer, why))

    def _take(self, block: bool, until: float | None) -> int | None:
        """Put the next message into its replica's queue, and return the replica; None if no message came in time. Raises `Closed`."""
        try:
            got = self._heard.get(block, None if until is None else max(0.0, until - self.clock()))
        except queue.Empty:
            return None
        if got is None:
            raise Closed
        rank, heard = got
        if rank < 0:
            return None
        if isinstance(heard, PeerError):
            self._miss(rank, heard.cause)
            return rank
        try:
            up = self.messages.read_up(heard, rank)
        except PacketError as error:
            self._miss(rank, self._named(error, rank))
            return rank
        self.taken[rank] = up.taken
        if up.seconds:
            before = self.seconds[rank]
            self.seconds[rank] = before + _GAIN * (up.seconds - before) if before else up.seconds
        self._mail[rank].append(up)
        return rank

    def _miss(self, rank: int, why: str) -> None:
        if rank in self.rounds.there and rank not in self._ended:
            self.rounds.lost(rank)
            if not self._stopped:  # after a stop replicas leave
                self.tell("warning", message=f"{self.member} {self._number(rank)} was lost, the others continue: {why}")

    def _named(self, error: PacketError, rank: int) -> str:
        """The text of an error, which calls each rank of any group a replica, with the name that `rank` has in the run."""
        return str(error).replace(f"replica {rank}", f"{self.member} {self._number(rank)}", 1)

    def _number(self, rank: int) -> int:
        """The number of a rank of `group` in the whole run."""
        return rank

    def _read(self, up: Up) -> bool:
        """Store a delta for its round; return whether there is one."""
        if up.stop and not self._stopped:
            self._stopped = True
            self._send(Down(END, stop=True))
        if up.kind == END:
            self._ended.add(up.sender)
            self._announce_finish(up.number)
            return False
        try:
            with self.lock:
                waits = self.syncer.take(up)
        except PacketError as error:
            self._miss(up.sender, self._named(error, up.sender))
            return False
        if not waits:
            self._refuse(up.fragment, [up.sender])
        return waits and up.kind == DELTA

    def _announce_finish(self, progress: int) -> None:
        if self._finish_announced_at is None:
            self._finish_announced_at, self._final_progress = self.clock(), progress
            self._send(Down(END, version=max(1, progress), stop=True))

    # ---- sending

    def _hold(self, held: HeldRound, kind: int = DELTA) -> None:
        there = self.rounds.there
        with self.lock:
            down, outcomes = self.syncer.hold(held.fragment, there, kind)
            self._send(replace(down, reports=self._reports(outcomes, dict(held.waited))))
        if left_out := [rank for rank, outcome in outcomes.items() if outcome == LEFT_OUT]:
            self._refuse(held.fragment, left_out)

    def _reports(self, outcomes: Mapping[int, int], waited: Mapping[int, float]) -> tuple[ReplicaReport, ...]:
        there = self.rounds.there
        speeds = [1 / s if s and rank in there else 0.0 for rank, s in enumerate(self.seconds)]
        return tuple(
            ReplicaReport(outcomes.get(rank, 0), waited.get(rank, 0.0), self.taken[rank], speeds[rank])
            for rank in range(self.group.size)
        )

    def _refuse(self, fragment: int, by: list[int]) -> None:
        version = self.syncer.agreed[fragment].version
        numbers = [self._number(rank) for rank in by]
        self.tell("refused", fragment=fragment, round=version, by=numbers, reason="NaN or infinity in the delta")

    def _send(self, down: Down) -> None:
        packet = self.messages.write_down(down)
        self.inbox.put(packet)
        for sender in self._senders.values():
            sender.send(packet)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self.timeline:
                self._in_virtual_time(self.timeline)
            else:
                self._in_real_time()
            self._end()
        except Closed:
            pass
        except PeerError as error:  # the replica of this process raises it
            self.inbox.put(error)
        except BaseException as error:
            self.inbox.put(
                PeerError(f"the syncer has failed: {''.join(traceback.format_exception_only(error)).strip()}")
            )

    def _in_real_time(self) -> None:
        while not self._finished():
            self._between()
            deadlines = [at for at in (self.rounds.deadline(), self._last_call()) if at is not None]
            rank = self._take(True, min(deadlines, default=None))
            if rank is not None and self._mail[rank]:
                up = self._mail[rank].popleft()
                if self._read(up):
                    self.rounds.arrived(self.clock(), up.sender, up.fragment)
            self._hold_all(self.rounds.due(self.clock()))

    def _hold_all(self, rounds: Iterable[HeldRound]) -> None:
        """Hold rounds. After a stop deltas wait for the end: replicas leave then, and those that resume take them back."""
        for held in rounds:
            if not self._stopped:
                self._hold(held)

    def _between(self) -> None:
        """Called in real time before each wait."""

    def _last_call(self) -> float | None:
        """The time until which the syncer waits for replicas that have not finished, once one has."""
        if self._finish_announced_at is None:
            return None
        late = self.rounds.there - self._ended
        return max(
            (self.rounds.overdue(rank, self._finish_announced_at) for rank in late), default=self._finish_announced_at
        )

    def _finished(self) -> bool:
        """Whether all replicas have ended, or are too late."""
        if self._finish_announced_at is not None:
            for rank in sorted(self.rounds.there - self._ended):
                if self.rounds.overdue(rank, self._finish_announced_at) <= self.clock():
                    self._miss(rank, "it did not finish within twice the time of one of its deltas after the others")
        return self.rounds.there <= self._ended

    def _in_virtual_time(self, timeline: Timeline) -> None:
        while True:
            moment = timeline.advance()
            for rank, _ in moment.departed:
                up = self._next(rank)
                if up is not None and up.kind != DELTA:  # it has finished; later departures are not part of this run
                    self._mail[rank].appendleft(up)
                    return
                if up is not None:
                    self._read(up)
            self._hold_all(moment.held)

    def _next(self, rank: int) -> Up | None:
        """The next message of `rank`; None if the replica is lost."""
        while not self._mail[rank] and rank in self.rounds.there:
            self._take(True, None)
        return self._mail[rank].popleft() if self._mail[rank] else None

    def _end(self) -> None:
        """Hold the last rounds, with all remaining training, and end the run."""
        for rank in range(self.group.size):
            while rank in self.rounds.there and rank not in self._ended:
                if (up := self._next(rank)) is not None:
                    self._read(up)
        for kind in (DELTA, REST):
            for fragment in sorted({where for of, where, _ in self.syncer.given if of == kind}):
                ranks = sorted(rank for of, where, rank in self.syncer.given if (of, where) == (kind, fragment))
                self._hold(HeldRound(fragment, 0.0, tuple((rank, 0.0) for rank in ranks)), kind)
        self._send(Down(END))
        for sender in self._senders.values():
            sender.end()


class Closed(Exception):
    """The replica that hosts the syncer has closed."""
