"""What it means to carry bytes between replicas.

A `Group` is the set of replicas that exchange with each other, seen from one of them. It moves messages of known size,
or of a known largest size, from point to point and knows nothing of tensors' meaning, rounds or fragments: wrappers that count bytes or slow a
link need only these few methods.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, LinkError

_LENGTH = struct.Struct("<Q")
TAGS = 1 << 30  # carriers take tags below this; `gather` uses the two just above
FINISH = TAGS + 2  # of the messages with the purpose "finish"


Messages = Mapping[int, Tensor]  # by the rank of the peer
Sized = Callable[[Tensor], int]  # the number of bytes that the message in a buffer declares


class Transfer(Protocol):
    """Messages on their way.

    `queued_seconds` (waiting for the uplink) and `transfer_seconds` (from the first bit to the arrival of the last)
    are what an emulated link (`LinkedGroup`) did to the messages sent; 0.0 on a carrier that cannot know.
    """

    @property
    def queued_seconds(self) -> float: ...

    @property
    def transfer_seconds(self) -> float: ...

    @property
    def arrivals(self) -> Mapping[int, float]:
        """When `wait` saw the message of each peer to be there (`time.monotonic`): no earlier than it was."""

    def wait(self) -> None:
        """Return when all that was posted has been handed over and received; call it from one thread.

        A message may stay with its sender until the receiver has posted its side (gloo does that): post both
        directions before waiting for either. Raises `LinkError`: a peer is gone, or too late. The buffers of a
        transfer that failed are lost: never use them again.
        """


@runtime_checkable
class Group(Protocol):
    """Carries bytes between replicas.

    `rank` is this replica's place in 0..`size`-1. Messages are one-dimensional contiguous uint8 CPU tensors. Both sides know
    their sizes beforehand; or, where a size depends on values, the most it may be: then the receiver's buffer has that size, the
    message is shorter and contains its length. So no length is sent ahead, which would cost a round trip.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def post(
        self, tag: int, send: Messages, recv: Messages, purpose: str = "packet", sized: Sized | None = None
    ) -> Transfer:
        """Start sending `send[peer]` and receiving into `recv[peer]`; do not block.

        May be called from any thread, with several posts open at once. Messages between two replicas under one `tag`
        are matched in the order of posting. Buffers belong to the transfer until `wait` returns. Empty messages do
        not travel. `purpose` is a word for the ledger. With `sized`, a message received may be shorter than its buffer; it is
        called for the length of the message, which comes from a peer and must be checked. Raises `LinkError` only if this group was closed;
        `wait` raises errors of a peer.
        """

    def close(self) -> None:
        """Leave. Idempotent. Waits here, and of peers for this replica, raise `LinkError`, so wait for your posts first."""


class WrappedGroup:
    """A `Group` that carries its messages over another one: a subclass writes `post`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def close(self) -> None:
        """See `Group.close`."""
        self.group.close()


def travelling(group: Group, tag: int, messages: Messages) -> dict[int, Tensor]:
    """The `messages` that are sent (empty ones are not, on any carrier); all are checked first, by the size of the group below."""
    while isinstance(group, WrappedGroup):
        group = group.group
    if not 0 <= tag <= FINISH:
        raise ConfigurationError(f"tag {tag} was given; a tag is needed in 0..{TAGS - 1}.")
    for peer, message in messages.items():
        if peer == group.rank or not 0 <= peer < group.size:
            raise ConfigurationError(
                f"a message for replica {peer} was given to replica {group.rank} of {group.size}; "
                "the rank of another replica is needed."
            )
        if (
            message.dtype != torch.uint8
            or message.dim() != 1
            or not message.is_contiguous()
            or message.device.type != "cpu"
        ):
            raise ConfigurationError(
                f"a message of {message.dtype}, shape {tuple(message.shape)} on {message.device} was given; "
                "a contiguous 1-D uint8 tensor on the CPU is needed. Use `.contiguous().view(torch.uint8)`."
            )
    return {peer: message for peer, message in messages.items() if message.numel()}


def gather(group: Group, payload: bytes, limit: int, purpose: str) -> list[bytes]:
    """Everybody's `payload` in rank order, on every replica.

    Lengths travel first (8 bytes each) and are checked against `limit` before anything is allocated. Every gather uses the same two tags: at
    most one at a time in a group.

    Args:
        group: the replicas; all call this.
        payload: what this replica says, of any length up to `limit`.
        limit: bytes that one payload may have.
        purpose: a word for the ledger and for messages.

    Raises:
        LinkError: a peer is gone or too late, or a payload is longer than `limit`.

    >>> from thinwire import run_threads
    >>> run_threads(2, lambda group: gather(group, b"abc"[: 1 + group.rank], limit=100, purpose="names"))
    [[b'a', b'ab'], [b'a', b'ab']]
    """
    if len(payload) > limit:
        raise LinkError(f"{purpose}: {len(payload)} bytes to send, at most {limit} are allowed; send less.")
    peers = [peer for peer in range(group.size) if peer != group.rank]
    own_length = torch.frombuffer(bytearray(_LENGTH.pack(len(payload))), dtype=torch.uint8)
    lengths = {peer: torch.zeros(_LENGTH.size, dtype=torch.uint8) for peer in peers}
    group.post(TAGS, {peer: own_length for peer in peers}, lengths, purpose).wait()
    sizes = {peer: _LENGTH.unpack(bytes(lengths[peer].tolist()))[0] for peer in peers}
    for peer, size in sizes.items():
        if size > limit:
            raise LinkError(
                f"{purpose}: replica {peer} announces {size} bytes, at most {limit} are allowed. "
                "Is it running the same version of Thinwire?"
            )
    body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    bodies = {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in sizes.items() if size}
    group.post(TAGS + 1, {peer: body for peer in peers} if payload else {}, bodies, purpose).wait()
    return [
        payload if rank == group.rank else bytes(bodies[rank].numpy().tobytes()) if rank in bodies else b""
        for rank in range(group.size)
    ]
