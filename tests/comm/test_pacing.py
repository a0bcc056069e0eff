"""Pacing finds the connections among this process's files and limits each to its share of the uplink. Linux only."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import pytest
import torch.distributed as dist
from group_laws import run_processes

from thinwire.comm import TorchGroup, pacing
from thinwire.comm.pacing import SHARE, connections, pace
from thinwire.comm.sockets import SocketFile, open_socket
from thinwire.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pacing is Linux's")
PACING = 47  # SO_MAX_PACING_RATE


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def file_of(one: socket.socket) -> SocketFile:
    return SocketFile(one.fileno(), os.fstat(one.fileno()).st_ino)


def paced_to(files: set[SocketFile]) -> list[int]:
    """Returns the rates of those that are still connections. While a group is made, torch's store has some for a moment."""
    rates = []
    for file in sorted(files):
        with suppress(OSError), open_socket(file) as one:
            rates.append(one.getsockopt(socket.SOL_SOCKET, PACING))
    return rates


def test_only_sockets_are_found_among_open_files(tmp_path):
    before = connections()
    with (tmp_path / "file").open("w"), socket.socket() as alone, socket.socketpair()[0], socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert alone.fileno() > 0 and connections() == before
        one, other = pair()
        with one, other:
            assert connections() - before == {file_of(one), file_of(other)}
    assert connections() == before


def test_open_connections_share_the_rate_and_closed_ones_are_skipped():
    one, other = pair()
    gone = socket.socket()
    closed = file_of(gone)
    gone.close()
    with one, other, socket.socket() as later:
        assert later.fileno() == closed.number, "the system gives the number again"
        assert pace({file_of(one), file_of(other)}, 8e6) == 2
        assert {each.getsockopt(socket.SOL_SOCKET, PACING) for each in (one, other)} == {int(SHARE * 8e6 / 8 / 2)}
        assert pace({closed}, 8e6) == 0 == pace(set(), 8e6)
        assert pace({file_of(one)}, 0.1) == 1  # slower than a byte a second
        assert one.getsockopt(socket.SOL_SOCKET, PACING) == 1


def test_without_a_rate_connections_keep_their_windows_and_have_no_limit(monkeypatch):
    monkeypatch.setattr(pacing, "_starts_slowly_after_idle", lambda: True)
    one, other = pair()
    with one, other:
        before = one.getsockopt(socket.SOL_SOCKET, PACING)
        try:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            kept = b"bbr"
        except OSError:  # this system has none, or does not let this process choose it
            kept = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        with suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno" if kept == b"bbr" else kept)
        assert pace({file_of(one)}, None) == 1
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == kept
        assert one.getsockopt(socket.SOL_SOCKET, PACING) == before


def paced_group(rank, size):
    before = connections()
    TorchGroup.from_world(size)
    plain = connections() - before
    group = TorchGroup.from_world(size, uplink=80e6)
    paced = connections() - before - plain
    for refused in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="a positive rate"):
            TorchGroup.from_world(size, uplink=refused)
    rates = [paced_to(files) for files in (plain, paced)]
    dist.barrier()  # a process that leaves closes connections that others have not counted yet
    group.close()
    return rates


def test_a_group_paces_its_own_connections_and_no_others(tmp_path):
    share = int(SHARE * 80e6 / 8 / 2)
    for plain, paced in run_processes(paced_group, 3, tmp_path):
        assert paced.count(share) == 2 <= len(plain) and share not in plain
