"""A TCP proxy that a test can cut, hold and make change bytes: it forwards the two ports of a hub, like a bad network."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from thinwire.net import Token

Change = Callable[[bytes], bytes]


class Proxy:
    """Forwards to the two ports of a hub. `token` is the hub's token with the proxy's ports in it.

    `upwards` and `downwards` change the forwarded bytes. `held`: nothing is forwarded while it is clear. `forwarded` counts the
    bytes that went up to the port of members; `reached` wakes threads that wait for a count.
    """

    def __init__(self, token: Token) -> None:
        self.upwards: Change = bytes
        self.downwards: Change = bytes
        self.held = threading.Event()
        self.held.set()
        self.forwarded, self.refused = 0, 0
        self.changed = threading.Condition()
        self._cut = False
        self._open: set[socket.socket] = set()
        self._forgotten: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in self._listeners]
        self.token = dataclasses.replace(token, host="127.0.0.1", port=ports[0], join_port=ports[1])
        for listener, port in zip(self._listeners, (token.port, token.join_port)):
            self._begin(self._accept, listener, (token.host, port), port == token.port)

    def cut(self) -> None:
        """Ends all connections, and accepts none until `mend`."""
        with self.changed:
            self._cut = True
            for one in list(self._open):
                self._end(one)

    def forget(self) -> None:
        """Drops everything on the open connections without an error, their ends too, like a router that has restarted."""
        with self.changed:
            self._forgotten |= self._open

    def mend(self) -> None:
        """Accepts connections again."""
        with self.changed:
            self._cut = False

    def wait(self, enough: Callable[[], bool]) -> None:
        """Waits until `enough()`; a count of this proxy must make it true."""
        with self.changed:
            assert self.changed.wait_for(enough, 600.0)

    def close(self) -> None:
        """Ends everything."""
        self.cut()
        self.held.set()
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, target: tuple[str, int], counted: bool) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with self.changed:
                if self._cut:
                    near.close()
                    self.refused += 1
                    self.changed.notify_all()
                    continue
                try:
                    far = socket.create_connection(target)
                except OSError:  # the hub does not answer
                    near.close()
                    continue
                self._open |= {near, far}
            self._begin(self._forward, near, far, True, counted)
            self._begin(self._forward, far, near, False, False)

    def _forward(self, source: socket.socket, target: socket.socket, up: bool, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.held.wait()
                if source in self._forgotten:
                    continue
                target.sendall((self.upwards if up else self.downwards)(data))
                if counted:
                    with self.changed:
                        self.forwarded += len(data)
                        self.changed.notify_all()
        if source not in self._forgotten:
            self._end(target)
        self._end(source)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
