"""What a member with a known uplink does: control does not wait for chunks, and its bulk connections are paced."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress

import pytest
import torch
from group_laws import TIMEOUT

from thinwire.comm.pacing import SHARE, connections, pace
from thinwire.comm.sockets import open_socket
from thinwire.net import Hub, link
from thinwire.net.enrol import Enrolment
from thinwire.net.frames import CHUNK_NBYTES, group_label
from thinwire.net.group import connected_group
from thinwire.net.invitations import opened_state
from thinwire.net.link import CHANNELS, HubLink

PACING = 47  # SO_MAX_PACING_RATE
LONG_NBYTES = 3 * CHUNK_NBYTES


def both(folder, rate, of_first):
    """Two members; the first has an uplink of `rate` and runs `of_first`, the second answers it until it is told to end."""
    failures, over = [], threading.Event()

    def replica(hub, token, rank):
        try:
            enrolment = Enrolment(token, f"r-{rank}", folder / "keys")
            link = HubLink(enrolment, group_label(2, ""), 2, None if rank else rate)
            with connected_group(link, TIMEOUT, TIMEOUT, farewell=0.0) as group:
                if rank:
                    group.post(1, {}, {0: torch.zeros(LONG_NBYTES, dtype=torch.uint8)})
                    for _ in range(5):
                        buffer = torch.zeros(9, dtype=torch.uint8)
                        group.post(2, {}, {0: buffer}).wait()
                        group.post(3, {0: buffer}, {}).wait()
                    over.wait()
                else:
                    of_first(group)
        except BaseException as failure:
            failures.append(failure)
        finally:
            if not rank:
                over.set()

    with Hub(folder / "hub") as hub:
        token = hub.invite(2)
        threads = [threading.Thread(target=replica, args=(hub, token, rank)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures


def pings(group):
    """Five small messages there and back."""
    for number in range(5):
        sent, back = torch.full((9,), number, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
        receive = group.post(3, {}, {1: back})
        group.post(2, {1: sent}, {}).wait()
        receive.wait()
        assert torch.equal(sent, back)


def test_small_messages_pass_while_a_chunk_waits_for_the_uplink(tmp_path):
    """The second chunk of a long message may leave after a thousand hours; a small message leaves at once."""

    def behind_a_long_one(group):
        long = group.post(1, {1: torch.ones(LONG_NBYTES, dtype=torch.uint8)}, {})
        pings(group)
        assert not long._over.is_set()

    both(tmp_path, 8 * CHUNK_NBYTES / 3.6e6, behind_a_long_one)


def port(folder):
    """The hub's."""
    with opened_state(folder / "hub") as state:
        return int((state.meta("ports") or "").split()[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pacing is Linux's")
def test_each_bulk_connection_may_use_the_whole_uplink(tmp_path, monkeypatch):
    """Chunks leave one after the other, so the connections never share it. What the hub sends is not this member's to pace. The other
    member has no known uplink: its bulk connections only keep their windows."""
    rate, paced, others, rates = 8e8, list[int](), list[int](), list[float | None]()

    def noted(files, each):
        rates.append(each)
        return pace(files, each)

    monkeypatch.setattr(link, "pace", noted)

    def look(group):
        pings(group)
        group.post(1, {1: torch.ones(LONG_NBYTES, dtype=torch.uint8)}, {}).wait()  # so it has bulk connections
        for file in connections():
            with suppress(OSError), open_socket(file) as one:
                known = paced if one.getpeername()[1] == port(tmp_path) else others
                known.append(one.getsockopt(socket.SOL_SOCKET, PACING))

    both(tmp_path, rate, look)
    due = int(SHARE * rate / 8)
    assert paced.count(due) >= CHANNELS and due not in others
    assert rates.count(None) >= CHANNELS
