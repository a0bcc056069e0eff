"""What the members of a group say of one that is gone."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from group_laws import TIMEOUT
from raw_member import RawMember, admitted, welcomed

from thinwire.errors import LinkError
from thinwire.net import Hub, admit, join
from thinwire.net.invitations import opened_state


def waits_for(group, peer):
    """The error of a message that never comes."""
    with pytest.raises(LinkError) as told:
        group.post(7, {}, {peer: torch.zeros(1, dtype=torch.uint8)}).wait()
    return told.value


def test_members_that_close_their_groups_after_a_revoked_one_are_not_blamed(tmp_path):
    """Rome waits for oslo, which has left because bergen was revoked."""
    with Hub(tmp_path / "hub") as hub, ThreadPoolExecutor(3) as pool:
        token = str(hub.invite(3))
        joining = [
            pool.submit(join, token, one, 3, tmp_path / "keys", "", TIMEOUT) for one in ("bergen", "oslo", "rome")
        ]
        bergen, oslo, rome = (one.result() for one in joining)
        with rome, opened_state(tmp_path / "hub") as state:
            with oslo, bergen:
                state.revoke("bergen")
                first = waits_for(oslo, 0)
            second = waits_for(rome, 1)
    assert str(first) == str(second) and str(first).startswith("replica 0 (bergen) was revoked at the hub. ")
    assert (first.peer, second.peer) == (0, 1)


def test_a_member_that_comes_back_too_late_is_told_what_the_others_were_told(tmp_path):
    """It was frozen, for example. The others of a fixed group have not continued without it, but stopped."""
    gone = threading.Event()

    def say(line: str) -> None:
        if line.startswith("gone oslo: has died"):
            gone.set()

    with Hub(tmp_path / "hub", patience=0.1, say=say) as hub:
        oslo, rome = (admitted(hub.invite(), name, tmp_path) for name in ("oslo", "rome"))
        with RawMember(hub.invite(), rome) as there:
            stream = there.hello(2)
            with RawMember(hub.invite(), oslo) as first:
                welcomed(first.hello(2)), welcomed(stream)
            assert gone.wait(TIMEOUT)
            with RawMember(hub.invite(), oslo) as again:
                again.process = first.process
                told = "the others were told that oslo has died, or its link is cut; they have stopped, or continue without it"
                assert told in again.hello(2).refusal()[1]


def test_a_hub_that_was_restored_from_a_copy_without_the_group_says_so(tmp_path):
    """Its members wait for it, and end when it is back."""
    host = "127.0.0.94"  # where no other process takes the port of a hub that has ended
    with Hub(tmp_path / "hub", host) as hub, ThreadPoolExecutor(2) as pool:
        token, keys = str(hub.invite(2)), tmp_path / "keys"
        for name in ("bergen", "oslo"):
            admit(token, name, keys)
        shutil.copytree(tmp_path / "hub", tmp_path / "older")
        for last in (False, True):
            groups = [pool.submit(join, token, name, 2, keys, "", TIMEOUT) for name in ("bergen", "oslo")]
            bergen, oslo = (group.result() for group in groups)
            if last:
                hub.close()
                with Hub(tmp_path / "older", host):
                    told = [str(waits_for(group, 1 - group.rank)) for group in (bergen, oslo)]
            for group in groups:
                group.result().close()
    due = "the hub does not know this group: it was started from an older copy of its folder; start all replicas again from their last checkpoints"
    assert told == [due] * 2
