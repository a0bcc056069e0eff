"""The interface of carriers of bytes between replicas.

A `Group` is the set of replicas that exchange with each other, seen from one of them. It sends messages of known size,
or of a known largest size, from one replica to another, and knows nothing of tensors, rounds or fragments. So wrappers that count bytes
or emulate a link need only these few methods.
"""

from __future__ import annotations

import struct
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError, LinkError

_LENGTH = struct.Struct("<Q")
TAGS = 1 << 30  # carriers take tags below this; a `gather` uses two of the next ones
_GATHERS = 1 << 28  # operations that `gather` tells apart
CONTROL, CONTROL_TAGS = (
    TAGS + 2 * _GATHERS,
    1 << 16,
)  # the first tag of the messages of monitors, and the number of these tags
TIMEOUT = 1800.0  # seconds of a wait, as torch.distributed's own: a first step that compiles, a slow loader, a long evaluation
_FOREVER = 10 * 365 * 86400.0  # seconds; what carriers can still add to a clock
_waits = threading.local()  # whether the waits of this thread are unlimited


Messages = Mapping[int, Tensor]  # by the rank of the peer
Sized = Callable[[Tensor], int]  # the number of bytes that the message in a buffer declares


class Transfer(Protocol):
    """Messages in transit.

    `queued_seconds` (waiting for the uplink) and `transfer_seconds` (from the first bit to the arrival of the last)
    are the times of sent messages on an emulated link (`LinkedGroup`); 0.0 on other carriers, which cannot measure them.
    """

    @property
    def queued_seconds(self) -> float: ...

    @property
    def transfer_seconds(self) -> float: ...

    @property
    def arrivals(self) -> Mapping[int, float]:
        """The times at which `wait` found the message of each peer (`time.monotonic`); a message may have arrived earlier."""

    def wait(self) -> None:
        """Return when all posted messages have been handed over and received. Call it from one thread.

        A message may stay with its sender until the receiver has posted its side (as in gloo), so post both
        directions before waiting for either. Raises `LinkError` if a peer is gone, or too late. Never use the buffers of a
        failed transfer again.
        """


@runtime_checkable
class Group(Protocol):
    """Carries bytes between replicas.

    `rank` is this replica's number in 0..`size`-1. Messages are one-dimensional contiguous uint8 CPU tensors. Both sides know
    their sizes beforehand. If a size depends on values, both know its upper bound: the receiver's buffer has that size, and the
    message may be shorter and contains its length. So no length is sent ahead, which would cost a round trip.
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
        are matched in the order of posting. Buffers belong to the transfer until `wait` returns. Empty messages
        are not sent. `purpose` is a word for the ledger. With `sized`, a received message may be shorter than its buffer; `sized` returns
        the message's length, which comes from a peer and must be checked. Raises `LinkError` only if this group was closed;
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


class ElasticGroup(ABC):
    """Replicas that come and go: a `thinwire.membership.Membership`. It builds a `Group` for each view, and names the driver of its replicas."""

    name: str  # of this replica

    @abstractmethod
    def driver(self, training: Any, fragments: Any, site: Group | None) -> Any:
        """The driver of this replica."""


class WrappedTransfer:
    """A `Transfer` with the times of another one: a subclass may write `wait`."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    @property
    def queued_seconds(self) -> float:
        return self.transfer.queued_seconds

    @property
    def transfer_seconds(self) -> float:
        return self.transfer.transfer_seconds

    @property
    def arrivals(self) -> Mapping[int, float]:
        return self.transfer.arrivals

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.transfer.wait()


@contextmanager
def unlimited() -> Iterator[None]:
    """A context in which this thread's waits do not end for time: who waits looks otherwise whether the peers live (`drivers/monitor.py`)."""
    before, _waits.unlimited = getattr(_waits, "unlimited", False), True
    try:
        yield
    finally:
        _waits.unlimited = before


def limit(timeout: float) -> float:
    """Most seconds of a wait of this thread on a carrier that has `timeout`."""
    return _FOREVER if getattr(_waits, "unlimited", False) else timeout


def travelling(group: Group, tag: int, messages: Messages) -> dict[int, Tensor]:
    """The `messages` that are sent (empty ones are not, on any carrier); all are checked first, by the size of the group below."""
    while isinstance(group, WrappedGroup):
        group = group.group
    if not 0 <= tag < CONTROL + CONTROL_TAGS:
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


