"""A hub that can write neither its state nor its audit log for a while: what needs no disk goes on, and the rest is done afterwards."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from raw_member import RawMember, admitted, welcomed

from thinwire.app.cli import main
from thinwire.errors import LinkError
from thinwire.membership import Membership
from thinwire.membership.registry import MemberRegistry
from thinwire.net import Hub, admit, frames, join
from thinwire.net.enrol import Enrolment
from thinwire.net.rendezvous import HubRendezvous
from thinwire.net.state import HubState


def test_a_member_revoked_while_the_disk_is_full_is_out_and_the_others_hear_of_it_later(hub, audit, tmp_path):
    log = tmp_path / "hub/audit.txt"
    own = [admitted(hub.invite(), name, tmp_path) for name in ("oslo", "lima")]
    with RawMember(hub.invite(), own[0]) as first, RawMember(hub.invite(), own[1]) as second:
        there, other = first.hello(2), second.hello(2)
        welcomed(there), welcomed(other)
        log.unlink(), log.mkdir()
        hub._state._base.execute("pragma query_only = 1")
        state = HubState(tmp_path / "hub")  # as `thinwire hub revoke` does, from another process
        state.revoke("oslo")
        state.close()
        assert "oslo is revoked" in there.refusal()[1]
        assert not hub._tasks[0].done()
        audit.wait("cannot write the state of the hub", "readonly database", "this line is not in the audit log")
        log.rmdir()
        hub._state._base.execute("pragma query_only = 0")
        audit.wait("gone oslo: was revoked")
        while other.frame().kind != frames.GONE:
            pass
        assert "gone oslo: was revoked" in log.read_text() and log.stat().st_mode & 0o777 == 0o600
        assert sum("cannot write" in line for line in audit.said) == 1


def test_a_machine_that_comes_while_the_disk_is_full_hears_that_and_is_admitted_later(hub, audit, tmp_path):
    token = str(hub.invite())
    hub._state._base.execute("pragma query_only = 1")
    with pytest.raises(LinkError, match=r"admits nobody now: it cannot write its state \(.*\); make room on its disk"):
        admit(token, "oslo", tmp_path / "keys")
    audit.wait("cannot admit 127.0.0.1:", "make room on its disk")
    hub._state._base.execute("pragma query_only = 0")
    admit(token, "oslo", tmp_path / "keys")


def test_members_of_an_elastic_run_hear_of_the_full_disk_and_meet_again_when_there_is_room(tmp_path, audit):
    """One of three leaves, so the others need another group, which the hub keeps on its disk. They were told that the hub had gone."""
    said, names = type(audit)(), ("lima", "oslo", "rome")
    full = threading.Event()

    with Hub(tmp_path / "hub", registry=lambda: MemberRegistry(600.0), say=audit) as hub:
        token = hub.invite(uses=3)

        def run(name: str) -> list[str]:
            def observe(kind: str, fields: Mapping[str, Any]) -> None:
                if kind in ("view", "retry"):
                    said(str(fields.get("reason")))

            rendezvous = HubRendezvous(Enrolment(token, name, tmp_path / "keys"))
            membership = Membership(rendezvous, name, observe=observe)
            assert len(membership.next_view({}, 600.0).members) == 3
            assert full.wait(600.0)
            found = [member.name for member in membership.next_view({}, 600.0).members] if name != "lima" else []
            membership.close()
            return found

        with ThreadPoolExecutor(3) as threads:
            ends = [threads.submit(run, name) for name in names]
            said.wait("None", nth=3)  # the view of each
            hub._thread.run(_writes(hub, False))
            full.set()
            said.wait("the hub cannot write its state (attempt to write a readonly database); make room on its disk")
            hub._thread.run(_writes(hub, True))
            assert [end.result(600.0) for end in ends] == [[], ["oslo", "rome"], ["oslo", "rome"]]


def test_members_of_a_fixed_group_hear_of_the_full_disk_and_meet_when_there_is_room(hub, audit, tmp_path):
    """They waited without a word, and only the last one heard of it and came again each second."""
    said, lima = type(audit)(), admitted(hub.invite(), "lima", tmp_path)
    with RawMember(hub.invite(), lima, frames.group_label(2, "")) as last, ThreadPoolExecutor() as pool:
        oslo = pool.submit(join, str(hub.invite()), "oslo", 2, tmp_path / "keys", timeout=600.0, say=said)
        said.wait("waits for 1 of 2 members; here: oslo")
        hub._thread.run(_writes(hub, False))
        stream = last.hello(2)
        said.wait(full := "waits for the hub, whose disk has no room for the group; here: lima, oslo")
        audit.wait("cannot write the state of the hub")
        hub._thread.run(_writes(hub, True))
        assert welcomed(stream).names == ("lima", "oslo")
        oslo.result().close()
    assert said.said.count(full) == sum(line.startswith("cannot write") for line in audit.said) == 1


async def _writes(hub: Hub, can: bool) -> None:
    """Runs in the thread of the hub."""
    hub._state._base.execute(f"pragma query_only = {int(not can)}")


def test_the_reason_of_a_failed_admission_is_the_full_disk(tmp_path):
    """SQLite has ended the transaction then, and a rollback would be another error."""
    state = HubState(tmp_path)
    number, secret = state.invite(10_000, 600.0, None, [])
    state._base.execute("pragma max_page_count = 1")  # no more than now
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        for index in range(10_000):
            state.admit(f"oslo-{index}", bytes(32), number, secret)
    state.close()


@pytest.mark.parametrize("verb", ["run", "list", "invite", "rotate"])
def test_a_damaged_state_ends_each_command_with_its_path(verb, hub, tmp_path, capsys):
    hub.close()
    (state := tmp_path / "hub/hub.sqlite").write_text("no database\n" * 100)
    assert main(["hub", verb, "--out", str(tmp_path / "hub")]) == 1
    assert f"thinwire hub: {state}: file is not a database. Check the path" in capsys.readouterr().err
