"""Replicas as processes that come and go: they find each other at a lighthouse (membership/server.py).

With a run secret (`Membership(..., secret=...)`) the lighthouse hears only those who hold it, and the replicas believe only
a lighthouse that does. Nothing is encrypted, and gloo, which carries the packets, does not authenticate: private
networks and tunnels only. Nothing is ever unpickled: what replicas say of themselves is JSON, checked here again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from thinwire.comm.group import Group
from thinwire.comm.torch import TorchGroup, connected
from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.membership.channel import ANSWER, PORT, Channel, at, family
from thinwire.membership.commit import VoteStore
from thinwire.membership.server import Lighthouse as Lighthouse
from thinwire.membership.store import AddressBook, ChannelVoteStore
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Observe, Presence

_PROBE = 2.0  # seconds for a peer or a lighthouse to answer at all


class LighthouseRendezvous:
    """One replica's view of a lighthouse at `address` (host:port).

    `host` is this machine's address, at which the others reach it; without, the one from which it reaches the
    lighthouse. Behind a NAT there is no such address: use a tunnel.
    """

    def __init__(self, address: str, host: str | None = None) -> None:
        self._lighthouse, self._port = _parse(address)
        self._host = host or _own_address(self._lighthouse, self._port)
        self._address = self._host  # with the port, as soon as it listens
        self._timeouts = Timeouts()
        self._observe: Observe = lambda kind, fields: None
        self._name = self._incarnation = ""
        self._secret = b""
        self._vote_store: ChannelVoteStore | None = None
        self._left = threading.Event()
        self._unused_keys: list[str] = []  # keys for the heartbeat thread to delete
        self._addresses: list[str] = []  # keys of the last group's
        self._refused: set[str] = set()
        self._door: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def address(self) -> str:
        return self._address

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._left.wait(seconds)

    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        self._name, self._incarnation, self._secret = name, incarnation, secret
        self._timeouts, self._observe = timeouts, observe
        try:
            self._door = socket.create_server((self._host, 0), family=family(self._host))
        except OSError as error:
            raise LinkError(
                f"cannot listen at {self._host} ({error}). Give the address of this machine that the others reach."
            ) from None
        self._address = at(self._host, self._door.getsockname()[1])
        for body in (self._answer, self._beat):
            self._threads.append(
                threading.Thread(target=body, name=f"thinwire-{body.__name__.strip('_')}", daemon=True)
            )
            self._threads[-1].start()

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], VoteStore]:
        until = self.clock() + seconds
        text = presence.to_json()
        while (left := until - self.clock()) > 0 and not self._left.is_set():
            vote_store = self._found(left)
            left = until - self.clock()
            if left <= 0:
                break
            if self._left.is_set():  # this replica left while it was looking for the lighthouse
                self._lose()
                raise LinkError(f"this replica has left the lighthouse at {self._where()}.")
            try:
                present = vote_store.channel.ask("call", left, presence=text)["present"]
            except LinkError as error:
                self._retry(f"the lighthouse at {self._where()} has gone ({error})", 0.5)
                self._lose()
                continue
            if present is None:
                break
            heard = [self._heard(str(name), str(incarnation), str(text)) for name, incarnation, text in present]
            return [p for p in heard if p is not None], vote_store
        if self._left.is_set():
            raise LinkError(f"replica {self._name!r} has left the lighthouse {self._where()}.")
        raise LinkError(
            f"no other replica called at the lighthouse {self._where()}, or "
            "too many are late. Start the others, or wait longer."
        )

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        seconds, timeout = self._timeouts.connect, self._timeouts.transfer
        self._unused_keys.extend(self._addresses)  # of an epoch that is over
        book = AddressBook(self._channel(), epoch, seconds)
        self._addresses = book.own
        try:
            return TorchGroup(connected(book, rank, len(members), self._host, seconds), timeout)
        except LinkError as error:
            others = ", ".join(p.name for p in members if p.incarnation != self._incarnation)
            raise LinkError(f"connecting to {others}: {error}") from error
        finally:
            book.close()

    def reaches(self, other: Presence) -> bool:
        try:
            host, port = _parse(other.address)
            with socket.create_connection((host, port), timeout=_PROBE) as line:
                line.settimeout(_PROBE)
                return line.recv(64) == other.incarnation.encode()
        except (OSError, ConfigurationError):
            return False

    def leave(self) -> None:
        self._left.set()
        if self._door is not None:
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # or who waits at it would not hear that it closes
            self._door.close()
        for thread in self._threads:
            thread.join(
                2 * ANSWER + 2 * _PROBE
            )  # the heartbeat thread may wait for an answer, and says then that it leaves
        self._lose()

    # ---- the lighthouse

    def _channel(self) -> Channel:
        return Channel(self._lighthouse, self._port, self._name, self._incarnation, self._secret, _PROBE)

    def _lose(self) -> None:
        lost, self._vote_store = self._vote_store, None
        if lost is not None:
            lost.channel.close()

    def _found(self, seconds: float) -> ChannelVoteStore:
        """The vote store of a lighthouse that answers; one that is new is given time to hear the others, too."""
        if self._vote_store is not None:
            try:
                self._vote_store.channel.ask("beat")
                return self._vote_store
            except LinkError as error:
                self._lose()
                self._retry(f"the lighthouse at {self._where()} has gone ({error})", 0.0)
        until, pause = self.clock() + seconds, 0.5
        while True:
            try:
                channel = self._channel()
                break
            except LinkError as error:
                if self._left.is_set() or self.clock() + pause > until:
                    raise LinkError(
                        f"{error} Waited {seconds:.0f} s. Start one with `thinwire lighthouse`, and check that this "
                        f"machine reaches it: port {self._port}."
                    ) from None
                self._retry(str(error), pause)
            self.sleep(pause)
            pause = min(2 * pause, 10.0)
        self._vote_store = ChannelVoteStore(channel, self._unused_keys)
        self._compare(channel.heartbeat_timeout)
        self.sleep(2 * self._timeouts.heartbeat_interval)
        if self._left.is_set():  # meanwhile, on another thread, which could not close what was not there yet
            self._lose()
            raise LinkError(f"replica {self._name!r} has left the lighthouse {self._where()}.")
        return self._vote_store

    def _compare(self, there: float) -> None:
        """A lighthouse that was started for another run counts other seconds: say so once, and go on."""
        here = self._timeouts.heartbeat_timeout
        if not 0.5 * here <= there <= 2 * here:
            reason = f"the lighthouse at {self._where()} takes a replica for dead after {there:g} s, this run needs {here:.3g}"
            self._retry(f"{reason}: start it with --heartbeat-timeout {here:.3g}", 0.0)

    def _beat(self) -> None:
        """Say that this process is alive: a thread that waits for nothing else."""
        interval, missed = self._timeouts.heartbeat_interval, 0
        channel: Channel | None = None
        while not self._left.wait(interval):
            if self._vote_store is None and channel is None:
                continue  # it has not been found yet
            try:
                channel = channel or self._channel()
                channel.ask("beat")
                if self._unused_keys:
                    channel.ask(
                        "forget", keys=[self._unused_keys.pop() for _ in range(min(len(self._unused_keys), 256))]
                    )
                missed = 0
            except LinkError as error:
                channel = None
                missed += 1
                if missed == 3:
                    self._retry(f"the lighthouse at {self._where()} does not hear this replica ({error})", interval)
        if channel is not None:
            with suppress(LinkError):
                channel.ask("leave")
            channel.close()

    def _answer(self) -> None:
        """Tell whoever knocks who is here."""
        assert self._door is not None
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                if self._left.wait(0.1):
                    return
                continue  # no file descriptor is free, for now
            with line, suppress(OSError):
                line.sendall(self._incarnation.encode())

    def _heard(self, name: str, incarnation: str, text: str) -> Presence | None:
        """What a participant says of itself; None, told once, for one whose words are not of this version or not its own."""
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

    def _where(self) -> str:
        return at(self._lighthouse, self._port)


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":") if ":" in address.rpartition("]")[2] else (address, ":", str(PORT))
    if not (colon and host and port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise ConfigurationError(f"the address {address!r} was given; HOST:PORT is needed, as 10.0.0.1:{PORT}.")
    return host.strip("[]"), int(port)


def _own_address(host: str, port: int) -> str:
    """The address from which packets to `host` leave. Sends nothing."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LinkError(
            f"the lighthouse {at(host, port)} has no address that is reached from here ({error})."
        ) from None
