"""The stored state of a hub: uses of a token are counted exactly, also when concurrent, and a kill loses nothing."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from thinwire.errors import ConfigurationError, LinkError
from thinwire.net import Hub, invite
from thinwire.net.audit import AuditLog
from thinwire.net.grouping import HubGroups
from thinwire.net.keys import Authorities, Authority, write_private
from thinwire.net.runs import HubRuns
from thinwire.net.state import HubState

KILLED = """
import os, signal, sys
from pathlib import Path
from thinwire.net.state import HubState
state = HubState(Path(sys.argv[1]))
number, secret = state.invite(2, 1000.0, None)
state.admit("oslo", b"a" * 32, number, secret)
state.admit("rome", b"b" * 32, *state.invite(2, 1000.0, None))
group = state.form(b"l" * 32, (("oslo", b"p" * 16), ("lima", b"q" * 16)))
state.gone(group.number, 1, 2)
state.revoke("oslo")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_hub_keeps_its_state(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    state = HubState(tmp_path)
    (member, _), (group,), (open_one,) = state.members(), state.groups(), state.invitations()
    assert (member.name, member.key, member.revoked) == ("oslo", b"a" * 32, True) and open_one[0] == 1
    assert group.members == (("oslo", b"p" * 16), ("lima", b"q" * 16)) and group.gone == {1: 2}
    state.gone(group.number, 0, 0)
    assert state.groups() == []  # no member is left
    state.close()


def test_a_group_is_kept_while_it_has_members_however_many_come_after(tmp_path):
    """An ended one makes room."""
    state = HubState(tmp_path)
    live, ended = (state.form(label * 32, (("oslo", b"p" * 16), ("lima", b"q" * 16))) for label in (b"l", b"e"))
    for group, rank in ((live, 0), (ended, 0), (ended, 1)):
        state.gone(group.number, rank, 2)
    state._base.execute("update sqlite_sequence set seq = 5000")  # as if thousands of groups had come and ended
    newer = state.form(b"n" * 32, (("rome", b"r" * 16),))
    assert [group.number for group in state.groups()] == [live.number, newer.number]
    assert state.why_gone(b"l" * 32, "oslo", b"p" * 16) and not state.why_gone(b"e" * 32, "oslo", b"p" * 16)
    state.close()


def test_a_registry_that_cannot_write_ticks_again_and_says_so_once(tmp_path):
    """Runs beside it are not held up."""
    ticks, said, enough = list[str](), list[str](), asyncio.Event()

    class Registry:
        empty = False

        def __init__(self) -> None:
            self.name = ("red", "blue")[len(made)]
            made.append(self)

        def remember(self, kept: object) -> None:
            pass

        def revoke(self, names: object) -> None:
            pass

        def nobody_comes(self, waiting: object) -> bool:
            return False

        def tick(self) -> None:
            ticks.append(self.name)
            if len(ticks) == 6:
                enough.set()
            if self.name == "red" and len(ticks) < 5:
                raise sqlite3.OperationalError("database or disk is full")

    async def play() -> None:
        ticking = asyncio.create_task(runs.ticking(HubGroups(state, audit, 1.0)))
        await asyncio.wait({ticking, asyncio.create_task(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert not ticking.done()
        ticking.cancel()

    made = list[Registry]()
    state, audit = HubState(tmp_path), AuditLog(tmp_path / "audit.txt", said.append)
    runs = HubRuns(Registry, state, audit, lambda name, incarnation: None)
    with runs.used("red", "oslo"), runs.used("blue", "oslo"):
        asyncio.run(play())
    assert ticks[:6] == ["red", "blue"] * 3
    told = "cannot write the state of the run red: database or disk is full; make room on its disk"
    assert [line.startswith(told) for line in said if "cannot" in line] == [True]
    state.close()


def test_concurrent_uses_of_a_token_stop_at_its_limit(tmp_path):
    """Forty uses at once, over several connections, as two processes would have."""
    states = [HubState(tmp_path) for _ in range(4)]
    number, secret = states[0].invite(7, 1000.0, None)
    admitted: list[str] = []
    refused: list[str] = []

    def ask(index: int) -> None:
        for more in range(10):
            name = f"m-{index}-{more}"
            try:
                states[index].admit(name, name.encode(), number, secret)
                admitted.append(name)
            except LinkError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 7 and set(refused) == {"the invitation is used up"} and len(refused) == 33
    assert sorted(member.name for member in states[1].members()) == sorted(admitted)
    for state in states:
        state.close()


def test_invitations_made_at_once_keep_their_runs(tmp_path):
    """One process invites to oslo while another does; else the token would admit to any run."""
    one, other = HubState(tmp_path), HubState(tmp_path)
    other._base.execute("pragma busy_timeout = 0")

    def meanwhile(statement):
        if statement.startswith("insert into invitation "):
            with suppress(sqlite3.OperationalError):  # it would wait
                other.invite(1, 600.0, None, ["berlin"])

    one._base.set_trace_callback(meanwhile)
    number, secret = one.invite(1, 600.0, None, ["oslo"])
    one._base.set_trace_callback(None)
    one.admit("lima", bytes(32), number, secret)
    assert one.bound("lima") == ["oslo"]
    one.close(), other.close()


def test_only_hashes_of_token_secrets_are_stored(tmp_path):
    """A thief of the file cannot join with an invitation that is still open."""
    state = HubState(tmp_path)
    _, secret = state.invite(1, 1000.0, None)
    state.close()
    assert secret not in (tmp_path / "hub.sqlite").read_bytes()
    assert (tmp_path / "hub.sqlite").stat().st_mode & 0o777 == 0o600


def test_files_are_written_atomically_and_readable_by_their_owner_only(tmp_path, monkeypatch):
    write_private(tmp_path / "key", b"old")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_private(tmp_path / "key", b"new")
    assert (tmp_path / "key").read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_an_authority_is_created_once(tmp_path):
    """The same holds if the first attempt was killed before it wrote a certificate."""
    write_private(tmp_path / "authority.key", b"half")
    assert Authority(tmp_path).fingerprint == Authority(tmp_path).fingerprint


def test_authorities_are_read_before_or_after_a_replacement_and_not_within(tmp_path, monkeypatch):
    """A running hub reads them while its owner's command moves the key, and then the certificate."""
    begun, found, reached = Authorities(tmp_path).begun(), [], queue.Queue()
    move, lock = Path.replace, fcntl.flock

    def locking(*given):
        reached.put("waits")
        lock(*given)

    def read():
        found.append(Authorities(tmp_path))
        reached.put("has read")

    reader = threading.Thread(target=read)

    def moving(path, target):
        moved = move(path, target)
        if path.suffix == ".key":
            monkeypatch.setattr(fcntl, "flock", locking)
            reader.start()
            reached.get()
        return moved

    monkeypatch.setattr(Path, "replace", moving)
    own = begun.replaced().own
    reader.join()
    assert own.fingerprint == found[0].own.fingerprint == begun.issuer.fingerprint and found[0].next is None


def test_invalid_hub_folders_invitations_and_ports_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no hub"):
        invite(tmp_path / "none")
    host = "127.0.0.93"  # where no other process takes the port of a hub that has ended
    with Hub(tmp_path / "hub", host) as hub:
        with pytest.raises(ConfigurationError, match="1 to 1,000,000 uses"):
            hub.invite(0)
        with pytest.raises(ConfigurationError, match="1 to 1,000,000 uses"):
            hub.invite(10**20)
        with pytest.raises(ConfigurationError, match="name ''"):
            hub.invite(name="")
        with pytest.raises(LinkError, match=r"the hub cannot listen at 127\.0\.0\.93"):
            Hub(tmp_path / "another", host, hub.port)
    with Hub(tmp_path / "hub", host) as again:
        assert (again.port, again.join_port) == (hub.port, hub.join_port)
