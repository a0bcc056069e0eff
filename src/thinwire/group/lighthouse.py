"""Replicas as processes that come and go: they find each other at a lighthouse.

The coordinator is one process with two neighbouring ports: torchft's lighthouse (who is alive, who calls) and torch's
TCPStore (votes, and how a group is connected). Packets never pass through it. It keeps nothing that a round after
this one needs, so it may die and start again: replicas that hold a group keep it and call again.

Neither is authenticated or encrypted, nor is gloo: whoever reaches the ports can end a run or feed it. Trusted
networks only. Nothing is ever unpickled: torchft carries what replicas say of themselves as JSON (checked here again),
and the store carries plain bytes.

How torchft 0.2.0 behaves, measured, and what follows (for the store see `store.py`):

* A call of `LighthouseClient` keeps its deadline, also when the lighthouse is frozen; its connection comes back by
  itself. It may be used by several threads at once, and lets other Python threads run.
* A replica that stops waiting is still counted as calling while its heart beats. So it calls once more, without a
  word of itself, and the others take it for nobody.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported without saying so

from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.group.base import Group
from thinwire.group.deadlines import Deadlines
from thinwire.group.presence import Presence
from thinwire.group.roster import Observe
from thinwire.group.standin import JOIN
from thinwire.group.store import ANSWER, StoreBoard, open_store, short, within
from thinwire.group.torch import TorchGroup
from thinwire.group.vote import Board

PORT = 29510  # the lighthouse's; the store's is the next
_WHO = "thinwire/lighthouse"
_PROBE = 2.0  # seconds for a peer or a lighthouse to answer at all


def engine() -> Any:
    """torchft's coordination module. Raises `ConfigurationError` where it is not installed."""
    os.putenv("RUST_LOG", "warn")  # else it writes several lines to stderr at every muster
    try:
        import torchft.coordination as coordination
    except ImportError as error:
        raise ConfigurationError(
            f"replicas that come and go need torchft, which is not installed here ({error}). "
            "Install it: pip install 'thinwire[elastic]'"
        ) from None
    return coordination


class Lighthouse:
    """The coordinator, in this process, until `close`: the lighthouse at `port`, the store at the next.

    `host` is the address to listen at: one that the replicas reach, and nobody else. Port 0: two that are free.
    Raises `LinkError` if a port is taken or the address is not of this machine.
    """

    def __init__(self, host: str, port: int = PORT, heartbeat_timeout: float = 5.0) -> None:
        servers = engine()
        for _ in range(20 if port == 0 else 1):
            try:
                first = socket.create_server((host, port), family=_family(host))
                self.port = first.getsockname()[1]
                with first:
                    second = socket.create_server((host, self.port + 1), family=_family(host))
                break
            except (OSError, OverflowError) as error:
                failure = error
        else:
            raise LinkError(
                f"cannot listen at {_at(host, port)} and the next port ({failure}). Give an address of this machine, "
                "and two neighbouring ports that nothing else holds."
            )
        self.host = host
        # The store takes the socket over, and would listen at every address of the machine if it were not given one.
        self._store = TCPStore(
            host, self.port + 1, None, is_master=True, wait_for_workers=False, master_listen_fd=second.detach()
        )
        self._store.set(_WHO, json.dumps({"heartbeat_timeout": heartbeat_timeout}))
        try:
            self._server = servers.LighthouseServer(
                bind=_at(host, self.port),
                min_replicas=1,  # the rosters know how many they need
                join_timeout_ms=round(1000 * JOIN),  # the grace is the rosters' own
                quorum_tick_ms=50,
                heartbeat_timeout_ms=round(1000 * heartbeat_timeout),
            )
        except RuntimeError as error:
            raise LinkError(f"the lighthouse cannot listen at {self.address} ({error}). Choose another port.") from None

    @property
    def address(self) -> str:
        """As replicas are told it."""
        return _at(self.host, self.port)

    def close(self) -> None:
        """Stop listening. Connections end with the process."""
        self._server.shutdown()


