"""A member with a valid key that sends arbitrary frames."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc

from thinwire.net import Token, frames
from thinwire.net.channels import BULK, CONTROL, MEET, PUBLISH
from thinwire.net.enrol import Enrolment
from thinwire.net.keys import HUB, Authority, Credentials, new_key, opened_request, request
from thinwire.version import HUB_FRAMES, PROTOCOLS, PUBLISHER_REQUESTS

Metadata = Sequence[tuple[str, str]]


class RawStream:
    """One stream: `put` sends a frame; iteration reads the answers. It states the range `stated`, and its frames have `version`."""

    def __init__(
        self, channel: grpc.Channel, method: str, stated: str | None, version: int, key: str = "thinwire-frames",
        more: Metadata = (),
    ) -> None:  # fmt: skip
        self._frames: queue.Queue[bytes | None] = queue.Queue()
        metadata = [*more, *([] if stated is None else [(key, stated)])]
        self.call: Any = channel.stream_stream(method)(iter(self._frames.get, None), metadata=metadata)
        self.sequence, self.version, self.heard = 0, version, 0

    def frame(self, kinds: Sequence[int] = range(256)) -> frames.Frame:
        """Returns the next frame of the hub."""
        self.heard += 1
        return frames.opened(next(self.call), self.heard - 1, kinds, self.version)

    def put(self, kind: int, rank: int, body: bytes, sequence: int | None = None) -> None:
        number = self.sequence if sequence is None else sequence
        self._frames.put(frames.head(kind, rank, number, self.version) + body)
        self.sequence += 1

    def raw(self, data: bytes) -> None:
        self._frames.put(data)

    def end(self) -> None:
        self._frames.put(None)

    def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Returns how the hub ends the stream, skipping its other messages."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error.code(), error.details()
        return self.call.code(), self.call.details()


class RawMember:
    """A channel with these credentials; `admitted` makes valid ones."""

    def __init__(self, token: Token, own: Credentials, group: bytes = bytes(32)) -> None:
        credentials = grpc.ssl_channel_credentials(own.authorities, own.key or None, own.certificate or None)
        options = [
            ("grpc.ssl_target_name_override", HUB),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ]
        self.channel = grpc.secure_channel(f"{token.host}:{token.port}", credentials, options)
        self.group, self.process, self.protocols = group, os.urandom(16), PROTOCOLS
        self.stated: str | None = str(HUB_FRAMES)
        self.more: Metadata = ()  # what it states besides
        self.version = HUB_FRAMES.newest
        self._streams: list[RawStream] = []

    def control(self) -> RawStream:
        return self._stream(CONTROL)

    def bulk(self) -> RawStream:
        return self._stream(BULK)

    def _stream(self, method: str) -> RawStream:
        self._streams.append(RawStream(self.channel, method, self.stated, self.version, more=self.more))
        return self._streams[-1]

    def hello(self, size: int) -> RawStream:
        """Opens a control stream and sends its first frame."""
        stream = self.control()
        stream.put(
            frames.HELLO,
            0,
            frames.packed(frames.HELLO, self.process, self.group, size, 0, str(self.protocols).encode()),
        )
        return stream

    def meet(self, run: str) -> RawStream:
        """Opens a stream of requests in the elastic run of this name, and sends its first frame."""
        stream = self._stream(MEET)
        stream.put(frames.MEET, 0, frames.packed(frames.MEET, self.process, run.encode()))
        return stream

    def publishing(self) -> RawStream:
        """Opens a stream on which a version can be offered."""
        self._streams.append(RawStream(self.channel, PUBLISH, str(PUBLISHER_REQUESTS), 0, "thinwire-publish"))
        return self._streams[-1]

    def close(self) -> None:
        for stream in self._streams:
            stream.end()
        self.channel.close()

    def __enter__(self) -> RawMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def signed(authority: Authority, name: str, lifetime: timedelta, trusted: bytes) -> Credentials:
    """Returns credentials with a certificate of `authority`."""
    key = new_key()
    made = authority.issue(opened_request(request(key, name)), f"{name}.member.thinwire", lifetime)
    return Credentials(key, made, trusted)


def admitted(token: Token, name: str, folder: Path) -> Credentials:
    """Returns the credentials that an honest machine gets."""
    return asyncio.run(Enrolment(token, name, folder).admitted()).credentials


def welcomed(stream: RawStream) -> frames.Welcome:
    """Returns the hub's answer to `hello`, when its group is complete."""
    while (frame := stream.frame([frames.WAITING, frames.WELCOME])).kind == frames.WAITING:
        pass
    return frames.opened_welcome(frame.body)
