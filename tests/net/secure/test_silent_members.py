"""How a hub and its members notice each other's silence: on connections without bulk. Bulk may stand still behind a thin link."""

from __future__ import annotations

import socket
import sys
import threading

import pytest
from group_laws import Exchange
from secure_groups import run_secure

from thinwire.comm.pacing import connections
from thinwire.comm.sockets import open_socket
from thinwire.net import Hub
from thinwire.net import hub as hubs
from thinwire.net.relay import SILENT_LOOKS, Connection

LINUX_USER_TIMEOUT = 18  # TCP_USER_TIMEOUT, in milliseconds


def test_a_connection_is_over_after_looks_in_a_row_without_a_byte():
    received = [0]
    connection = Connection(1, "oslo", b"", 100.0, lambda: received[0], None)
    for _ in range(3):
        received[0] += 1
        assert not any(connection.why_over(0.0) for _ in range(SILENT_LOOKS))
    assert connection.why_over(0.0) == "nothing has come from it for 30 s or more"
    received[0] += 1
    assert not connection.why_over(99.0) and connection.why_over(101.0) == "its certificate has expired"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the option of the kernel is Linux's")
def test_the_kernel_ends_no_connection_with_bulk_that_stands_still(tmp_path):
    """gRPC tells the kernel after how many milliseconds without room at the other end a connection ends: seconds for the control stream of
    each member, which has no bulk, and minutes for all others.
    """
    found, all_there = list[int](), threading.Barrier(2)

    def member(group) -> None:
        Exchange(group, 1, 0, 100_000).check()
        all_there.wait(600.0)
        if group.rank == 0:
            for file in connections():
                with open_socket(file) as one:
                    found.append(one.getsockopt(socket.IPPROTO_TCP, LINUX_USER_TIMEOUT))
        all_there.wait(600.0)

    with Hub(tmp_path / "hub") as hub:
        run_secure(hub, 2, member, tmp_path)
    assert sorted(set(found) - {0}) == [10_000, 300_000] and found.count(10_000) == 2


def test_a_hub_ends_a_silent_connection_and_the_member_is_back(tmp_path, monkeypatch):
    """The members say nothing until the hub has noticed. What they send afterwards arrives."""
    noticed = threading.Event()

    def say(line: str) -> None:
        if "nothing has come from it" in line:
            monkeypatch.setattr(hubs, "LOOK_SECONDS", 3600.0)
            noticed.set()

    def member(group) -> None:
        assert noticed.wait(600.0)
        Exchange(group, 1, 0, 100_000).check()

    monkeypatch.setattr(hubs, "LOOK_SECONDS", 0.001)
    with Hub(tmp_path / "hub", say=say) as hub:
        run_secure(hub, 2, member, tmp_path)
