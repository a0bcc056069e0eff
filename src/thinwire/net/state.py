"""The hub's database: its members and their keys, invitations, groups, and the elastic runs, ended ones included.

It is one SQLite file that only its owner can read. Every change is one transaction, which is on the disk before the hub answers.
The commands `thinwire hub list | invite | revoke` change it while the hub runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from thinwire.comm.private_files import check_private
from thinwire.errors import ConfigurationError, LinkError
from thinwire.net.frames import REASONS

FILE = "hub.sqlite"
MEMBERS = 10_000  # most members of a hub
NOTES = 10_000  # most notes about ends of runs of one name; each end writes four
ENDED = 1000  # a group whose members have all left is kept until so many newer ones were formed
EXPIRED_SECONDS = 30 * 86_400.0  # for so long a machine is told that its invitation has expired
RUNS = 8  # most runs of one member that a hub keeps
REDUCER = "reducer"  # the member that averages packets, which the hub itself invites
_TABLES = """
create table if not exists meta (name text primary key, value text not null);
create table if not exists member (name text primary key, key blob not null, revoked integer not null, joined real not null);
create table if not exists invitation (
    id blob primary key, secret blob not null, uses integer not null, expires real not null, name text);
create table if not exists used (invitation blob not null, name text not null, key blob not null, primary key (invitation, name));
create table if not exists invited_to (invitation blob not null, run text not null, primary key (invitation, run));
create table if not exists bound (name text not null, run text not null, primary key (name, run));
create table if not exists issued (name text primary key, authority blob not null);
create table if not exists grouped (
    id integer primary key autoincrement, label blob not null, members text not null, gone text not null);
create table if not exists run (name text primary key, begun_by text not null, used real not null, present text not null);
create table if not exists note (
    id integer primary key autoincrement, run text not null, key text not null, unique (run, key));
"""


@dataclass(frozen=True)
class Known:
    """A member that the hub knows."""

    name: str
    key: bytes
    revoked: bool
    joined: float


@dataclass(frozen=True)
class Grouped:
    """A group that was formed: names and processes in rank order, and why members left, by rank."""

    number: int
    label: bytes
    members: tuple[tuple[str, bytes], ...]
    gone: dict[int, int]

    @property
    def ended(self) -> bool:
        """Whether all members have left."""
        return len(self.gone) == len(self.members)


@dataclass(frozen=True)
class KnownRun:
    """An elastic run that the hub knows, and its registry's live members (`KeptRun`)."""

    name: str
    begun_by: str
    present: str  # "": no members; otherwise JSON, which begins with the names by their incarnations

    @property
    def names(self) -> list[str]:
        """The members that are alive, or were when the hub ended."""
        return sorted(json.loads(self.present)[0].values()) if self.present else []


class KeptRun:
    """The persistent state of the registry of the run `name`: see `membership.registry.Kept`."""

    def __init__(self, base: sqlite3.Connection, name: str) -> None:
        self._base, self._name = base, name

    def present(self) -> str:
        """The text that `keep` has written; "" if there is none."""
        found = self._base.execute("select present from run where name = ?", (self._name,)).fetchone()
        return str(found[0]) if found else ""

    def keep(self, present: str) -> None:
        """Write the live members."""
        self._base.execute("update run set present = ? where name = ?", (present, self._name))

    def note(self, key: str) -> None:
        """Keep `key` among the last notes."""
        self._base.execute("insert or ignore into note (run, key) values (?, ?)", (self._name, key))
        last = "select id from note where run = ? order by id desc limit 1 offset ?"
        self._base.execute(f"delete from note where run = ? and id <= ({last})", (self._name, self._name, NOTES))

    def notes(self) -> list[str]:
        """The last keys given to `note`, oldest first."""
        found = self._base.execute("select key from note where run = ? order by id", (self._name,))
        return [str(key) for (key,) in found]


