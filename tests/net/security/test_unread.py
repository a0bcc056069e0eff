"""Connections of machines that read nothing: the hub does not keep them beyond its bounds to send what they do not take."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from thinwire.net import proxy as module
from thinwire.net.audit import AuditLog
from thinwire.net.proxy import Arrived, TcpProxy


class Watched(TcpProxy):
    """A proxy that shows the connections that have ended."""

    def __init__(self, folder: Path) -> None:
        super().__init__(AuditLog(folder / "audit.txt"), 600.0)
        self.ended = asyncio.Event()

    def _ended(self, connection: Arrived) -> None:
        super()._ended(connection)
        assert connection.socket.fileno() < 0
        self.ended.set()


@pytest.mark.parametrize("end", ["evicted", "half closed"])
def test_a_connection_that_reads_nothing_is_closed_with_what_waits_for_it(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGERS", 1)

    async def play() -> None:
        stuck = asyncio.Event()

        async def answers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    writer.write(bytes(1 << 20))
                    try:
                        async with asyncio.timeout(0.1):
                            await writer.drain()
                    except TimeoutError:  # all buffers are full
                        stuck.set()
                        await writer.drain()
            except OSError:
                writer.close()

        proxy = Watched(tmp_path)
        server = await asyncio.start_unix_server(answers, proxy.inner)
        port = await proxy.open("127.0.0.1", 0)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", port))
            silent.sendall(b"x")
            async with asyncio.timeout(600.0):  # only ends a hang
                await stuck.wait()
                if end == "evicted":
                    socket.create_connection(("127.0.0.1", port)).close()
                else:
                    silent.shutdown(socket.SHUT_WR)
                await proxy.ended.wait()
        server.close()
        await proxy.close()

    asyncio.run(play())
