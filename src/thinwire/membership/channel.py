"""Authenticated messages between a replica and its lighthouse. Messages of a peer without the run secret are not read.

    lighthouse → replica     magic, oldest and newest version, 32 random bytes
    replica → lighthouse     magic, oldest and newest version, name, incarnation, 32 random bytes, proof
    lighthouse → replica     verdict, heartbeat time-out, proof
    then messages both ways  length, MAC, JSON

The lighthouse's first message, and the first eight bytes of the response, have this form in all versions. If the ranges do not meet, both
sides say so with both ranges, and nothing else is read.

A proof is an HMAC-SHA256 with the run secret as key, over the sender's part and all messages of both sides so far. The MACs of
messages have a separate key for each connection and direction, and include the number of the message. So no message can be replayed,
in another run, under another name or in the other direction. Lengths are bounded before anything is received, and MACs are compared
(in constant time) before anything is decoded. Messages are not encrypted.

Without a secret (b"") the protocol is the same, but anybody can compute the MACs. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.comm.private_files import read_private
from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.version import LIGHTHOUSE_MESSAGES, newest_of_both

LIGHTHOUSE_PORT = 29510
ANSWER_SECONDS = 5.0  # seconds within which a response must arrive
MOST_PRESENCE = 16_384  # bytes of a replica's presence
MOST_MEMBERS = 128  # most replicas at one lighthouse
MOST_ASKED = 1 << 17  # bytes of one message to the lighthouse
MOST_ANSWERED = 3 * MOST_MEMBERS * MOST_PRESENCE  # bytes of one message from it: all presences, escaped once more
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
INCARNATION = re.compile(r"[0-9a-f]{16}")

MAGIC = b"TWLH"
SPOKEN = struct.Struct("<4sHH")  # magic, oldest and newest version
HELLO = struct.Struct("<4sHH32s")
INTRODUCTION = struct.Struct("<4sHH64s16s32s32s")
_INTRODUCED = struct.Struct("<64s16s32s")  # name, incarnation, random bytes
WELCOME = struct.Struct("<Id32s")
FRAME = struct.Struct("<I32s")
PROOF = 32
TAKEN, OTHER_SECRET, OTHER_VERSION, FULL = range(4)
_VERDICTS = {
    OTHER_SECRET: "refuses this replica: one of them has another run secret, or none. Give every machine the same file with --secret",
    OTHER_VERSION: "speaks no version of messages that this replica speaks; install one release on both",
    FULL: f"is full: {MOST_MEMBERS} replicas are there already, or several processes of this name",
}


def secret_in(path: Path, make: bool = False) -> bytes:
    """The run secret in the file `path`; with `make` a missing file is written with a new secret. Raises `ConfigurationError`."""
    if make:
        with suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
    try:
        text = read_private(path, "the run secret", 128)
    except OSError as error:
        raise ConfigurationError(
            f"no run secret can be read from {path} ({error.strerror}); `thinwire lighthouse --secret FILE` makes one, to be copied to every machine."
        ) from None
    if not re.fullmatch(rb"[0-9a-f]{64}\s*", text):
        raise ConfigurationError(
            f"{path} holds no run secret: 64 hexadecimal digits are needed, as `thinwire lighthouse --secret FILE` writes them."
        )
    return bytes.fromhex(text.decode())


def mac(secret: bytes, purpose: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 of `parts` for `purpose`, 32 bytes. It includes the lengths, so different lists of parts have different texts."""
    text = b"".join(struct.pack("<Q", len(part)) + part for part in (f"thinwire {purpose}".encode(), *parts))
    return hmac.digest(secret, text, hashlib.sha256)


