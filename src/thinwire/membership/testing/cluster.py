"""All replicas as threads of one process, in a time of its own, with faults on order: a rehearsal for what links do.

The rule by which members are found is the lighthouse's own (`lighthouse.py`), the protocol is the same code
(`rendezvous.py`), and groups are those of `threads.py`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.comm.group import Group
from thinwire.comm.threads import Key, ThreadGroup, _Hub
from thinwire.errors import LinkError
from thinwire.membership.commit import Board
from thinwire.membership.rendezvous import Observe, Roster
from thinwire.membership.testing.clock import VirtualTime
from thinwire.membership.testing.lighthouse import Standin, StandinBoard
from thinwire.membership.timeouts import Deadlines
from thinwire.membership.view import Presence

_ADDRESS = "thread:"


class Killed(BaseException):
    """Raised in the threads of a replica that was killed: it does nothing more. No `Exception`, so nobody catches it."""


class Rehearsal:
    """The place where threads meet, and where faults are ordered. Names are those of the rosters.

    >>> rehearsal = Rehearsal()
    >>> def replica(name):
    ...     muster = rehearsal.roster(name).muster({"round": 0})
    ...     return [member.name for member in muster.members], muster.decide("land", True, seconds=5.0)
    >>> rehearsal.play({name: replica for name in ("paris", "oslo")})["oslo"]
    (['oslo', 'paris'], True)
    """

    def __init__(self, heartbeat_timeout: float = 5.0) -> None:
        self.time = VirtualTime()
        self.killed: set[str] = set()
        self.frozen: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.delays: dict[frozenset[str], float] = {}
        self.lighthouse = Standin(self, heartbeat_timeout)
        self._damage: dict[tuple[str, str], int] = {}
        self._held_back: dict[frozenset[str], list[Callable[[], None]]] = {}
        self._plans: dict[tuple[str, str], list[tuple[int, Callable[[], None]]]] = {}
        self._passed: dict[tuple[str, str], int] = {}
        self._rooms: dict[str, _Room] = {}

    def roster(self, name: str, **settings: Any) -> Roster:
        """The roster of one replica; `settings` as for `Roster`."""
        return Roster(ThreadMeeting(self, name), name, **settings)

    def play(self, replicas: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        """Run `replicas[name](name)` in a thread each until all have ended; what they returned, or raised."""
        results: dict[str, Any] = {}

        def run(name: str, replica: Callable[[str], Any]) -> None:
            try:
                results[name] = replica(name)
            except BaseException as error:
                results[name] = error
            finally:
                with self.time:
                    self._lose(name)
                    self.time.leave(name)

        with self.time:
            for name in replicas:
                self.time.enter(name)
        threads = [threading.Thread(target=run, args=item, name=item[0], daemon=True) for item in replicas.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    # ---- faults: at once, from any thread; or when a replica comes to a phase

    def at(self, name: str, phase: str, fault: Callable[[], None], nth: int = 1) -> None:
        """Do `fault` when `name` comes to `phase` for the nth time from the beginning, before it does what it names.

        The phases: call, called, connect, put, all, settle, wait (of a vote), post, receive.
        """
        self._plans.setdefault((name, phase), []).append((nth, fault))

    def kill(self, name: str) -> None:
        """End `name`, as kill -9: its connections break at once, and its heartbeats stop. Time waits until it has ended."""
        with self.time:
            self.killed.add(name)
            self._lose(name)

    def revive(self, name: str) -> None:
        """Let `name` begin again after it was killed, with a roster of its own."""
        with self.time:
            self.killed.discard(name)
            self.time.enter(name)

    def freeze(self, name: str) -> None:
        """Stop `name`, as SIGSTOP: it does nothing, and nobody is told."""
        with self.time:
            self.frozen.add(name)
            self.lighthouse.silence(name)

    def thaw(self, name: str) -> None:
        with self.time:
            self.frozen.discard(name)
            self.lighthouse.hear_again()
            self.time.notify_all()

    def cut(self, a: str, b: str) -> None:
        """Nothing passes between `a` and `b` any more; nobody is told."""
        with self.time:
            self.cuts.add(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """What was held back arrives now."""
        with self.time:
            link = frozenset((a, b))
            self.cuts.discard(link)
            for deliver in self._held_back.pop(link, []):
                deliver()
            self.time.notify_all()

    def slow(self, a: str, b: str, seconds: float) -> None:
        """Every message between `a` and `b` takes so long."""
        with self.time:
            self.delays[frozenset((a, b))] = seconds

    def damage(self, sender: str, receiver: str, nth: int = 1) -> None:
        """Turn a bit of the nth message from now on from `sender` to `receiver`."""
        with self.time:
            self._damage[sender, receiver] = nth

    def later(self, seconds: float, fault: Callable[[], None]) -> None:
        """Do `fault` so many seconds from now."""
        with self.time:
            self.time.after(seconds, fault)

    # ---- what replicas do here

    def passing(self, name: str, phase: str) -> None:
        """`name` comes to `phase`. Called without the lock."""
        with self.time:
            nth = self._passed[name, phase] = self._passed.get((name, phase), 0) + 1
            faults = [fault for number, fault in self._plans.get((name, phase), []) if number == nth]
        for fault in faults:
            fault()
        with self.time:
            self.check(name)

    def check(self, name: str) -> None:
        """Go no further while frozen, and never when killed."""
        self.time.wait_for(name, lambda: name not in self.frozen or name in self.killed)
        if name in self.killed:
            raise Killed(name)

    def wait(self, name: str, predicate: Callable[[], bool], seconds: float | None) -> bool:
        """Wait as a replica does: one that froze meanwhile hears the answer when it is thawed."""
        answer = self.time.wait_for(name, lambda: name in self.killed or predicate(), seconds)
        self.check(name)
        return answer or predicate()

    def answers(self, a: str, b: str) -> bool:
        """Whether `b` would answer `a` now."""
        return frozenset((a, b)) not in self.cuts and self.beats(b)

    def beats(self, name: str) -> bool:
        return name not in self.killed and name not in self.frozen

    def room(self, chapter: str, members: Sequence[Presence]) -> _Room:
        return self._rooms.setdefault(chapter, _Room(self, members))

    def carry(self, sender: str, receiver: str, message: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """Bring a message over the link between two, as the link is now."""
        nth = self._damage.get((sender, receiver), 0)
        if nth:
            self._damage[sender, receiver] = nth - 1
        message = message.clone()
        if nth == 1:
            message[message.numel() // 2] ^= 1
        link = frozenset((sender, receiver))

        def arrive() -> None:
            if link in self.cuts:
                self._held_back.setdefault(link, []).append(lambda: deliver(message))
            else:
                deliver(message)

        seconds = self.delays.get(link, 0.0)
        if seconds:
            self.time.after(seconds, arrive)
        else:
            arrive()

    def _lose(self, name: str) -> None:
        """Its connections break, its heartbeats stop."""
        self.lighthouse.silence(name)
        for room in self._rooms.values():
            if name in room.names:
                room.hub.closed.add(room.names.index(name))
        self.time.notify_all()


class _Handle:
    """A `Condition` for `ThreadGroup`: the rehearsal's time as one replica lives in it."""

    def __init__(self, rehearsal: Rehearsal, name: str) -> None:
        self._rehearsal, self._name = rehearsal, name

    def __enter__(self) -> _Handle:
        self._rehearsal.time.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._rehearsal.time.__exit__()

    def notify_all(self) -> None:
        self._rehearsal.time.notify_all()

    def wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        return self._rehearsal.wait(self._name, predicate, seconds)


