"""The members' side of the shared keys at a lighthouse or a hub: the vote store, and the addresses of a group.

A restarted lighthouse does not know earlier decisions, so a vote store that failed once is not used again.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # exported without saying so

from thinwire.errors import LinkError
from thinwire.membership.channel import Channel
from thinwire.membership.commit import Electorate
from thinwire.membership.shared_keys import GROUP


class RequestChannel(Protocol):
    """A connection for requests. After its first `LinkError` make a new one."""

    heartbeat_timeout: float
    begun: bool  # whether the server knows all live replicas: others have had a view there

    def ask(self, do: str, seconds: float = 0.0, **fields: Any) -> dict[str, Any]:
        """The response to a request that may take `seconds`. Raises `LinkError`."""

    def close(self) -> None:
        """Idempotent; may be called from any thread. A request that waits then raises `LinkError`."""


class ChannelVoteStore:
    """A vote store at a lighthouse or a hub, over one connection, which is not used after its first failure."""

    def __init__(self, channel: RequestChannel, unused_keys: list[str], members: Electorate = ()) -> None:
        self.channel, self._unused_keys, self._members = channel, unused_keys, members

    def of(self, members: Electorate) -> ChannelVoteStore:
        return ChannelVoteStore(self.channel, self._unused_keys, members)

    def put(self, key: str, value: str = "1") -> None:
        self.channel.ask("put", key=key, value=value, members=self._members)

    def all(self, keys: Sequence[str]) -> bool:
        values = self.channel.ask("look", keys=list(keys))["values"]
        return values is not None and len(set(values)) == 1

    def values(self, keys: Sequence[str]) -> list[str | None]:
        return list(self.channel.ask("values", keys=list(keys))["values"])

    def settle(self, key: str, value: bytes) -> bytes:
        return str(self.channel.ask("settle", key=key, value=value.decode(), members=self._members)["value"]).encode()

    def wait(self, key: str, seconds: float) -> bytes | None:
        # An older server ignores the members, and waits for the outcome alone.
        values = self.channel.ask("look", max(seconds, 0.001), keys=[key], members=self._members)["values"]
        return None if values is None else str(values[0]).encode()

    def report(self, text: str) -> None:
        self.channel.ask("report", text=text)

    def forget(self, keys: Sequence[str]) -> None:
        self._unused_keys.extend(keys)


class EpochStore(Store):
    """A `torch.distributed.Store` with the addresses of gloo's pairs for one `epoch`. It has its own connection, and gloo calls it from
    its own thread."""

    def __init__(self, channel: Channel, epoch: str, seconds: float) -> None:
        super().__init__()
        self._channel, self._epoch, self._until = channel, epoch, time.monotonic() + seconds
        self.own: list[str] = []  # keys that this member wrote

    def set(self, key: str, value: bytes | str) -> None:
        text = value.encode() if isinstance(value, str) else value
        self.own.append(self._key(key))
        self._channel.ask("put", key=self._key(key), value=base64.b64encode(text).decode(), members=[])

    def get(self, key: str) -> bytes:
        (value,) = self._values([key], max(0.001, self._until - time.monotonic()))
        try:
            return base64.b64decode(value, validate=True)
        except (ValueError, TypeError):
            raise LinkError(f"the address of a member cannot be read ({key})") from None

    def wait(self, keys: Sequence[str], seconds: timedelta | None = None) -> None:
        """Wait until this store's deadline and not gloo's, because other members may come later."""
        self._values(keys, max(0.001, self._until - time.monotonic()))

    def check(self, keys: Sequence[str]) -> bool:
        return self._channel.ask("look", keys=list(map(self._key, keys)))["values"] is not None

    def close(self) -> None:
        """Close the connection: the group is built, or will not be."""
        self._channel.close()

    def _key(self, key: str) -> str:
        return f"{GROUP}{self._epoch}/{key}"

    def _values(self, keys: Sequence[str], seconds: float) -> list[str]:
        values = self._channel.ask("look", seconds, keys=list(map(self._key, keys)))["values"]
        if values is None:
            raise LinkError("not all members came in time")
        return list(values)