def same(a: bytes, b: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(a, b)


class Seal:
    """Seals and opens the messages of one direction of a connection."""

    def __init__(self, secret: bytes, direction: str, talk: bytes) -> None:
        self._key, self._count = mac(secret, f"messages of the {direction}", talk), 0

    def pack(self, message: dict[str, Any]) -> bytes:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        return FRAME.pack(len(body), self._mac(body)) + body

    def open(self, tag: bytes, body: bytes) -> dict[str, Any]:
        """Raises `PacketError`."""
        if not same(tag, self._mac(body)):
            raise PacketError("a message has a wrong MAC; every replica needs the secret of this run")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise PacketError("a message is not a JSON object; run the same release of Thinwire everywhere")
        return message

    def _mac(self, body: bytes) -> bytes:
        self._count += 1
        return mac(self._key, "message", struct.pack("<Q", self._count), body)


class Channel:
    """A replica's connection to the lighthouse at `host`:`port`: requests and their responses. For one thread at a time.

    Raises `LinkError` for any failure; it cannot be used after that.
    """

    begun = False  # see `RequestChannel`: a lighthouse forgets all replicas when it restarts

    def __init__(self, host: str, port: int, name: str, incarnation: str, secret: bytes, seconds: float = 2.0) -> None:
        self._where = where = at(host, port)
        until = time.monotonic() + seconds
        try:
            self._line = socket.create_connection((host, port), timeout=seconds)
        except OSError as error:
            raise LinkError(
                f"no lighthouse answers at {where}: {error.strerror or error}; check the address, and that `thinwire lighthouse` runs there."
            ) from None
        try:
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = self._receive(HELLO.size, until)
            if not hello.startswith(MAGIC):
                raise LinkError(f"what answers at {where} is not a Thinwire lighthouse.")
            if other := unlike(hello):
                self._line.sendall(spoken())  # the lighthouse says so, too
                raise LinkError(f"the lighthouse at {where} speaks {other}.")
            said = spoken() + _INTRODUCED.pack(name.encode(), incarnation.encode(), secrets.token_bytes(32))
            self._line.sendall(said + mac(secret, "replica", hello, said))
            welcome = self._receive(WELCOME.size, until)
            verdict, self.heartbeat_timeout, proof = WELCOME.unpack(welcome)
            if verdict != TAKEN:
                raise LinkError(f"the lighthouse at {where} {_VERDICTS.get(verdict, 'refuses this replica')}.")
            if not same(proof, mac(secret, "lighthouse", hello, said, welcome[:-PROOF])):
                raise LinkError(f"what answers at {where} does not hold this run's secret.")
            self._says, self._hears = Seal(secret, "replica", hello + said), Seal(secret, "lighthouse", hello + said)
        except OSError as error:
            self.close()
            raise LinkError(f"what answers at {where} does not answer as a lighthouse: {error}.") from None
        except LinkError:
            self.close()
            raise

    def ask(self, do: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """The lighthouse's response, which may take `seconds`, and `ANSWER_SECONDS` more."""
        until = time.monotonic() + seconds + ANSWER_SECONDS
        try:
            self._line.settimeout(ANSWER_SECONDS)
            self._line.sendall(self._says.pack({"do": do, "seconds": seconds, **fields}))
            length, tag = FRAME.unpack(self._receive(FRAME.size, until))
            if length > MOST_ANSWERED:
                raise PacketError(f"it announces a message of {length:,} bytes; at most {MOST_ANSWERED:,} are allowed")
            answer = self._hears.open(tag, self._receive(length, until))
        except (OSError, PacketError) as error:
            self.close()
            raise LinkError(f"the lighthouse at {self._where}: {error}") from None
        if "error" in answer:
            raise LinkError(f"the lighthouse at {self._where} says: {str(answer['error'])[:200]}")
        return answer

    def close(self) -> None:
        """Idempotent; may be called from any thread. A request that waits then raises `LinkError`."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()

    def _receive(self, nbytes: int, until: float) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            left = until - time.monotonic()
            if left <= 0:
                raise OSError("it did not answer in time")
            self._line.settimeout(left)
            part = self._line.recv(min(nbytes - len(parts), 1 << 20))
            if not part:
                raise OSError("it has closed the connection")
            parts += part
        return bytes(parts)


def spoken() -> bytes:
    """The range of messages of this side, as both sides begin."""
    return SPOKEN.pack(MAGIC, LIGHTHOUSE_MESSAGES.oldest, LIGHTHOUSE_MESSAGES.newest)


def unlike(said: bytes) -> str:
    """The other side's range, this one's, and what to do, if they do not meet; "" if they do. `said` begins as `spoken`."""
    _, oldest, newest = SPOKEN.unpack_from(said)
    here = LIGHTHOUSE_MESSAGES
    if oldest <= newest and newest_of_both(here, replace(here, oldest=oldest, newest=newest)) is not None:
        return ""
    return f"messages {oldest} to {newest}, this side {here}. Install one release on both, or one that speaks a version of each"


def at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