class LighthouseMeeting:
    """One replica's view of a lighthouse at `address` (host:port, the port of the lighthouse itself).

    `host` is this machine's address, at which the others reach it; without, the one from which it reaches the
    lighthouse. Behind a NAT there is no such address: use a tunnel.
    """

    def __init__(self, address: str, host: str | None = None) -> None:
        self._engine = engine()
        self._lighthouse, self._port = _parse(address)
        self._host = host or _own_address(self._lighthouse, self._port)
        self._deadlines = Deadlines()
        self._observe: Observe = lambda kind, fields: None
        self._id = self._life = ""
        self._coordinator: Any = None
        self._board: StoreBoard | None = None
        self._left = threading.Event()
        self._litter: list[str] = []  # keys to delete, by the heart, which has time
        self._door: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def address(self) -> str:
        return _at(self._host, self._door.getsockname()[1]) if self._door else self._host

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._left.wait(seconds)

    def arrive(self, name: str, life: str, deadlines: Deadlines, observe: Observe) -> None:
        self._life, self._id, self._deadlines, self._observe = life, f"{name}:{life}", deadlines, observe
        try:
            self._door = socket.create_server((self._host, 0), family=_family(self._host))
        except OSError as error:
            raise LinkError(
                f"cannot listen at {self._host} ({error}). Give the address of this machine that the others reach."
            ) from None
        for body in (self._answer, self._beat):
            self._threads.append(
                threading.Thread(target=body, name=f"thinwire-{body.__name__.strip('_')}", daemon=True)
            )
            self._threads[-1].start()

    def call(self, presence: Presence, seconds: float) -> tuple[Sequence[Presence], Board]:
        until = self.clock() + seconds
        said = json.loads(presence.to_json())
        while (left := until - self.clock()) > 0:
            board = self._found(left)
            left = until - self.clock()
            if left <= 0:
                break
            try:
                quorum = self._coordinator.quorum(self._id, timedelta(seconds=left), data=said)
            except TimeoutError:
                with suppress(RuntimeError, TimeoutError):
                    self._coordinator.quorum(self._id, timedelta(seconds=0.5))
                break
            except RuntimeError as error:
                self._retry(f"the lighthouse at {self._where()} has gone ({short(error)})", 0.5)
                self._board = None
                continue
            return [p for p in map(_heard, quorum.participants) if p is not None], board
        raise LinkError(
            f"nobody else called at the lighthouse {self._where()}, or "
            "too many are late. Start the others, or wait for longer."
        )

    def connect(self, chapter: str, members: Sequence[Presence], rank: int) -> Group:
        seconds, timeout = self._deadlines.connect, self._deadlines.transfer
        board = self._board
        if board is None:
            raise LinkError("the lighthouse has gone")

        def build() -> dist.ProcessGroup:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=seconds)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
            store = PrefixStore(f"group/{chapter}", board.connection())
            made: dist.ProcessGroup = dist.ProcessGroupGloo(store, rank, len(members), options)  # type: ignore[assignment]
            return made

        others = ", ".join(p.name for p in members if p.life != self._life)
        return TorchGroup(within(2 * seconds, f"connecting to {others}", build), timeout)

    def reaches(self, other: Presence) -> bool:
        try:
            host, port = _parse(other.address)
            with socket.create_connection((host, port), timeout=_PROBE) as line:
                line.settimeout(_PROBE)
                return line.recv(64) == other.life.encode()
        except (OSError, ConfigurationError):
            return False

    def leave(self) -> None:
        self._left.set()
        if self._door is not None:
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # or who waits at it would not hear that it closes
            self._door.close()
        for thread in self._threads:  # one that came back from torchft while Python ends would abort the process
            thread.join(2 * _PROBE)

    # ---- the coordinator

    def _found(self, seconds: float) -> StoreBoard:
        """The board of a lighthouse that answers; one that is new is given time to hear the others, too."""
        if self._board is not None:
            try:
                self._board.all([_WHO])
                return self._board
            except LinkError as error:
                self._board = None
                self._retry(f"the lighthouse at {self._where()} has gone ({error})", 0.0)
        until, pause = self.clock() + seconds, 0.5
        while True:
            try:
                self._board = self._open()
                break
            except LinkError as error:
                if self._left.is_set() or self.clock() + pause > until:
                    raise LinkError(
                        f"{error} Waited {seconds:.0f} s. Start one with `thinwire lighthouse`, and check that this "
                        f"machine reaches it: ports {self._port} and {self._port + 1}."
                    ) from None
                self._retry(str(error), pause)
            self.sleep(pause)
            pause = min(2 * pause, 10.0)
        self.sleep(2 * self._deadlines.heartbeat_interval)
        return self._board

    def _open(self) -> StoreBoard:
        """Raises `LinkError`: nothing there, or something else."""
        for port in (self._port, self._port + 1):
            try:
                socket.create_connection((self._lighthouse, port), timeout=_PROBE).close()
            except OSError as error:
                raise LinkError(f"no lighthouse at {self._where()}: port {port} says {error}.") from None
        what = f"the lighthouse at {self._where()}"
        try:
            board = StoreBoard(within(ANSWER, what, lambda: open_store(self._lighthouse, self._port + 1)), self._litter)
            if not board.all([_WHO]):
                raise LinkError(f"{what}: its store is not one of Thinwire's.")
            if self._coordinator is None:
                make = self._engine.LighthouseClient
                self._coordinator = make(f"http://{self._where()}", timedelta(seconds=_PROBE))
            self._coordinator.heartbeat(self._id, timedelta(seconds=_PROBE))
            self._compare(json.loads(board.get(_WHO)))
        except (RuntimeError, TimeoutError, ValueError, TypeError) as error:
            raise LinkError(f"{what} does not answer as one: {short(error)}.") from None
        return board

    def _compare(self, theirs: dict[str, float]) -> None:
        """A lighthouse that was started for another run counts other seconds: say so once, and go on."""
        there, here = theirs["heartbeat_timeout"], self._deadlines.heartbeat_timeout
        if not 0.5 * here <= there <= 2 * here:
            reason = f"the lighthouse at {self._where()} takes a replica for dead after {there:g} s, this run needs {here:.3g}"
            self._retry(f"{reason}: start it with --heartbeat-timeout {here:.3g}", 0.0)

    def _beat(self) -> None:
        """Say that this process lives: a thread that waits for nothing else."""
        interval, missed = self._deadlines.heartbeat_interval, 0
        store: StoreBoard | None = None
        while not self._left.wait(interval):
            if self._coordinator is None:
                continue
            try:
                self._coordinator.heartbeat(self._id, timedelta(seconds=max(interval, _PROBE)))
                missed = 0
            except (RuntimeError, TimeoutError) as error:
                missed += 1
                if missed == 3:
                    self._retry(
                        f"the lighthouse at {self._where()} does not hear this replica ({short(error)})", interval
                    )
            if self._litter and not missed:
                keys = [self._litter.pop() for _ in range(len(self._litter))]
                try:
                    store = store or StoreBoard(open_store(self._lighthouse, self._port + 1), [])
                    store.delete(keys)
                except (LinkError, RuntimeError):
                    store = None

    def _answer(self) -> None:
        """Tell whoever knocks who lives here."""
        assert self._door is not None
        while True:
            try:
                line, _ = self._door.accept()
            except OSError:
                return
            with line, suppress(OSError):
                line.sendall(self._life.encode())

    def _retry(self, reason: str, seconds: float) -> None:
        self._observe("retry", {"reason": reason, "seconds": seconds})

    def _where(self) -> str:
        return _at(self._lighthouse, self._port)


def _heard(participant: Any) -> Presence | None:
    """What a participant says of itself; None for one that is no replica of ours."""
    try:
        return Presence.from_json(json.dumps(participant.data))
    except (PacketError, TypeError, ValueError):
        return None


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":") if ":" in address.rpartition("]")[2] else (address, ":", str(PORT))
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65535):
        raise ConfigurationError(f"the address {address!r} was given; HOST:PORT is needed, as 10.0.0.1:{PORT}.")
    return host.strip("[]"), int(port)


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(host: str, port: int) -> str:
    """The address from which packets to `host` leave. Sends nothing."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LinkError(
            f"the lighthouse {_at(host, port)} has no address that is reached from here ({error})."
        ) from None