class _FaultyHub(_Hub):
    def __init__(self, rehearsal: Rehearsal, names: Sequence[str]) -> None:
        super().__init__(clock=lambda: rehearsal.time.now)
        self._rehearsal, self._names = rehearsal, names

    def send(self, key: Key, message: Tensor) -> None:
        carry, deliver = self._rehearsal.carry, super().send
        sender, receiver, _ = key

        def arrive(message: Tensor) -> None:
            deliver(key, message)
            self._rehearsal.time.notify_all()

        carry(self._names[sender], self._names[receiver], message, arrive)


class _Room:
    """Where the members of one chapter come together."""

    def __init__(self, rehearsal: Rehearsal, members: Sequence[Presence]) -> None:
        self.names = [_thread(p) for p in members]
        self.hub = _FaultyHub(rehearsal, self.names)
        self.here: set[str] = set()


class _ThreadGroup(ThreadGroup):
    """`ThreadGroup` on a hub with faults; its replica may be frozen or killed at every post."""

    def __init__(self, rehearsal: Rehearsal, name: str, hub: _Hub, rank: int, size: int, timeout: float) -> None:
        own = copy.copy(hub)
        own.changed = _Handle(rehearsal, name)  # type: ignore[assignment]
        super().__init__(own, rank, size, timeout)
        self._rehearsal, self._name = rehearsal, name

    def post(self, *args: Any, **kwargs: Any) -> Any:
        """See `Group.post`."""
        self._rehearsal.passing(self._name, "post")
        return super().post(*args, **kwargs)


