"""A simulated cluster: replicas as threads of one process in virtual time, with injected faults of replicas and links.

Members are found by the lighthouse's rule (`registry.quorum`), the protocol is the same code (`rendezvous.py`), and groups are
`ThreadGroup`s.
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
from thinwire.membership.commit import VoteStore
from thinwire.membership.rendezvous import AbsentError, AnswerLostError, Membership
from thinwire.membership.testing.clock import OrderedTime, VirtualTime
from thinwire.membership.testing.lighthouse import SimulatedLighthouse, SimulatedVoteStore
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Observe, Presence

_ADDRESS = "thread:"


class Killed(BaseException):
    """Raised in the threads of a killed replica, which does nothing more. It is no `Exception`, so that no code catches it."""


class SimulatedCluster:
    """Replicas as threads in virtual time, with injected faults. Names are those of the memberships.

    Args:
        heartbeat_timeout: seconds of virtual time without a heartbeat after which a replica counts as dead.
        order: the seed of the order (any number) of what happens at the same virtual time, so that a run can be repeated; None: as threads come.

    >>> cluster = SimulatedCluster()
    >>> def replica(name):
    ...     view = cluster.membership(name).next_view({"round": 0})
    ...     return [member.name for member in view.members], view.decide("land", True, seconds=5.0)
    >>> cluster.play({name: replica for name in ("paris", "oslo")})["oslo"]
    (['oslo', 'paris'], True)
    """

    def __init__(self, heartbeat_timeout: float = 5.0, order: int | None = None) -> None:
        self.time = VirtualTime() if order is None else OrderedTime(order)
        self.killed: set[str] = set()
        self.frozen: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.delays: dict[frozenset[str], float] = {}
        self.lighthouse = SimulatedLighthouse(self, heartbeat_timeout)
        self._damage: dict[tuple[str, str], int] = {}
        self._held_back: dict[frozenset[str], list[Callable[[], None]]] = {}
        self._plans: dict[tuple[str, str], list[tuple[int, Callable[[], None]]]] = {}
        self._passed: dict[tuple[str, str], int] = {}
        self._rooms: dict[str, _Room] = {}

    def membership(self, name: str, **settings: Any) -> Membership:
        """The membership of one replica; `settings` as for `Membership`."""
        return Membership(ThreadRendezvous(self, name), name, **settings)

    def play(self, replicas: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
        """Run each `replicas[name](name)` in a thread until all have ended; returns what they returned or raised."""
        results: dict[str, Any] = {}

        def run(name: str, replica: Callable[[str], Any]) -> None:
            try:
                with self.time:
                    self.time.begin(name)
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

    # ---- faults: at once, from any thread; or when a replica reaches a phase

    def at(self, name: str, phase: str, fault: Callable[[], None], nth: int = 1) -> None:
        """Run `fault` when `name` reaches `phase` for the nth time, before the operation of this phase.

        The phases: call, called, connect, put, all, settle, wait (of a vote), post, receive.
        """
        self._plans.setdefault((name, phase), []).append((nth, fault))

    def kill(self, name: str) -> None:
        """End `name`, like kill -9: its connections break at once, and its heartbeats stop. Time waits until it has ended."""
        with self.time:
            self.killed.add(name)
            self._lose(name)

    def revive(self, name: str) -> None:
        """Let `name` start again after it was killed, with a new membership."""
        with self.time:
            self.killed.discard(name)
            self.time.enter(name)

    def freeze(self, name: str) -> None:
        """Stop `name`, like SIGSTOP: it does nothing, and no replica is notified."""
        with self.time:
            self.frozen.add(name)
            self.lighthouse.silence(name)

    def thaw(self, name: str) -> None:
        with self.time:
            self.frozen.discard(name)
            self.lighthouse.hear_again()
            self.time.notify_all()

    def cut(self, a: str, b: str) -> None:
        """Stop all messages between `a` and `b`; no replica is notified."""
        with self.time:
            self.cuts.add(frozenset((a, b)))

    def heal(self, a: str, b: str) -> None:
        """Undo `cut`: the messages that were held back arrive now."""
        with self.time:
            link = frozenset((a, b))
            self.cuts.discard(link)
            for deliver in self._held_back.pop(link, []):
                deliver()
            self.time.notify_all()

    def slow(self, a: str, b: str, seconds: float) -> None:
        """Let every message between `a` and `b` take `seconds`."""
        with self.time:
            self.delays[frozenset((a, b))] = seconds

    def damage(self, sender: str, receiver: str, nth: int = 1) -> None:
        """Flip a bit of the nth message from now on from `sender` to `receiver`."""
        with self.time:
            self._damage[sender, receiver] = nth

    def later(self, seconds: float, fault: Callable[[], None]) -> None:
        """Run `fault` after `seconds`."""
        with self.time:
            self.time.after(seconds, fault)

    # ---- called by replicas

    def passing(self, name: str, phase: str) -> None:
        """`name` has reached `phase`. Called without the lock."""
        with self.time:
            nth = self._passed[name, phase] = self._passed.get((name, phase), 0) + 1
            faults = [fault for number, fault in self._plans.get((name, phase), []) if number == nth]
        for fault in faults:
            fault()
        with self.time:
            self.check(name)

    def check(self, name: str) -> None:
        """Block while frozen; raise if killed."""
        self.time.wait_for(name, lambda: name not in self.frozen or name in self.killed)
        if name in self.killed:
            raise Killed(name)

    def wait(self, name: str, predicate: Callable[[], bool], seconds: float | None) -> bool:
        """Wait like a replica: one that is frozen meanwhile gets the result when it is thawed."""
        answer = self.time.wait_for(name, lambda: name in self.killed or predicate(), seconds)
        self.check(name)
        return answer or predicate()

    def answers(self, a: str, b: str) -> bool:
        """Whether `b` would respond to `a` now."""
        return frozenset((a, b)) not in self.cuts and self.beats(b)

    def beats(self, name: str) -> bool:
        return name not in self.killed and name not in self.frozen

    def room(self, epoch: str, members: Sequence[Presence]) -> _Room:
        return self._rooms.setdefault(epoch, _Room(self, members))

    def carry(self, sender: str, receiver: str, message: Tensor, deliver: Callable[[Tensor], None]) -> None:
        """Carry a message over the link between two replicas, in its present state."""
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
        """Break the connections of `name`, and stop its heartbeats."""
        self.lighthouse.silence(name)
        for room in self._rooms.values():
            if name in room.names:
                room.hub.closed.add(room.names.index(name))
        self.time.notify_all()


class _Handle:
    """A `Condition` for `ThreadGroup`: the cluster's time as one replica sees it."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self._cluster, self._name = cluster, name

    def __enter__(self) -> _Handle:
        self._cluster.time.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.time.__exit__()

    def notify_all(self) -> None:
        self._cluster.time.notify_all()

    def wait_for(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        return self._cluster.wait(self._name, predicate, seconds)


class _FaultyHub(_Hub):
    def __init__(self, cluster: SimulatedCluster, names: Sequence[str]) -> None:
        super().__init__(clock=lambda: cluster.time.now)
        self._cluster, self._names = cluster, names

    def send(self, key: Key, message: Tensor) -> None:
        carry, deliver = self._cluster.carry, super().send
        sender, receiver, _ = key

        def arrive(message: Tensor) -> None:
            deliver(key, message)
            self._cluster.time.notify_all()

        carry(self._names[sender], self._names[receiver], message, arrive)


class _Room:
    """The members of one epoch that have connected."""

    def __init__(self, cluster: SimulatedCluster, members: Sequence[Presence]) -> None:
        self.names = [_thread(p) for p in members]
        self.hub = _FaultyHub(cluster, self.names)
        self.here: set[str] = set()
        self.vain = False  # whether it has become known that the others do not come


class _ThreadGroup(ThreadGroup):
    """`ThreadGroup` on a hub with faults; its replica may be frozen or killed at every post."""

    def __init__(self, cluster: SimulatedCluster, name: str, hub: _Hub, rank: int, size: int, timeout: float) -> None:
        own = copy.copy(hub)
        own.changed = _Handle(cluster, name)  # type: ignore[assignment]
        super().__init__(own, rank, size, timeout)
        self._cluster, self._name = cluster, name

    def post(self, *args: Any, **kwargs: Any) -> Any:
        """See `Group.post`."""
        self._cluster.passing(self._name, "post")
        return super().post(*args, **kwargs)


def _thread(presence: Presence) -> str:
    """The cluster's name of a replica: that of its membership, unless the membership was given its own rendezvous."""
    return presence.address.removeprefix(_ADDRESS)


class ThreadRendezvous:
    """One replica's view of a `SimulatedCluster`."""

    relays = False

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._incarnation, self._timeouts = "", Timeouts()
        self._observe: Observe = lambda kind, fields: None
        self._epoch = -1  # the epoch of the lighthouse that this replica has found
        self._vote_store: VoteStore | None = None

    @property
    def address(self) -> str:
        return _ADDRESS + self._name

    def clock(self) -> float:
        return self._cluster.time.now

    def sleep(self, seconds: float) -> None:
        with self._cluster.time:
            self._cluster.wait(self._name, lambda: False, seconds)

    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        self._incarnation, self._timeouts, self._observe = incarnation, timeouts, observe

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        until = self.clock() + seconds
        lighthouse = self._cluster.lighthouse
        presence = Presence.from_json(presence.to_json())  # as after sending
        while (left := until - self.clock()) > 0:
            self._cluster.passing(self._name, "call")
            if self._epoch != lighthouse.epoch or not lighthouse.up:
                self._find(left)
                continue
            try:
                with self._cluster.time:
                    present = lighthouse.call(self._name, presence, left)
            except LinkError as error:
                self._observe("retry", {"reason": str(error), "seconds": 0.0})
                if self._epoch != lighthouse.epoch:
                    raise AnswerLostError(str(error)) from None
                continue
            self._cluster.passing(self._name, "called")
            assert self._vote_store is not None
            return present, self._vote_store
        raise LinkError("no other replica, or no lighthouse, is there; start the others, or the lighthouse.")

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        self._cluster.passing(self._name, "connect")
        cluster, seconds = self._cluster, self._timeouts.connect
        with cluster.time:
            room = cluster.room(epoch, members)
            room.here.add(self._name)
            cluster.time.notify_all()

            def joined() -> bool:
                cut = any(frozenset((self._name, n)) in cluster.cuts for n in room.names)
                return set(room.names) == room.here and not cut and not room.vain

            def vain() -> bool:
                lighthouse = cluster.lighthouse
                room.vain = room.vain or lighthouse.epoch != self._epoch or lighthouse.nobody_comes(room.here)
                return room.vain

            over = cluster.wait(self._name, lambda: joined() or vain(), seconds)
            absent = sorted(set(room.names) - room.here)
            text = f"{', '.join(absent) or 'somebody'} did not come within {seconds:g} s"
            if over and not joined():
                text = "the lighthouse has gone, or all others call for another view"
            if not joined():  # while the lighthouse is away, an honest member may not know of this view
                gone = not cluster.lighthouse.up or cluster.lighthouse.epoch != self._epoch
                raise LinkError(text) if gone else AbsentError(text, absent)
        return _ThreadGroup(cluster, self._name, room.hub, rank, len(members), self._timeouts.transfer)

    def reaches(self, other: Presence) -> bool:
        with self._cluster.time:
            here = self._cluster.lighthouse.incarnation_of(_thread(other))
            return here == other.incarnation and self._cluster.answers(self._name, _thread(other))

    def leave(self) -> None:
        with self._cluster.time:
            self._cluster.lighthouse.leave(self._name)

    def _find(self, seconds: float) -> None:
        """Wait for a lighthouse, and until it has received the heartbeats of the others, too."""
        cluster, lighthouse = self._cluster, self._cluster.lighthouse
        if not lighthouse.up:
            self._observe("retry", {"reason": "no lighthouse", "seconds": seconds})
        with cluster.time:
            if cluster.wait(self._name, lambda: lighthouse.up, seconds):
                self._epoch = lighthouse.epoch
                self._vote_store = SimulatedVoteStore(lighthouse, self._cluster, self._name)
                lighthouse.hear(self._name, self._incarnation)
                cluster.wait(self._name, lambda: False, 2 * self._timeouts.heartbeat_interval)
