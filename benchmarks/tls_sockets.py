"""The plainest encrypted carrier: two replicas that dial each other with Python's `ssl`, a rival of the secure one in secure.py.

Each replica listens with a certificate and dials the other. A connection carries one direction: messages in the order of posting,
each after its tag and its length. One thread writes and one reads. Nothing is paced, resumed, admitted or relayed, and both ends
need an open port.
"""

from __future__ import annotations

import queue
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from thinwire.comm.group import Messages, Sized, travelling
from thinwire.errors import LinkError
from thinwire.net.keys import HUB, Authority

_HEAD = struct.Struct("<QQ")  # tag, bytes
CERTIFICATE, KEY, AUTHORITY = "certificate.pem", "key.pem", "authority.pem"


def make_keys(folder: Path) -> None:
    """A certificate for both replicas, its key, and the authority that signed it."""
    authority = Authority(folder)
    own = authority.hub_credentials(timedelta(hours=1), authority.pem)
    for name, data in ((CERTIFICATE, own.certificate), (KEY, own.key), (AUTHORITY, authority.pem)):
        (folder / name).write_bytes(data)


class _Posted:
    queued_seconds = 0.0
    transfer_seconds = 0.0

    def __init__(self, group: TlsGroup) -> None:
        self._group, self.due = group, [threading.Event(), threading.Event()]  # sent, received
        self.arrivals: dict[int, float] = {}

    def wait(self) -> None:
        for event in self.due:
            if not event.wait(self._group.timeout):
                raise LinkError(f"a message did not arrive within {self._group.timeout:g} s")


class TlsGroup:
    """A `Group` of two over two TLS connections. `folder` is what `make_keys` filled."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int, folder: Path, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, 2, timeout
        self._peer = 1 - rank
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.load_cert_chain(folder / CERTIFICATE, folder / KEY)
        client.load_verify_locations(folder / AUTHORITY)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        with socket.create_server((addresses[rank], port)) as listener:
            accepted: queue.Queue[ssl.SSLSocket] = queue.Queue()
            taking = threading.Thread(
                target=lambda: accepted.put(server.wrap_socket(listener.accept()[0], server_side=True))
            )
            taking.start()
            self._out = client.wrap_socket(_dialled(addresses[self._peer], port, timeout), server_hostname=HUB)
            taking.join()
            self._in = accepted.get()
        for one in (self._out, self._in):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: queue.Queue[tuple[int, memoryview, threading.Event] | None] = queue.Queue()
        self._buffers: dict[int, deque[tuple[memoryview, bool, _Posted]]] = defaultdict(deque)
        self._opened = threading.Condition()
        self._closed = False
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> _Posted:
        """See `Group.post`. A shorter message needs no `sized`: its length is before it."""
        send, recv = travelling(self, tag, send), travelling(self, tag, recv)
        posted = _Posted(self)
        if recv:
            with self._opened:
                self._buffers[tag].append((recv[self._peer].numpy().data, sized is not None, posted))
                self._opened.notify_all()
        else:
            posted.due[1].set()
        if send:
            self._outgoing.put((tag, send[self._peer].numpy().data, posted.due[0]))
        else:
            posted.due[0].set()
        return posted

    def close(self) -> None:
        """See `Group.close`."""
        with self._opened:
            self._closed = True
            self._opened.notify_all()
        self._outgoing.put(None)

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            tag, data, sent = message
            self._out.sendall(_HEAD.pack(tag, len(data)))
            self._out.sendall(data)
            sent.set()

    def _read(self) -> None:
        head = memoryview(bytearray(_HEAD.size))
        with suppress(EOFError, OSError):
            while True:
                self._fill(head)
                tag, nbytes = _HEAD.unpack(head)
                with self._opened:
                    while not self._buffers[tag]:
                        if self._closed:
                            return
                        self._opened.wait()
                    buffer, shorter, posted = self._buffers[tag].popleft()
                if not (nbytes == len(buffer) or (shorter and nbytes < len(buffer))):
                    return  # its `wait` ends by the timeout
                self._fill(buffer[:nbytes])
                posted.arrivals[self._peer] = time.monotonic()
                posted.due[1].set()

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            if not (taken := self._in.recv_into(buffer)):
                raise EOFError
            buffer = buffer[taken:]


def _dialled(address: str, port: int, seconds: float) -> socket.socket:
    """A connection, as soon as the peer listens."""
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise LinkError(f"{address}:{port} was not listening within {seconds:g} s") from None
            time.sleep(0.05)
