"""The reducer of a hub that averages packets: replicas declare each fragment once, and then it averages round after round.

It has no model, no weights and no vote. All sizes follow from the declarations, which must be equal on all replicas before memory is
allocated or text is parsed. It checks packets as a replica does (`open_packet`). Each fragment has its own thread.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.errors import ConfigurationError, LinkError, PacketError
from thinwire.exchange.chunks import PIECE_NUMEL, Message, cut, packets_nbytes
from thinwire.exchange.decode import Decoder
from thinwire.exchange.round import Round, SendContext
from thinwire.exchange.stage import Stage
from thinwire.lab.star.exchange import DECLARED_NBYTES, DECLARED_TAG, Center
from thinwire.packet import REFUSED, read_header
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.types import State

FRAGMENTS = 256  # most fragments of one group
MOST_NBYTES = 16 << 30  # most bytes of a reducer's buffers


@dataclass(frozen=True)
class Declared:
    """The declaration of a fragment, equal on all replicas."""

    codec: Codec
    feedback: Feedback | None
    numel: int
    key: Key  # the key of its first round

    @classmethod
    def of(cls, body: bytes, parse: Callable[[str], Any], sender: int) -> Declared:
        """Read the declaration in `body`. Raises `PacketError`."""
        try:
            told = json.loads(body)
            codec, feedback = parse(str(told["codec"])), parse(str(told["feedback"]))
            numbers = [told[name] for name in ("numel", "seed", "fragment", "round")]
            if not isinstance(codec, Codec) or not isinstance(feedback, Feedback | None):
                raise ValueError("it names no codec, or no feedback")
            if (
                not all(type(number) is int and -(2**63) <= number < 2**63 for number in numbers)
                or min(numbers[::2]) < 0
            ):
                raise ValueError("a number is out of range")
        except (ValueError, TypeError, KeyError, RecursionError, ConfigurationError) as error:
            raise PacketError(f"what replica {sender} declared of a fragment cannot be read: {error}") from None
        numel, seed, fragment, round_ = numbers
        return cls(codec, feedback, numel, Key(seed, fragment, round_))

    def nbytes(self, size: int) -> int:
        """Bytes of the buffers for two rounds of `size` replicas, one of which begins while the other ends."""
        messages = cut(self.codec, 0, self.numel)
        part = self.numel if self.codec.grain is None else min(self.numel, PIECE_NUMEL)
        floats = 2 * part + max(message.numel for message in messages) + (2 * self.numel if self.feedback else 0)
        return 2 * (size + 1) * packets_nbytes(messages, marks=size) + 4 * floats


class Reducer:
    """Averages the packets of a group's replicas until they leave.

    Args:
        group: the replicas; this process has the rank behind theirs (`WithHub`).
        parse: makes a piece from its text; raises `ConfigurationError` for other text.
        most_nbytes: most bytes of all buffers together.
    """

    def __init__(self, group: Group, parse: Callable[[str], Any], most_nbytes: int = MOST_NBYTES) -> None:
        self._group, self._parse, self._free = group, parse, most_nbytes
        self._context, self._lock = SendContext(group), threading.Lock()
        self._declared: dict[int, dict[int, bytes]] = {}  # by fragment and replica
        self._averaging: list[Future[None]] = []
        self._ends: SimpleQueue[BaseException] = SimpleQueue()
        self._pool = ThreadPoolExecutor(group.size + FRAGMENTS, "thinwire-reducer")
        self.rounds = 0

    def run(self) -> str:
        """Average until a replica leaves; return the error that showed it. Closes the group. Raises `PacketError` for an unexpected message."""
        for rank in range(self._group.size):
            self._pool.submit(self._until_it_ends, self._listen, rank)
        try:
            end = self._ends.get()
            if isinstance(end, LinkError):  # all see that a replica is gone; averages that were sent still arrive
                wait(self._averaging)
        finally:
            self._group.close()
            self._pool.shutdown(wait=True)
            self._context.close(wait=True)
        if not isinstance(end, LinkError):
            raise end
        return str(end)

    def _until_it_ends(self, work: Callable[[Any], None], of: Any) -> None:
        try:
            work(of)
        except BaseException as error:
            self._ends.put(error)

    def _listen(self, rank: int) -> None:
        """Receive a replica's declarations until the group is closed."""
        while True:
            message = torch.empty(DECLARED_NBYTES, dtype=torch.uint8)
            self._group.post(DECLARED_TAG, {}, {rank: message}, "declared").wait()
            self._hear(rank, message.numpy().tobytes())

    def _hear(self, rank: int, body: bytes) -> None:
        try:
            fragment = int(json.loads(body)["fragment"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            raise PacketError(f"replica {rank} declared a fragment in a way that cannot be read.") from None
        with self._lock:
            of = self._declared.setdefault(fragment, {})
            if rank in of or len(self._declared) > FRAGMENTS:
                raise PacketError(
                    f"replica {rank} declared fragment {fragment} twice, or more than {FRAGMENTS} fragments."
                )
            of[rank] = body
            other = min(of)
            if of[other] != body:
                mine, theirs = (each.decode(errors="replace").strip()[:200] for each in (body, of[other]))
                raise PacketError(
                    f"replicas {other} and {rank} declare fragment {fragment} differently: {theirs!r}, {mine!r}."
                )
            if len(of) < self._group.size:
                return
            declared = Declared.of(body, self._parse, rank)
            if declared.numel > self._free or (needed := declared.nbytes(self._group.size)) > self._free:
                raise PacketError(
                    f"fragment {fragment} of {declared.numel} elements is too large: the hub has {self._free} bytes left for it."
                )
            self._free -= needed
            self._averaging.append(self._pool.submit(self._until_it_ends, self._average, declared))

    def _average(self, declared: Declared) -> None:
        """Average round after round of one fragment until the group is closed."""
        messages = cut(declared.codec, 0, declared.numel)
        number, buffers = declared.key.round, self._context.buffers
        held = declared.feedback.init(declared.numel) if declared.feedback else {}
        center = self._open(declared, messages, number, held)
        while True:
            room, void = Decoder(center.round, declared.codec), False
            for index in range(len(messages)):
                void |= bool(center.average(index, room).flags & REFUSED)
            room.close()
            before, after = (center.owner.after, held) if void else (held, center.owner.after)
            ended, held, number = center.round, after, number + 1
            center = self._open(declared, messages, number, held)  # before the replicas have the previous mean
            ended.close()
            buffers.give(*before.values())
            with self._lock:
                self.rounds += 1

    def _open(self, declared: Declared, messages: tuple[Message, ...], number: int, held: State) -> Center:
        key = replace(declared.key, round=number, sender=self._group.size)
        round_ = Round(self._context, declared.codec, declared.numel, key, _silence)
        return Center(round_, messages, declared.feedback, held, _FromReplicas(round_, declared.codec))


class _FromReplicas(Stage):
    """The stage from replicas to a hub, which takes the number of inner steps from the first packet."""

    def _opened(self, sender: int, index: int, message: Message, room: Tensor) -> tuple[int, Tensor]:
        if not self.round.step:
            self.round.step = read_header(room).step
        return super()._opened(sender, index, message, room)


def _silence(begin: int, end: int) -> Tensor:
    raise AssertionError("a hub has no delta of its own")
