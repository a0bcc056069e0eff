"""Who sits in which group of a hub, who waits for the others, and who is away for too long. No I/O but the hub's state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from thinwire.comm.secure import frames
from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.relay import Connection, Relay, natural
from thinwire.comm.secure.state import Grouped, HubState
from thinwire.errors import LinkError


class Wish(NamedTuple):
    """What a process asks for: a place in the group with this label. Those with the smaller `place` have the smaller rank."""

    label: bytes
    size: int
    place: int
    wire: int  # version of the packets that it sends to the others


class Seats:
    """All groups of a hub.

    Args:
        state: keeps the groups.
        audit: has a line for each change.
        patience: seconds after which a member that is not connected counts as gone.
    """

    def __init__(self, state: HubState, audit: AuditLog, patience: float) -> None:
        self._state, self._audit, self._patience = state, audit, patience
        self._relays: dict[int, Relay] = {}
        self._waiting: dict[bytes, dict[str, tuple[Connection, Wish]]] = {}  # by label and name
        for group in state.groups():
            self._keep(group)

    def seat(self, connection: Connection, wish: Wish) -> None:
        """Give a process its place in a group, or let it wait for the others. Raises `LinkError`."""
        if not 1 <= wish.size <= frames.MEMBERS:
            raise LinkError(f"a group of {wish.size}; 1 to {frames.MEMBERS} members are possible")
        if self._is_back(connection, wish.label):
            return
        name, waiting = connection.name, self._waiting.get(wish.label, {})
        for other, (_, theirs) in waiting.items():
            if theirs.size != wish.size:
                raise LinkError(f"{name} expects a group of {wish.size}, others of this run one of {theirs.size}")
            if theirs.wire != wish.wire:
                raise LinkError(
                    f"{name} sends packets of version {wish.wire}, {other} of version {theirs.wire}. Install the same "
                    "Thinwire on both, and start them again"
                )
        waiting = self._waiting.setdefault(wish.label, waiting)
        waiting[name] = connection, wish
        self._audit("waits", name, f"{len(waiting)} of {wish.size} are here")
        if len(waiting) == wish.size:
            names = sorted(waiting, key=lambda each: (waiting[each][1].place, natural(each)))
            group = self._state.form(wish.label, tuple((each, waiting[each][0].process) for each in names))
            del self._waiting[wish.label]
            relay = self._keep(group)
            self._audit("formed", f"group {group.number}", " ".join(names))
            for rank, each in enumerate(names):
                relay.connect(rank, waiting[each][0])

    def unseat(self, connection: Connection, label: bytes) -> None:
        """Its streams have ended."""
        if connection.relay:
            connection.relay.disconnect(connection)
            self._audit("disconnected", connection.name)
            self._tidy(connection.relay)
            return
        waiting = self._waiting.get(label, {})
        if connection.name in waiting and waiting[connection.name][0] is connection:
            del waiting[connection.name]
            if not waiting:
                del self._waiting[label]

    def revoke(self, names: Collection[str]) -> None:
        """Those with these names are gone."""
        self._leave(frames.REVOKED, lambda relay, rank: relay.group.members[rank][0] in names)

    def look(self, now: float) -> None:
        """Who is away for too long is gone."""
        self._leave(frames.LOST, lambda relay, rank: now - relay.away.get(rank, now) > self._patience)

    def _leave(self, reason: int, who: Callable[[Relay, int], bool]) -> None:
        for relay in list(self._relays.values()):
            for rank in range(relay.size):
                if who(relay, rank):
                    relay.leave(rank, reason)
            self._tidy(relay)

    def _is_back(self, connection: Connection, label: bytes) -> bool:
        """Whether it has a place already. Another process of its name is gone then. Raises `LinkError`: its place is lost."""
        name, process = connection.name, connection.process
        if reason := self._state.why_gone(label, name, process):
            raise LinkError(f"{name} {reason}, and the others went on without it")
        for relay in list(self._relays.values()):
            for rank, (other, there) in enumerate(relay.group.members):
                if other != name or relay.group.label != label or rank in relay.gone:
                    continue
                if there == process:
                    self._audit("connected", name)
                    relay.connect(rank, connection)
                    return True
                relay.leave(rank, frames.REPLACED)
                if old := relay.connections.get(rank):
                    old.refusal = f"another process has come as {name}, with the same key"
                    old.end.set()
        return False

    def _keep(self, group: Grouped) -> Relay:
        def gone(rank: int, reason: int) -> None:
            self._state.gone(group.number, rank, reason)
            self._audit("gone", group.members[rank][0], frames.REASONS[reason])

        self._relays[group.number] = relay = Relay(group, gone)
        return relay

    def _tidy(self, relay: Relay) -> None:
        if len(relay.gone) == relay.size and not relay.connections:
            self._relays.pop(relay.group.number, None)
