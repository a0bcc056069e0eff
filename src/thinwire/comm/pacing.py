"""Paces TCP connections to the uplink's rate, by Linux's pacing for each connection.

Connections that share an uplink do not know of each other. Each sends faster until the router before the thin link
drops packets, and losses near the end of a message cost round trips. A connection that is paced to its share
of the rate never fills that router's queue, with any congestion control.

There are pauses between outer rounds, and after each pause Linux forgets a connection's congestion window and starts
slowly: a packet of 1 MB over 80 ms then takes 3.5 times its ideal time (docs/machines.md). BBR does not start slowly; if the
system lets a process choose it, paced connections use it. The better remedy needs root:
`sysctl net.ipv4.tcp_slow_start_after_idle=0`; then the system's own congestion control stays.

gloo does not expose its sockets, but they are files of this process: those that are new after a group was made are its connections.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from thinwire.comm.sockets import SocketFile, open_socket, socket_files

SHARE = 0.95  # share of the rate for data; the rest is for the headers of TCP, IP and Ethernet, and for ACKs

_AFTER_IDLE = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
_SO_MAX_PACING_RATE = 47  # Linux; Python gives it no name before 3.12


def connections(port: int | None = None) -> set[SocketFile]:
    """The connected TCP sockets of this process, only those to `port` if it is given; empty if the system does not list them."""
    return {file for file in socket_files() if _connected(file, port)}


def _connected(file: SocketFile, port: int | None) -> bool:
    try:
        with open_socket(file) as one:
            peer = one.getpeername()  # raises for a listening socket
            tcp = one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)
            return tcp and port in (None, peer[1])
    except OSError:  # closed meanwhile
        return False


def pace(files: set[SocketFile], bits_per_second: float | None) -> int:
    """Let the connections `files` share `bits_per_second` evenly; with None each keeps its window, and has no limit. Returns the number
    of connections that could be set.
    """
    if not sys.platform.startswith("linux"):
        return 0
    paced, share = 0, SHARE * (bits_per_second or 0.0) / 8 / max(1, len(files))
    for file in files:
        with suppress(OSError), open_socket(file) as one:
            keep_window(one)
            if bits_per_second is not None:
                one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, max(1, int(share)))
            paced += 1
    return paced


class _Settable(Protocol):
    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...


def keep_window(connection: _Settable) -> None:
    """Use BBR for this TCP connection if Linux would start slowly after each of its pauses, and lets this process choose."""
    if sys.platform.startswith("linux") and _starts_slowly_after_idle():
        with suppress(OSError):  # it does not exist, or needs more rights
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def _starts_slowly_after_idle() -> bool:
    try:
        return _AFTER_IDLE.read_text().strip() != "0"
    except OSError:  # the kernel does not report it
        return False
