"""A simulated lighthouse with its vote store, in one process and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from thinwire.errors import LinkError
from thinwire.membership.commit import NO, YES, Electorate, ballot_of, keys_of
from thinwire.membership.registry import JOIN_SECONDS, nobody_comes, quorum, will_not_vote
from thinwire.membership.testing.clock import VirtualTime
from thinwire.membership.view import Presence


class Cluster(Protocol):
    """The part of the cluster that the lighthouse uses: time, and waits, phases and liveness of replicas."""

    time: VirtualTime

    def wait(self, name: str, predicate: Callable[[], bool], seconds: float | None) -> bool: ...

    def passing(self, name: str, phase: str) -> None: ...

    def beats(self, name: str) -> bool: ...


class SimulatedLighthouse:
    """Live replicas, calls for a view, and the vote store. Call it with the lock of its cluster held."""

    def __init__(self, cluster: Cluster, heartbeat_timeout: float) -> None:
        self.cluster, self.heartbeat_timeout = cluster, heartbeat_timeout
        self.up = True
        self.epoch = 0
        self.written: dict[str, bytes] = {}
        self._names: dict[str, str] = {}  # by name: its live incarnation
        self._spoken: dict[str, str] = {}  # by incarnation: its name
        self._silent: dict[str, float] = {}  # by incarnation: since when it is silent
        self._calls: dict[str, tuple[float, Presence | None]] = {}  # by incarnation: the time of its call
        self._previous: set[str] = set()
        self._answers: dict[str, list[Presence]] = {}

    def stop(self) -> None:
        """Lose all state, as if its process was killed."""
        with self.cluster.time:
            self.up, self.epoch = False, self.epoch + 1
            self.written, self._calls, self._previous, self._answers = {}, {}, set(), {}
            self._silent = {incarnation: float("-inf") for incarnation in self._silent.keys() | self._names.values()}
            self.cluster.time.notify_all()

    def start(self) -> None:
        """Restart: it receives the next heartbeat of each replica within a second, one by one."""
        with self.cluster.time:
            self.up = True
            self.cluster.time.after(1.0, self.hear_again)
            self.cluster.time.notify_all()

    def hear(self, name: str, incarnation: str) -> None:
        """Receive heartbeats of `incarnation` from now on."""
        self._names[name] = incarnation
        self._spoken[incarnation] = name
        self._silent.pop(incarnation, None)

    def incarnation_of(self, name: str) -> str:
        """The present incarnation of `name`; "" if it has left."""
        return self._names.get(name, "")

    def hear_again(self) -> None:
        """Receive a heartbeat of every live replica that is not frozen."""
        for name, incarnation in self._names.items():
            if self.cluster.beats(name):
                self._silent.pop(incarnation, None)

    def silence(self, name: str) -> None:
        """Receive no heartbeats of `name` from now on."""
        if name in self._names:
            self._silent.setdefault(self._names[name], self.cluster.time.now)
            self.cluster.time.after(self.heartbeat_timeout)

    def leave(self, name: str) -> None:
        """Remove `name`; it does not come back."""
        self.silence(name)
        self._names.pop(name, None)

    def call(self, name: str, presence: Presence, seconds: float) -> list[Presence]:
        """Wait for the answer of `quorum`. Raises `LinkError`."""
        incarnation, epoch = presence.incarnation, self.epoch
        self.hear(name, incarnation)
        self._answers.pop(incarnation, None)  # to an earlier call, which it has given up
        self._calls[incarnation] = (self.cluster.time.now, presence)
        self.cluster.time.after(JOIN_SECONDS)
        self.cluster.time.notify_all()

        def answered() -> bool:
            self._look()
            return incarnation in self._answers or self.epoch != epoch

        in_time = self.cluster.wait(name, answered, seconds)
        if self.epoch != epoch:
            raise LinkError("the lighthouse has gone")
        if not in_time:
            self._calls[incarnation] = (self.cluster.time.now, None)  # like a replica that gives up
            raise LinkError(f"no view within {seconds:g} s: too few others called")
        return self._answers.pop(incarnation)

    def nobody_comes(self, names: Collection[str]) -> bool:
        """Whether these replicas, which connect, wait in vain for others of their view."""
        calling = [incarnation for incarnation, (_, presence) in self._calls.items() if presence is not None]
        return nobody_comes([self._names.get(name, "") for name in names], self._heard(), calling)

    def will_not_vote(self, missing: Collection[str]) -> bool:
        """Whether a vote waits in vain for these incarnations."""
        return will_not_vote(missing, self._heard(), self._calls)

    def _heard(self) -> set[str]:
        now = self.cluster.time.now
        return {
            incarnation
            for incarnation in {*self._names.values(), *self._calls, *self._silent}
            if now - self._silent.get(incarnation, now) < self.heartbeat_timeout
        }

    def _look(self) -> None:
        now, heard = (
            self.cluster.time.now,
            {incarnation: self._spoken.get(incarnation, incarnation) for incarnation in self._heard()},
        )
        calling = {incarnation: since for incarnation, (since, _) in self._calls.items()}
        chosen = quorum(calling, heard, self._previous, now, JOIN_SECONDS)
        if chosen:
            calls = [self._calls[incarnation][1] for incarnation in sorted(chosen)]
            present = [presence for presence in calls if presence is not None]
            self._answers |= {incarnation: list(present) for incarnation in chosen}
            self._previous, self._calls = chosen, {}
            self.cluster.time.notify_all()


class SimulatedVoteStore:
    """The vote store of one lighthouse; it ends with it. See `VoteStore`."""

    def __init__(
        self,
        lighthouse: SimulatedLighthouse,
        cluster: Cluster,
        name: str,
        members: Electorate = (),
        epoch: int | None = None,
    ) -> None:
        self._lighthouse, self._cluster, self._name, self._members = lighthouse, cluster, name, members
        self._epoch = lighthouse.epoch if epoch is None else epoch

    def of(self, members: Electorate) -> SimulatedVoteStore:
        return SimulatedVoteStore(self._lighthouse, self._cluster, self._name, members, self._epoch)

    def put(self, key: str, value: str = "1") -> None:
        self._cluster.passing(self._name, "put")
        with self._cluster.time:
            self._written()[key] = value.encode()
            self._cluster.time.notify_all()  # it may be the last ballot that others wait for

    def all(self, keys: Sequence[str]) -> bool:
        self._cluster.passing(self._name, "all")
        with self._cluster.time:
            written = self._written()
            values = {written.get(key) for key in keys}
            return None not in values and len(values) == 1

    def values(self, keys: Sequence[str]) -> list[str | None]:
        with self._cluster.time:
            written = self._written()
            return [written[key].decode() if key in written else None for key in keys]

    def settle(self, key: str, value: bytes) -> bytes:
        self._cluster.passing(self._name, "settle")
        with self._cluster.time:
            self._cluster.time.notify_all()
            return self._written().setdefault(key, value)

    def wait(self, key: str, seconds: float) -> bytes | None:
        self._cluster.passing(self._name, "wait")
        _, ballots = keys_of(key.rpartition("/")[0], len(self._members))
        with self._cluster.time:

            def missing() -> list[str]:
                written = self._lighthouse.written
                return [who for ballot, (_, who, _) in zip(ballots, self._members) if ballot not in written]

            def over() -> bool:
                if self._gone() or self._lighthouse.written.get(key) == YES:
                    return True
                return bool(self._members) and self._lighthouse.will_not_vote(missing())

            self._cluster.wait(self._name, over, seconds)
            voted = self._members and not self._gone() and key not in self._lighthouse.written and not missing()
            alike = len({self._lighthouse.written.get(ballot) for ballot in ballots}) == 1
            return self.settle(key, YES if alike else NO) if voted else self._written().get(key)

    def report(self, text: str) -> None:
        """See `VoteStore`."""

    def forget(self, keys: Sequence[str]) -> None:
        with self._cluster.time, suppress(LinkError):
            for key in keys:
                self._written().pop(key, None)
                if (voted := ballot_of(key)) and not any(
                    other and other.question == voted.question for other in map(ballot_of, self._written())
                ):
                    self._written().pop(keys_of(voted.question, 0)[0], None)

    def _gone(self) -> bool:
        return self._epoch != self._lighthouse.epoch

    def _written(self) -> dict[str, bytes]:
        if self._gone():
            raise LinkError("the lighthouse has gone, and what was written with it")
        return self._lighthouse.written
