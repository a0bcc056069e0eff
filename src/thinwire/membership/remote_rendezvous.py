"""A rendezvous at a server that keeps a `MemberRegistry`: a lighthouse (lighthouse.py) or a hub (hub.py).

Requests go over channels, one at a time: one channel for views and votes, one for heartbeats. The two subclasses open channels,
build groups, and say whether another replica can be reached.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from thinwire.comm.group import Group
from thinwire.errors import DisagreementError, LinkError, PacketError
from thinwire.membership.channel import ANSWER_SECONDS
from thinwire.membership.commit import VoteStore
from thinwire.membership.rendezvous import AnswerLostError
from thinwire.membership.store import ChannelVoteStore, RequestChannel
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Observe, Presence

PROBE_SECONDS = 2.0  # seconds within which a peer, a lighthouse or a hub must answer


class RemoteRendezvous(ABC):
    """The common part of a lighthouse's and a hub's. `where` names the server in messages; `advice` is shown if it is not found, unless
    the errors of its channels have advice."""

    where = advice = ""
    relays = False

    def __init__(self) -> None:
        self._timeouts = Timeouts()
        self._observe: Observe = lambda kind, fields: None
        self._name = self._incarnation = ""
        self._secret = b""
        self._vote_store: ChannelVoteStore | None = None
        self._lost = 0  # calls in a row whose answers were lost
        self._left = threading.Event()
        self._unused_keys: list[str] = []  # keys for the heartbeat thread to delete
        self._refused: set[str] = set()
        self._threads: list[threading.Thread] = []

    @property
    @abstractmethod
    def address(self) -> str:
        """See `Rendezvous`."""

    @abstractmethod
    def _channel(self) -> RequestChannel:
        """A new channel. Raises `LinkError`."""

    @abstractmethod
    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        """See `Rendezvous`."""

    @abstractmethod
    def reaches(self, other: Presence) -> bool:
        """See `Rendezvous`."""

    def clock(self) -> float:
        """See `Rendezvous`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `Rendezvous`."""
        self._left.wait(seconds)

    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        """See `Rendezvous`."""
        self._name, self._incarnation, self._secret = name, incarnation, secret
        self._timeouts, self._observe = timeouts, observe
        self._begin(self._beat)

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        """See `Rendezvous`."""
        until = self.clock() + seconds
        text = presence.to_json()
        vote_store = None if self._left.is_set() else self._found(seconds)
        if vote_store is not None and (left := until - self.clock()) > 0:
            try:
                present = vote_store.channel.ask("call", left, presence=text)["present"]
            except LinkError as error:
                self._lose()
                self._lost = min(self._lost + 1, 32)
                reason = f"{self.where} has gone ({error})"
                self._retry(reason, 0.5)
                raise AnswerLostError(reason) from None
            self._lost = 0
            if present is not None:
                heard = [self._heard(str(name), str(incarnation), str(text)) for name, incarnation, text in present]
                return [p for p in heard if p is not None], vote_store
        if self._left.is_set():
            raise LinkError(f"replica {self._name!r} has left {self.where}.")
        raise LinkError(
            f"no other replica called at {self.where}, or too many are late. Start the others, or wait longer."
        )

    def leave(self) -> None:
        """See `Rendezvous`."""
        self._left.set()
        for thread in self._threads:
            # the heartbeat thread may be waiting for a response; it tells the server afterwards
            thread.join(2 * ANSWER_SECONDS + 2 * PROBE_SECONDS)
        self._lose()

    def _begin(self, body: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=body, name=f"thinwire-{body.__name__.strip('_')}", daemon=True))
        self._threads[-1].start()

    def _lose(self) -> None:
        lost, self._vote_store = self._vote_store, None
        if lost is not None:
            lost.channel.close()

    def _found(self, seconds: float) -> ChannelVoteStore:
        """The vote store of a server that responds. A server that may not know the other replicas yet gets time to receive their
        heartbeats.
        """
        if self._vote_store is not None:
            try:
                self._vote_store.channel.ask("beat")
                return self._vote_store
            except LinkError as error:
                self._lose()
                self._retry(f"{self.where} has gone ({error})", 0.0)
        until, pause = self.clock() + seconds, min(0.5, self._timeouts.heartbeat_interval)
        while True:
            try:
                channel = self._channel()
                break
            except LinkError as error:
                told = str(error).rstrip(".")
                told = told if self.where in told else f"{self.where} does not serve this replica ({told})"
                if self._left.is_set() or self.clock() + pause > until:
                    raise LinkError(f"{told}. Waited {seconds:.0f} s. {self.advice}".rstrip()) from None
                self._retry(told, pause)
            self.sleep(pause)
            pause = min(2 * pause, self._timeouts.heartbeat_interval)  # so that all are back at about the same time
        self._vote_store = ChannelVoteStore(channel, self._unused_keys)
        self._compare(channel.heartbeat_timeout)
        heartbeats = 2 * self._timeouts.heartbeat_interval
        if not channel.begun:
            self.sleep(heartbeats)
        elif self._lost > 1:  # a server that answers no call, although it is found
            self.sleep(min(0.1 * 2 ** (self._lost - 2), heartbeats))
        if self._left.is_set():  # another thread left meanwhile, and could not close a channel that did not exist yet
            self._lose()
            raise LinkError(f"replica {self._name!r} has left {self.where}.")
        return self._vote_store

    def _compare(self, there: float) -> None:
        """Warn once if the server, started for another run, has another heartbeat timeout."""
        here = self._timeouts.heartbeat_timeout
        if not 0.5 * here <= there <= 2 * here:
            reason = f"{self.where} takes a replica for dead after {there:g} s, this run needs {here:.3g}"
            self._retry(f"{reason}: start it with --heartbeat-timeout {here:.3g}", 0.0)

    def _beat(self) -> None:
        """The heartbeat thread; it does nothing else."""
        interval, missed = self._timeouts.heartbeat_interval, 0
        channel: RequestChannel | None = None
        while not self._left.wait(0.0 if missed == 1 else interval):  # a connection may have been forgotten on the way
            if self._vote_store is None and channel is None:
                continue  # it has not been found yet
            try:
                channel = channel or self._channel()
                channel.ask("beat")
                if keys := self._unused_keys[:256]:
                    channel.ask("forget", keys=keys)
                    del self._unused_keys[: len(keys)]  # not before: the connection may end
                missed = 0
            except (LinkError, DisagreementError) as error:  # `call` raises the latter
                channel = None
                missed += 1
                if missed == 3:
                    self._retry(f"{self.where} does not hear this replica ({error})", interval)
        if channel is not None:
            with suppress(LinkError):
                channel.ask("leave")
            channel.close()

    def _heard(self, name: str, incarnation: str, text: str) -> Presence | None:
        """Another replica's presence; None, with one warning, if it is of another version or under another name."""
        try:
            presence = Presence.from_json(text)
            if (presence.name, presence.incarnation) != (name, incarnation):
                raise PacketError(f"it calls itself {presence.name}")
            return presence
        except PacketError as error:
            if name not in self._refused:
                self._refused.add(name)
                self._retry(f"{name} is not heard: {error}", 0.0)
            return None

    def _retry(self, reason: str, seconds: float) -> None:
        self._observe("retry", {"reason": reason, "seconds": seconds})
