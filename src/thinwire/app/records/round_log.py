"""The rounds of one replica's last session, as a diagnosis needs them."""

from __future__ import annotations

from thinwire.app.diagnosis import Record, Seen
from thinwire.app.records.events import Event
from thinwire.app.records.sessions import finite, whole
from thinwire.app.records.start import Start
from thinwire.errors import PacketError

ROUNDS = 1 << 13  # the latest rounds of a replica among which one that hangs is looked for

Key = tuple[int, int]


class RoundLog:
    """The rounds of a session that began with `start`, of the replica `called` (replica-0, or replica-0.shard-1); the latest `most` records."""

    def __init__(self, start: Start, called: str, most: int | None = None) -> None:
        shard = called.partition(".shard-")[2]
        self.start, self.shard, self._most = start, int(shard) if shard.isdecimal() else 0, most
        self.name = str(start.replica)
        self.records: dict[Key, Record] = {}
        self.now, self.ended, self.damaged = 0.0, False, 0
        self._began: dict[Key, float] = {}
        self._over: dict[Key, float] = {}

    def take(self, event: Event) -> Record | None:
        """Learn from the next event; return the record in it, if it has one."""
        kind, seconds, record = event["event"], finite(event["seconds"]), None
        self.now, self.ended = max(self.now, seconds), self.ended or kind in ("end", "stop")
        if kind == "wire":
            try:
                record = Record.of(event)
            except PacketError:
                self.damaged += 1
                return None
            self.name = record.name
            self.records[record.key] = record
            if self.start.elastic:  # a departure is not a round yet
                self._began[record.key] = seconds
            if record.over:
                self._over[record.key] = seconds
        elif kind in ("depart", "flight", "land") and not self.start.elastic:
            key = whole(event["fragment"]), whole(event["round"])
            (self._began if kind == "depart" else self._over).setdefault(key, seconds)
        if self._most is not None and len(self.records) > self._most:
            del self.records[next(iter(self.records))]
        for rounds in (self._began, self._over):
            if len(rounds) > ROUNDS:
                del rounds[next(iter(rounds))]
        return record

    def seen(self, waited: float) -> Seen:
        """What is known of the rounds, `waited` seconds after the last event."""
        failed = {key: record for key, record in self.records.items() if not record.over}
        return Seen(self.name, self._began, self._over, failed, self.now + waited, self.ended)
