"""The sockets of this process: their addresses, how listening ones are closed, and how children are kept from them.

gloo listens at a port that it chooses, and never frees the file of a silent connection: after some thousand connections, such as of a
health check, the process has no file left and aborts. Once all members of a group are connected, its port is not needed, so it is
shut: on Linux, by a filter with which the kernel drops all packets. gloo does not expose its sockets, but they are files of this
process.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import math
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_FILES = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26  # Linux; Python gives it no name
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction of a classic BPF filter: take 0 bytes of the packet

Address = tuple[str, int]

_kept: set[SocketFile] = set()  # from children


class SocketFile(NamedTuple):
    """A socket among this process's files. Its inode tells it from a later one to which the system gives the same number."""

    number: int
    inode: int


def socket_files() -> list[SocketFile]:
    """All sockets of this process; empty if the system does not list them."""
    found: list[SocketFile] = []
    with suppress(OSError):  # not Linux
        for path in list(_FILES.iterdir()):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(path.name))
                if stat.S_ISSOCK(status.st_mode):
                    found.append(SocketFile(int(path.name), status.st_ino))
    return found


def keep_from_children(files: Iterable[SocketFile]) -> None:
    """Let `files` stay with this process (Linux only). The processes of a data loader are forks and would hold them too: if this one is killed,
    its peers would wait until those end, and its port would be taken until then.
    """
    _kept.intersection_update(socket_files())
    for file in files:
        with suppress(OSError):  # closed meanwhile
            os.set_inheritable(file.number, False)  # by a program that this process starts
        _kept.add(file)
    if _kept:
        _watch_forks()


def interruptibly(task: Callable[[], T]) -> T:
    """What `task` returns. In the main thread it runs on another one: torch waits for peers outside Python, where no signal is heard."""
    if threading.current_thread() is not threading.main_thread():
        return task()
    done: Future[T] = Future()

    def body() -> None:
        try:
            done.set_result(task())
        except BaseException as error:  # raised in the thread that waits
            done.set_exception(error)

    # a daemon, unlike those of concurrent.futures: the end of the process does not wait for it
    threading.Thread(target=body, name="thinwire-meeting", daemon=True).start()
    return outcome(done)


def outcome(future: Future[T], seconds: float = math.inf) -> T:
    """What `future` has in `seconds`. Raises `TimeoutError`.

    It waits for a second at a time: a signal that comes just before the wait begins is heard when it ends.
    """
    end = time.monotonic() + seconds
    while not future.done() and time.monotonic() < end:
        wait([future], max(0.0, min(1.0, end - time.monotonic())))
    return future.result(0)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """A context; `keep_from_children` for all sockets that are opened in it."""
    before = set(socket_files())
    try:
        yield
    finally:
        keep_from_children(set(socket_files()) - before)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Give up the sockets that a fork has inherited. Their numbers stay in use, because objects that the fork has inherited may close them."""
    nothing, inodes = os.open(os.devnull, os.O_RDWR), {file.inode for file in _kept}
    for file in socket_files():
        if file.inode in inodes:  # by inode, because another thread may have had a duplicate open
            os.dup2(nothing, file.number, inheritable=False)
    os.close(nothing)
    _kept.clear()


def open_socket(file: SocketFile) -> socket.socket:
    """The socket with a duplicated file, which the caller must close. Raises `OSError` if it was closed meanwhile."""
    own = os.dup(file.number)
    try:
        if os.fstat(own).st_ino != file.inode:
            raise OSError(errno.EBADF, "another file has its number")
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def listening() -> dict[SocketFile, Address]:
    """The listening TCP sockets of this process; empty if the system does not list them."""
    found: dict[SocketFile, Address] = {}
    for file in socket_files():
        with suppress(OSError), open_socket(file) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[file] = one.getsockname()[:2]
    return found


def shut(file: SocketFile) -> None:
    """Refuse new connections to this listening socket; existing ones stay. Linux only."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP)
    with suppress(OSError), open_socket(file) as one:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def shut_new(before: set[SocketFile], connected: set[SocketFile], expected: int) -> None:
    """Shut gloo's listening sockets when it has made the connections `connected`; if these are fewer than `expected`, it still waits for
    more, and nothing is shut. `before`: the sockets that listened before gloo began. gloo listens at the address from which it connects.
    """
    if not 0 < expected <= len(connected):
        return
    own: set[str] = set()
    for file in connected:
        with suppress(OSError), open_socket(file) as one:
            own.add(one.getsockname()[0])
    for file, (host, _) in listening().items():
        if file not in before and host in own:
            shut(file)


def listen(host: str, port: int) -> socket.socket | None:
    """A socket that listens at `host` only. Without it a store would listen at every address of the machine.

    None if that is not possible: the name resolves to 127.0.1.1 here and to another address on other machines (Debian), or the
    address belongs to a router. Raises `OSError` if the port is taken.
    """
    try:
        place = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
    if not only_here(host) and ipaddress.ip_address(place.split("%")[0]).is_loopback:
        return None
    try:
        return socket.create_server((place, port), family=socket.AF_INET6 if ":" in place else socket.AF_INET)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
            return None
        raise


def only_here(host: str) -> bool:
    """Whether `host` is this machine on every machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def loopback() -> str | None:
    """The interface of 127.0.0.1."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
