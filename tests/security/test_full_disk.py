"""A hub that can write neither its state nor its audit log for a while: what needs no disk goes on, and the rest is done afterwards."""

from __future__ import annotations

from raw_member import RawMember, admitted, welcomed

from thinwire.comm.secure import frames
from thinwire.comm.secure.state import HubState


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
        sequence, kind = 0, -1
        while kind != frames.GONE:
            sequence += 1
            kind = frames.opened(next(other.call), sequence, range(12), other.version).kind
        assert "gone oslo: was revoked" in log.read_text() and log.stat().st_mode & 0o777 == 0o600
        assert sum("cannot write" in line for line in audit.said) == 1
