"""Forks of a process with a secure group, such as the workers of a data loader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from secure_groups import run_secure

from thinwire.comm.group import gather
from thinwire.comm.pacing import connections
from thinwire.net import Hub, SecureGroup


def in_a_fork(port: int) -> tuple[int, int]:
    """The number of its threads, and of its connections to `port`."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, bytes([len(list(Path("/proc/self/task").iterdir())), len(connections(port))]))
        finally:
            os._exit(0)
    os.close(writing)
    threads, connected = os.read(reading, 2)  # nothing, if the fork is aborted
    os.close(reading)
    os.waitpid(child, 0)
    return threads, connected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_thread_of_grpc_and_no_connection_to_the_hub(tmp_path: Path) -> None:
    """gRPC's threads aborted some of the forks. With a connection, the hub would not notice at once that the member is dead."""

    with Hub(tmp_path / "hub") as hub:
        token = hub.invite(2)

        def replica(group: SecureGroup) -> tuple[int, int] | None:
            assert connections(token.port)
            gather(group, b"", 0, "test")
            found = in_a_fork(token.port) if group.rank == 0 else None
            gather(group, b"", 0, "test")
            return found

        assert run_secure(token, 2, replica, tmp_path / "keys") == [(1, 0), None]