def _thread(presence: Presence) -> str:
    """The name under which a rehearsal knows a replica: its roster's, unless that is given a meeting of its own."""
    return presence.address.removeprefix(_ADDRESS)


class ThreadMeeting:
    """One replica's view of a `Rehearsal`."""

    def __init__(self, rehearsal: Rehearsal, name: str) -> None:
        self._rehearsal, self._name = rehearsal, name
        self._life, self._deadlines = "", Deadlines()
        self._observe: Observe = lambda kind, fields: None
        self._epoch = -1  # of the lighthouse that this replica has found
        self._board: Board | None = None

    @property
    def address(self) -> str:
        return _ADDRESS + self._name

    def clock(self) -> float:
        return self._rehearsal.time.now

    def sleep(self, seconds: float) -> None:
        with self._rehearsal.time:
            self._rehearsal.wait(self._name, lambda: False, seconds)

    def arrive(self, name: str, life: str, secret: bytes, deadlines: Deadlines, observe: Observe) -> None:
        self._life, self._deadlines, self._observe = life, deadlines, observe

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], Board]:
        until = self.clock() + seconds
        lighthouse = self._rehearsal.lighthouse
        presence = Presence.from_json(presence.to_json())  # as it comes out of a wire
        while (left := until - self.clock()) > 0:
            self._rehearsal.passing(self._name, "call")
            if self._epoch != lighthouse.epoch or not lighthouse.up:
                self._find(left)
                continue
            try:
                with self._rehearsal.time:
                    present = lighthouse.call(self._name, presence, left)
            except LinkError as error:
                self._observe("retry", {"reason": str(error), "seconds": 0.0})
                continue
            self._rehearsal.passing(self._name, "called")
            assert self._board is not None
            return present, self._board
        raise LinkError("nobody else, or no lighthouse; start the others, or the lighthouse.")

    def connect(self, chapter: str, members: Sequence[Presence], rank: int) -> Group:
        self._rehearsal.passing(self._name, "connect")
        rehearsal, seconds = self._rehearsal, self._deadlines.connect
        with rehearsal.time:
            room = rehearsal.room(chapter, members)
            room.here.add(self._name)
            rehearsal.time.notify_all()

            def joined() -> bool:
                return set(room.names) == room.here and all(
                    frozenset((self._name, n)) not in rehearsal.cuts for n in room.names
                )

            if not rehearsal.wait(self._name, joined, seconds):
                absent = sorted(set(room.names) - room.here) or ["somebody"]
                raise LinkError(f"{', '.join(absent)} did not come within {seconds:g} s")
        return _ThreadGroup(rehearsal, self._name, room.hub, rank, len(members), self._deadlines.transfer)

    def reaches(self, other: Presence) -> bool:
        with self._rehearsal.time:
            return self._rehearsal.answers(self._name, _thread(other))

    def leave(self) -> None:
        with self._rehearsal.time:
            self._rehearsal.lighthouse.leave(self._name)

    def _find(self, seconds: float) -> None:
        """Wait for a lighthouse, and until it has heard the others, too."""
        rehearsal, lighthouse = self._rehearsal, self._rehearsal.lighthouse
        if not lighthouse.up:
            self._observe("retry", {"reason": "no lighthouse", "seconds": seconds})
        with rehearsal.time:
            if rehearsal.wait(self._name, lambda: lighthouse.up, seconds):
                self._epoch = lighthouse.epoch
                self._board = StandinBoard(lighthouse, self._rehearsal, self._name)
                lighthouse.hear(self._name, self._life)
                rehearsal.wait(self._name, lambda: False, 2 * self._deadlines.heartbeat_interval)
