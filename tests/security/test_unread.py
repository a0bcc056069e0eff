"""Connections of machines that read nothing: the hub does not keep them beyond its bounds to send what they do not take."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.comm.secure import proxy as module
from thinwire.comm.secure.audit import AuditLog
from thinwire.comm.secure.proxy import TcpProxy

UNSENT = 1 << 16  # bytes that wait in this process, behind full buffers of the kernel


class Watched(TcpProxy):
    """A proxy that shows the writers to those who connected."""

    def __init__(self, folder: Path, inner: int) -> None:
        super().__init__(AuditLog(folder / "audit.txt"), inner, 600.0, stays=False)
        self.writers: list[asyncio.StreamWriter] = []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        await super()._accept(reader, writer)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        yield opened


@pytest.mark.parametrize("end", ["evicted", "half closed"])
def test_a_connection_that_reads_nothing_is_closed_with_what_waits_for_it(
    end: str, silent: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGERS", 1)
    monkeypatch.setattr(module, "FLUSH_SECONDS", 0.1)

    async def answers(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(bytes(1 << 20))
            try:
                await writer.drain()
            except OSError:
                writer.close()

    async def play() -> None:
        server = await asyncio.start_server(answers, "127.0.0.1", 0)
        proxy = Watched(tmp_path, server.sockets[0].getsockname()[1])
        port = await proxy.open("127.0.0.1", 0)
        silent.connect(("127.0.0.1", port))
        async with asyncio.timeout(600.0):  # only ends a hang
            while not proxy.writers or proxy.writers[0].transport.get_write_buffer_size() <= UNSENT:
                await asyncio.sleep(0.01)
            if end == "evicted":
                socket.create_connection(("127.0.0.1", port)).close()
            else:
                silent.shutdown(socket.SHUT_WR)
            while proxy.writers[0].get_extra_info("socket").fileno() >= 0:
                await asyncio.sleep(0.01)
        server.close()
        await proxy.close()

    asyncio.run(play())