def gather(group: Group, payload: bytes, limit: int, purpose: str, operation: str = "") -> list[bytes]:
    """Return the `payload` of every replica in rank order, on every replica.

    Lengths are sent first (8 bytes each) and checked against `limit` before memory is allocated. A group can have one gather of an
    `operation` at a time.

    Args:
        group: the replicas; all call this.
        payload: this replica's bytes, of any length up to `limit`.
        limit: the most bytes of one payload.
        purpose: a word for the ledger and for messages.
        operation: what it belongs to, such as the purpose and the inner step: gathers of unlike operations never take each other's
            messages, but wait.

    Raises:
        LinkError: a peer is gone or too late, or a payload is longer than `limit`.

    >>> from thinwire import run_threads
    >>> run_threads(2, lambda group: gather(group, b"abc"[: 1 + group.rank], limit=100, purpose="names"))
    [[b'a', b'ab'], [b'a', b'ab']]
    """
    if len(payload) > limit:
        raise LinkError(f"{purpose}: {len(payload)} bytes to send, at most {limit} are allowed; send less.")
    peers = [peer for peer in range(group.size) if peer != group.rank]
    tag = TAGS + 2 * (zlib.crc32(operation.encode()) % _GATHERS)  # crc32 of nothing is 0
    own_length = torch.frombuffer(bytearray(_LENGTH.pack(len(payload))), dtype=torch.uint8)
    lengths = {peer: torch.zeros(_LENGTH.size, dtype=torch.uint8) for peer in peers}
    group.post(tag, {peer: own_length for peer in peers}, lengths, purpose).wait()
    sizes = {peer: _LENGTH.unpack(bytes(lengths[peer].tolist()))[0] for peer in peers}
    for peer, size in sizes.items():
        if size > limit:
            raise LinkError(
                f"{purpose}: replica {peer} announces {size} bytes, at most {limit} are allowed. "
                "Is it running the same version of Thinwire?"
            )
    body = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
    bodies = {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in sizes.items() if size}
    group.post(tag + 1, {peer: body for peer in peers} if payload else {}, bodies, purpose).wait()
    return [
        payload if rank == group.rank else bytes(bodies[rank].numpy().tobytes()) if rank in bodies else b""
        for rank in range(group.size)
    ]


# ---- one Replica at a time: packets do not name their Replica, so those of two would mix

# By the id of the carrier, which its claim keeps alive.
_claims: WeakValueDictionary[int, GroupClaim] = WeakValueDictionary()

# By its id: a carrier whose Replica was dropped. What that one still waits for would take the messages to the next one.
_dropped: WeakValueDictionary[int, Group] = WeakValueDictionary()


def gather_beside_training(group: Group, payload: bytes, limit: int, purpose: str) -> list[bytes]:
    """As `gather`. If a Replica is at work on `group`, all must call it after the same step, and one that does not is named in a second."""
    if (claim := _claims.get(id(group))) and claim.gather:
        return claim.gather(payload, limit, purpose)
    return gather(group, payload, limit, purpose)


class GroupClaim:
    """A Replica's claim on the carrier below `group`, from `take` to `release`. Raises `ConfigurationError` if another one has it."""

    gather: Callable[[bytes, int, str], list[bytes]] | None = None

    def __init__(self, group: Group | ElasticGroup) -> None:
        if not isinstance(group, (Group, ElasticGroup)):
            raise ConfigurationError(
                f"group: a {type(group).__name__} was given; this replica's Group or Membership is needed (docs/own-loop.md)."
            )
        self._given = group
        while isinstance(group, WrappedGroup):
            group = group.group
        self._carrier, self._held = group, False
        self._drop: finalize[..., GroupClaim] | None = None
        if _dropped.get(id(group)) is group:
            raise ConfigurationError(
                "this group has had a Replica or a GradientHook that was neither finished nor closed, and some of its messages are still open. "
                "Make another group on all replicas; next time call finish() or close() before you drop one."
            )
        before = _claims.get(id(group))
        if before and before._held:
            raise ConfigurationError(
                "this group has a Replica or a GradientHook that has not finished, or was closed with rounds in flight, and their packets would "
                "mix. Finish it, or make a group for each; one Replica takes both models as one module, with their optimizers in a list."
            )

    def take(self, gather: Callable[[bytes, int, str], list[bytes]] | None = None) -> None:
        """Called when the Replica is complete: one that failed has no claim. `gather` is its own, which notices who takes no part."""
        self._held, self.gather = True, gather
        _claims[id(self._carrier)] = _claims[id(self._given)] = self
        if isinstance(self._carrier, Group) and self._carrier.size > 1:
            with suppress(TypeError):  # a carrier of which there are no weak references
                ref(self._carrier)
                self._drop = finalize(self, _dropped.__setitem__, id(self._carrier), self._carrier)
                self._drop.atexit = False

    def release(self, over: bool) -> None:
        """Called at the end; the claim stays if rounds are not `over`, because their packets may still arrive."""
        self._held &= not over
        self.gather = None
        if self._drop:
            self._drop.detach()