class HubState:
    """The state of the hub in `folder`, made when it is missing."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            check_private(os.fstat(file), path, "the members of this hub")
        finally:
            os.close(file)
        self._base = sqlite3.connect(path, timeout=600.0, isolation_level=None, check_same_thread=False)
        self._base.execute("pragma synchronous = full")
        self._base.executescript(_TABLES)

    def close(self) -> None:
        """Close the database. Idempotent."""
        self._base.close()

    @property
    def version(self) -> int:
        """A number that changes whenever another process has changed the database."""
        (number,) = self._base.execute("pragma data_version").fetchone()
        return int(number)

    def meta(self, name: str) -> str | None:
        """The value that `keep` wrote under this name; None if there is none."""
        found = self._base.execute("select value from meta where name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def keep(self, name: str, value: str) -> None:
        """Write a setting."""
        self._base.execute("insert or replace into meta values (?, ?)", (name, value))

    def kept_run(self, name: str) -> KeptRun:
        """The persistent state of this run's registry."""
        return KeptRun(self._base, name)

    # Members and invitations.

    def invite(self, uses: int, seconds: float, name: str | None, runs: Collection[str] = ()) -> tuple[bytes, bytes]:
        """Make an invitation, to `runs` only if any are given; return its number and its secret. The database has only the secret's hash."""
        number, secret = secrets.token_bytes(8), secrets.token_bytes(16)
        digest = hashlib.sha256(secret).digest()
        with self._together():  # another process deletes runs without an invitation
            self._base.execute("delete from invitation where expires < ?", (time.time() - EXPIRED_SECONDS,))
            self._base.execute("delete from invited_to where invitation not in (select id from invitation)")
            self._base.executemany("insert into invited_to values (?, ?)", [(number, run) for run in {*runs}])
            self._base.execute(
                "insert into invitation values (?, ?, ?, ?, ?)", (number, digest, uses, time.time() + seconds, name)
            )
        return number, secret

    def invitations(self) -> list[tuple[int, float, str | None]]:
        """The open invitations: the uses left, when each ends, and for whom."""
        rows = self._base.execute(
            "select uses, expires, name from invitation where uses > 0 and expires > ?", (time.time(),)
        )
        return [(int(uses), float(expires), name) for uses, expires, name in rows]

    def end_invitations(self) -> None:
        """Forget all invitations: their tokens name an authority that has ended."""
        self._base.execute("delete from invitation")
        self._base.execute("delete from invited_to")

    def admit(self, name: str, key: bytes, invitation: bytes, secret: bytes) -> bool:
        """Admit `name` with this key; return whether it is new. Raises `LinkError` with the reason.

        A name that is known with this key renews its certificate and needs no invitation. So a member that repeats its request
        after a lost response uses its invitation only once.
        """
        with self._together():
            return self._admitted(name, key, invitation, secret)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context whose changes are on the disk together or not at all, and without those of another process in between."""
        self._base.execute("begin immediate")
        try:
            yield
            self._base.execute("commit")
        except BaseException:
            if self._base.in_transaction:  # SQLite itself has rolled back if the disk is full
                self._base.execute("rollback")
            raise

    def _admitted(self, name: str, key: bytes, invitation: bytes, secret: bytes) -> bool:
        if known := self.member(name):
            if not compare_digest(known.key, key):
                raise LinkError(f"the name {name} belongs to another key")
            if known.revoked:
                raise LinkError(f"{name} is revoked")
            return False
        row = self._base.execute(
            "select secret, uses, expires, name from invitation where id = ?", (invitation,)
        ).fetchone()
        if row is None or not compare_digest(row[0], hashlib.sha256(secret).digest()):
            raise LinkError("the hub has no such invitation")
        if row[2] < time.time():
            raise LinkError("the invitation has expired")
        if row[1] < 1:
            raise LinkError("the invitation is used up")
        if row[3] != name and (row[3] is not None or name == REDUCER):
            raise LinkError("the invitation is for another name")
        (count,) = self._base.execute("select count(*) from member").fetchone()
        if count >= MEMBERS:
            raise LinkError(f"the hub has {count} members already, which are the most")
        self._base.execute("update invitation set uses = uses - 1 where id = ?", (invitation,))
        self._base.execute("insert into member values (?, ?, 0, ?)", (name, key, time.time()))
        self._base.execute("insert into bound select ?, run from invited_to where invitation = ?", (name, invitation))
        self._base.execute("insert into used values (?, ?, ?)", (invitation, name, key))
        return True

    def bound(self, name: str) -> list[str]:
        """The runs of the member's invitation, which it may join; empty: any run."""
        rows = self._base.execute("select run from bound where name = ? order by run", (name,))
        return [str(run) for (run,) in rows]

    def member(self, name: str) -> Known | None:
        """The member of this name."""
        row = self._base.execute("select name, key, revoked, joined from member where name = ?", (name,)).fetchone()
        return None if row is None else Known(row[0], row[1], bool(row[2]), row[3])

    def members(self) -> list[Known]:
        """All members that ever joined."""
        rows = self._base.execute("select name, key, revoked, joined from member order by joined")
        return [Known(name, key, bool(revoked), joined) for name, key, revoked, joined in rows]

    def issued(self, name: str, authority: bytes) -> None:
        """Record that `name` has a certificate of the authority with this fingerprint."""
        self._base.execute("insert or replace into issued values (?, ?)", (name, authority))

    def behind(self, authority: bytes) -> list[str]:
        """The members that may connect and have no certificate of this authority."""
        rows = self._base.execute("select name from issued where authority = ?", (authority,)).fetchall()
        return [one.name for one in self.members() if not one.revoked and (one.name,) not in rows]

    def revoke(self, name: str) -> int:
        """Refuse the member `name` from now on, and end its invitation, by which it could come back under another name. Returns how many more
        that could have admitted. Raises `ConfigurationError` if there is no such member.
        """
        its = "where id in (select invitation from used where name = ?)"
        with self._together():
            if not self._base.execute("update member set revoked = 1 where name = ?", (name,)).rowcount:
                names = [member.name for member in self.members()]
                more = f" and {len(names) - 12} more (`thinwire hub list`)" if len(names) > 12 else ""
                known = ", ".join(names[:12]) + more or "none yet"
                raise ConfigurationError(f"{name}: no member has this name; the members are: {known}.")
            left = self._base.execute(
                f"select sum(uses) from invitation {its} and expires > ?", (name, time.time())
            ).fetchone()[0]
            self._base.execute(f"delete from invitation {its}", (name,))
        return int(left or 0)

    # Elastic runs.

    def runs(self) -> list[KnownRun]:
        """The kept runs, by their last beginning."""
        rows = self._base.execute("select name, begun_by, present from run order by used")
        return [KnownRun(*row) for row in rows]

    def use_run(self, name: str, member: str, busy: Collection[str]) -> None:
        """Record that `member` begins the run `name`, or begins it again. If the member has too many runs, forget the one that was
        used longest ago and is not in `busy`. Raises `LinkError` if all of them are in `busy`.
        """
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            own = [run.name for run in runs.values() if run.begun_by == member]
            idle = [each for each in own if each not in busy]
            if len(own) >= RUNS and not idle:
                raise LinkError(f"{member} began {len(own)} runs that are in progress, at most {RUNS} are possible")
            for each in idle[: max(0, len(own) - RUNS + 1)]:
                self._base.execute("delete from note where run = ?", (each,))
                self._base.execute("delete from run where name = ?", (each,))
            self._base.execute("insert into run values (?, ?, 0, '')", (name, member))
        self._base.execute("update run set used = ? where name = ?", (time.time(), name))

    # Groups.

    def form(self, label: bytes, members: tuple[tuple[str, bytes], ...]) -> Grouped:
        """Write a new group, and return it."""
        told = json.dumps([[name, process.hex()] for name, process in members])
        made = self._base.execute("insert into grouped (label, members, gone) values (?, ?, '{}')", (label, told))
        assert made.lastrowid is not None
        old = self._grouped("select id, label, members, gone from grouped where id <= ?", made.lastrowid - ENDED)
        self._base.executemany("delete from grouped where id = ?", [(each.number,) for each in old if each.ended])
        return Grouped(made.lastrowid, label, members, {})

    def gone(self, group: int, rank: int, reason: int) -> None:
        """Record that the member `rank` of a group has left permanently."""
        row = self._base.execute("select gone from grouped where id = ?", (group,)).fetchone()
        if row is not None:
            told = json.loads(row[0]) | {str(rank): reason}
            self._base.execute("update grouped set gone = ? where id = ?", (json.dumps(told), group))

    def groups(self) -> list[Grouped]:
        """The groups with at least one member left."""
        found = self._grouped("select id, label, members, gone from grouped order by id")
        return [group for group in found if not group.ended]

    def why_gone(self, label: bytes, name: str, process: bytes) -> str:
        """The reason why this process has left a group with this label permanently; "" if it has not."""
        for group in self._grouped("select id, label, members, gone from grouped where label = ?", label):
            if (name, process) in group.members and (rank := group.members.index((name, process))) in group.gone:
                return REASONS[group.gone[rank]]
        return ""

    def _grouped(self, query: str, *values: bytes | int) -> list[Grouped]:
        return [
            Grouped(
                number,
                label,
                tuple((name, bytes.fromhex(process)) for name, process in json.loads(members)),
                {int(rank): int(reason) for rank, reason in json.loads(gone).items()},
            )
            for number, label, members, gone in self._base.execute(query, values)
        ]
