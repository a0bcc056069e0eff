"""Elastic replicas as processes: they find each other at a lighthouse (membership/server.py).

With a run secret (`Membership(..., secret=...)`) the lighthouse accepts only replicas that hold it, and replicas accept only a
lighthouse that holds it. Messages are not encrypted, and gloo, which carries the packets, does not authenticate, so use it only on
private networks and in tunnels. Nothing is unpickled: a presence is JSON, and is checked here again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from thinwire.comm.group import Group
from thinwire.comm.sockets import kept_from_children
from thinwire.comm.torch import TorchGroup, connect
from thinwire.errors import ConfigurationError, LinkError
from thinwire.membership.channel import LIGHTHOUSE_PORT, Channel, at, family
from thinwire.membership.remote_rendezvous import PROBE_SECONDS, RemoteRendezvous
from thinwire.membership.server import Lighthouse as Lighthouse
from thinwire.membership.store import EpochStore
from thinwire.membership.timeouts import Timeouts
from thinwire.membership.view import Observe, Presence


class LighthouseRendezvous(RemoteRendezvous):
    """One replica's connection to a lighthouse, at which the members of an elastic run find each other.

    Args:
        address: the lighthouse's, as HOST:PORT.
        host: the address of this machine at which the other replicas reach it; None: the one from which it reaches the lighthouse. A machine
            behind a NAT has no such address: use a hub (`net/rendezvous.py`), or a tunnel.

    Raises:
        ConfigurationError: `address` is not of this form.
        LinkError: this machine has no address from which the lighthouse can be reached.

    >>> LighthouseRendezvous("10.0.0.1:29510", host="10.0.0.2").where
    'the lighthouse at 10.0.0.1:29510'
    """

    def __init__(self, address: str, host: str | None = None) -> None:
        super().__init__()
        self._lighthouse, self._port = _parse(address)
        self.where = f"the lighthouse at {at(self._lighthouse, self._port)}"
        self._host = host or _own_address(self._lighthouse, self._port)
        self._address = self._host  # with the port as soon as it listens
        self._addresses: list[str] = []  # keys of the last group's addresses
        self._listener: socket.socket | None = None

    def away(self) -> str:
        """Why nothing answers at its address within 2 s, with what to do; empty if something does."""
        try:
            socket.create_connection((self._lighthouse, self._port), timeout=2.0).close()
        except OSError as error:
            return (
                f"{self.where} does not answer ({error.strerror or error}). Start one with `thinwire lighthouse`, and check that this machine "
                f"reaches it: port {self._port}."
            )
        return ""

    @property
    def address(self) -> str:
        """See `Rendezvous`."""
        return self._address

    @kept_from_children()
    def arrive(self, name: str, incarnation: str, secret: bytes, timeouts: Timeouts, observe: Observe) -> None:
        """See `Rendezvous`. Raises `LinkError` if this machine does not have the address."""
        try:
            self._listener = socket.create_server((self._host, 0), family=family(self._host))
        except OSError as error:
            raise LinkError(
                f"cannot listen at {self._host} ({error}). Give the address of this machine that the others reach."
            ) from None
        self._address = at(self._host, self._listener.getsockname()[1])
        super().arrive(name, incarnation, secret, timeouts, observe)
        self._begin(self._answer)

    def connect(self, epoch: str, members: Sequence[Presence], rank: int) -> Group:
        """See `Rendezvous`."""
        seconds, timeout = self._timeouts.connect, self._timeouts.transfer
        self._unused_keys.extend(self._addresses)  # the addresses of the previous epoch
        addresses = EpochStore(self._channel(), epoch, seconds)
        self._addresses = addresses.own
        try:
            return TorchGroup(connect(addresses, rank, len(members), self._host, seconds), timeout)
        except LinkError as error:
            others = ", ".join(p.name for p in members if p.incarnation != self._incarnation)
            raise LinkError(f"connecting to {others} failed: {error}") from error
        finally:
            addresses.close()

    def reaches(self, other: Presence) -> bool:
        """See `Rendezvous`."""
        try:
            host, port = _parse(other.address)
            with socket.create_connection((host, port), timeout=PROBE_SECONDS) as line:
                line.settimeout(PROBE_SECONDS)
                return line.recv(64) == other.incarnation.encode()
        except (OSError, ConfigurationError):
            return False

    def leave(self) -> None:
        """See `Rendezvous`."""
        self._left.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # otherwise a thread blocked in accept() would not return
            self._listener.close()
        super().leave()

    @kept_from_children()
    def _channel(self) -> Channel:
        return Channel(self._lighthouse, self._port, self._name, self._incarnation, self._secret, PROBE_SECONDS)

    def _answer(self) -> None:
        """Send the incarnation of this process over each new connection."""
        assert self._listener is not None
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                if self._left.wait(0.1):
                    return
                continue  # no file descriptor is free, for now
            with line, suppress(OSError):
                line.sendall(self._incarnation.encode())


def _parse(address: str) -> tuple[str, int]:
    host, _, port = (
        address.rpartition(":") if ":" in address.rpartition("]")[2] else (address, ":", str(LIGHTHOUSE_PORT))
    )
    host = host.strip("[]")
    try:
        host.encode("idna")  # as a socket does
    except UnicodeError:
        host = ""
    if not (host and port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 65536):
        raise ConfigurationError(
            f"the address {address!r} was given; HOST:PORT is needed, as 10.0.0.1:{LIGHTHOUSE_PORT}."
        )
    return host, int(port)


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
