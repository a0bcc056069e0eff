"""The groups at a hub: their members, those that wait for others, and those absent for too long. No I/O except the hub's state."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from typing import NamedTuple

from thinwire.errors import LinkError, PacketError
from thinwire.net import frames
from thinwire.net.audit import AuditLog
from thinwire.net.relay import Connection, PassedOn, Relay, natural
from thinwire.net.state import Grouped, HubState
from thinwire.version import Protocols, common


class GroupRequest(NamedTuple):
    """A process asks to join the group with this label. Ranks follow `place`, then the name."""

    label: bytes
    size: int
    place: int
    protocols: Protocols  # that it speaks with the others
    run: str  # `frames.run_digest`; "": it has stated none, as in an elastic run

    @classmethod
    def read(cls, frame: frames.Frame, run: str) -> GroupRequest:
        """The request in a HELLO, of a process that has stated this digest of its run. Raises `PacketError`."""
        protocols = Protocols.parse(frame.data(4).rstrip(b"\0").decode("ascii", "replace"))
        if protocols is None:
            raise PacketError(f"the list of protocols cannot be read; {frames.SAME_RELEASE}")
        return cls(frame.data(1), frame.number(2), frame.number(3), protocols, run)


Waiting = dict[str, tuple[Connection, GroupRequest]]  # by name


class HubGroups:
    """All groups of a hub.

    Args:
        state: keeps the groups.
        audit: gets a line for each change.
        patience: seconds after which a member that is not connected counts as gone.
        stays: whether members whose group the full disk has no room for stay until it has; if not, the last one is refused.
    """

    def __init__(self, state: HubState, audit: AuditLog, patience: float, stays: bool = True) -> None:
        self._state, self._audit, self._patience, self._stays = state, audit, patience, stays
        self._relays: dict[int, Relay] = {}
        self._waiting: dict[bytes, Waiting] = {}  # by label
        for group in state.groups():
            self._add_relay(group)

    def join(self, connection: Connection, request: GroupRequest) -> None:
        """Add a process to its group, or let it wait until all members have joined. No other process of its name is connected. Raises
        `LinkError`.
        """
        if not 1 <= request.size <= frames.MEMBERS:
            raise LinkError(f"a group of {request.size} members was asked for; 1 to {frames.MEMBERS} are possible")
        if self._reconnects(connection, request.label):
            return
        name, waiting = connection.name, self._waiting.get(request.label, {})
        self._check_size(name, request)
        for other, (_, theirs) in waiting.items():
            if not common([theirs.protocols, request.protocols]):
                raise LinkError(
                    f"{name} speaks protocols {request.protocols}, {other} speaks {theirs.protocols}. Install one release on both, or one "
                    "that speaks a protocol of each, and start them again"
                )
        waiting = self._waiting.setdefault(request.label, waiting)
        waiting[name] = connection, request
        self._audit("waits", name, f"{len(waiting)} of {request.size} have joined")
        try:
            self._form(request.label)
        except sqlite3.Error:
            if not self._stays:
                raise
        if connection.relay is None:
            _tell(waiting)

    def _check_size(self, name: str, request: GroupRequest) -> None:
        """Raise `LinkError` if others of its run wait for a group of another size: neither group would ever be complete."""
        for label, waiting in self._waiting.items():
            for other, (_, theirs) in waiting.items():
                alike = label == request.label or (theirs.run == request.run != "")
                if alike and theirs.size != request.size and other != name:
                    raise LinkError(
                        f"{name} asks for a group of {request.size} members, and {other}, which waits for the same run, for one of {theirs.size}; "
                        "give all replicas the same number, and another run another --group"
                    )

    def form(self) -> None:
        """Form the groups whose members have all come, and which the disk had no room for. Raises `sqlite3.Error` while it has none."""
        for label in list(self._waiting):
            self._form(label)

    def _form(self, label: bytes) -> None:
        waiting = self._waiting[label]
        if any(len(waiting) < request.size or connection.end.is_set() for connection, request in waiting.values()):
            return
        names = _in_order(waiting)
        group = self._state.form(label, tuple((each, waiting[each][0].process) for each in names))
        del self._waiting[label]
        relay = self._add_relay(group)
        self._audit("formed", f"group {group.number}", " ".join(names))
        for rank, each in enumerate(names):
            relay.connect(rank, waiting[each][0])

    def leave(self, connection: Connection, label: bytes) -> None:
        """Called when the streams of this connection have ended."""
        if connection.relay:
            connection.relay.disconnect(connection)
            self._audit("disconnected", connection.name)
            self._drop_if_empty(connection.relay)
            return
        waiting = self._waiting.get(label, {})
        if connection.name in waiting and waiting[connection.name][0] is connection:
            del waiting[connection.name]
            if not waiting:
                del self._waiting[label]
            _tell(waiting)

    def end_vain_waits(self, nobody_comes: Callable[[Collection[str]], bool]) -> None:
        """End the connections of processes that wait for others of their group, where `nobody_comes` is true of them."""
        for waiting in self._waiting.values():
            connections = [connection for connection, _ in waiting.values()]
            if nobody_comes({connection.process.decode("ascii", "replace") for connection in connections}):
                for connection in connections:
                    connection.refusal = "all others call for another view"
                    connection.end.set()

    def revoke(self, names: Collection[str]) -> None:
        """Remove the members with these names permanently."""
        self._remove(frames.REVOKED, lambda relay, rank: relay.group.members[rank][0] in names)

    def remove_absent(self, now: float) -> None:
        """Remove members that have been disconnected for longer than `patience`; they cannot come back."""
        self._remove(frames.LOST, lambda relay, rank: now - relay.away.get(rank, now) > self._patience)

    def _remove(self, reason: int, who: Callable[[Relay, int], bool]) -> None:
        for relay in list(self._relays.values()):
            for rank in range(relay.size):
                if who(relay, rank):
                    relay.leave(rank, reason)
            self._drop_if_empty(relay)

    def _reconnects(self, connection: Connection, label: bytes) -> bool:
        """Whether this process is a member already, and connects again. A new process under the name of a member replaces it, because the old
        one has ended. Raises `LinkError` if this process was removed before.
        """
        name, process = connection.name, connection.process
        if reason := self._state.why_gone(label, name, process):
            raise LinkError(f"the others were told that {name} {reason}; they have stopped, or continue without it")
        for relay in list(self._relays.values()):
            for rank, (other, there) in enumerate(relay.group.members):
                if other != name or relay.group.label != label or rank in relay.gone:
                    continue
                if there == process:
                    self._audit("connected", name)
                    relay.connect(rank, connection)
                    return True
                relay.leave(rank, frames.REPLACED)
        return False

    def _add_relay(self, group: Grouped) -> Relay:
        def gone(rank: int, reason: int) -> None:
            self._state.gone(group.number, rank, reason)
            self._audit("gone", group.members[rank][0], frames.REASONS[reason])

        self._relays[group.number] = relay = Relay(group, gone)
        return relay

    def _drop_if_empty(self, relay: Relay) -> None:
        if len(relay.gone) == relay.size and not relay.connections:
            self._relays.pop(relay.group.number, None)


def _in_order(waiting: Waiting) -> list[str]:
    """The names, in the order of their ranks."""
    return sorted(waiting, key=lambda each: (waiting[each][1].place, natural(each)))


def _tell(waiting: Waiting) -> None:
    """Tell all who wait for one group who they are."""
    frame = PassedOn(frames.WAITING, 0, frames.packed_names(_in_order(waiting)))
    for connection, _ in waiting.values():
        connection.control.put_alone(frame)  # nothing else is sent before the group is formed
