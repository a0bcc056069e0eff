"""A round, as it is passed to an exchange: its signal and its buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group, Transfer
from thinwire.errors import LinkError
from thinwire.exchange.buffers import CPU, Buffers
from thinwire.exchange.chunks import Signal
from thinwire.exchange.record import Record, Trace
from thinwire.exchange.send_queue import PACKET, Order, Outgoing, SendQueue
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.rng import Key
from thinwire.types import State


class SendContext:
    """The common objects of all rounds of one replica: the group, the send queue, the buffers, and the clock.

    Args:
        group: the replicas that exchange.
        clock: seconds, monotonic.

    >>> from thinwire import run_threads
    >>> def replica(group):
    ...     context = SendContext(group)
    ...     context.close(wait=True)
    ...     return context.group.size
    >>> run_threads(2, replica)
    [2, 2]
    """

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self.group, self.send_queue, self.buffers, self.clock = group, SendQueue(group, clock), Buffers(), clock
        self.declared: dict[int, tuple[object, Transfer]] = {}  # each fragment's declaration to a hub

    def close(self, wait: bool = False) -> None:
        """End the sending thread, `wait` for its end, and free the buffers. The group stays open."""
        self.send_queue.close(wait)
        self.buffers.clear()


@dataclass
class Round:
    """The task of an exchange: carry `numel` elements of `signal`, encoded by `codec`.

    Args:
        context: the group, its send queue and its buffers.
        codec: the codec of the packets.
        numel: number of elements.
        key: of this replica's packet.
        signal: gives the flat fp32 values from element `begin` to `end`.
        flags: number that goes with the packet; bits of `thinwire.packet`.
        order: messages of the smallest `order` leave first (`SendQueue`).
        step: number of inner steps before the departure, if it is the same on all replicas.
        aggregate: makes one estimate from all replicas' values.
        remembered: the aggregate's state before the round.
        after: the aggregate's next state; filled by the exchange.
        outgoing: the packets that are being sent; filled by the exchange.
        packets: uint8 buffers that `close` gives back.
        anchor: the fragment's values before its inner steps, flat fp32.
        device: where the signal is, and where `Direct` decodes packets of whole fragments.
        decodes_own: whether the exchange yields this replica's own values with the estimate.
        on_stream: a context in which work on that device follows what was queued before the departure.
        trace: times of this replica's messages, for diagnosis.

    >>> from thinwire import run_threads
    >>> from thinwire.codecs import Identity
    >>> def replica(group):
    ...     round_ = Round(SendContext(group), Identity(), 4, Key(sender=group.rank), lambda begin, end: None)
    ...     return round_.peers
    >>> run_threads(3, replica)
    [[1, 2], [0, 2], [0, 1]]
    """

    context: SendContext
    codec: Codec
    numel: int
    key: Key
    signal: Signal
    flags: int = 0
    order: Order = ()
    step: int = 0
    aggregate: Aggregate = Mean()
    remembered: State = field(default_factory=dict)
    after: State = field(default_factory=dict)
    outgoing: list[Outgoing] = field(default_factory=list)
    packets: list[Tensor] = field(default_factory=list)
    anchor: Tensor | None = None
    device: torch.device = CPU
    decodes_own: bool = True
    on_stream: Callable[[], AbstractContextManager[object]] = nullcontext
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.begun = self.context.clock()

    @property
    def rank(self) -> int:
        return self.context.group.rank

    @property
    def size(self) -> int:
        return self.context.group.size

    @property
    def peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    @property
    def nbytes_sent(self) -> int:
        """Bytes of packets sent to all peers together, headers included."""
        return sum(one.nbytes for one in self.outgoing if one.transfer is not None and one.purpose == PACKET)

    def remembers(self, before: State) -> State:
        """Buffers for the aggregate's next state, with the sizes of `before`."""
        if not self.after and before:
            self.after = {name: self.context.buffers.floats(kept.numel()) for name, kept in before.items()}
        return self.after

    def close(self) -> None:
        """Wait until all packets are handed over, and give the buffers back: when the last range has been used. Do not call it for a failed
        round, whose buffers may still be written to.
        """
        for outgoing in self.outgoing:
            try:
                outgoing.wait_sent()
            except LinkError as error:
                self.trace.not_taken(error.peer)
                raise
        self.context.buffers.give(*self.packets)
        self.packets.clear()

    def own_failure(self) -> BaseException | None:
        """The error of this replica's own encoding, if there is one; errors of peers that miss a message follow from it."""
        for outgoing in self.outgoing:
            if outgoing.written.done() and not outgoing.written.cancelled() and outgoing.written.exception():
                return outgoing.written.exception()
        return None

    def record(self, names: Sequence[str], own_seconds: float, over: bool) -> Record:
        """This replica's observations of the round, for diagnosis. See `Record`."""
        return self.trace.record(self.key.fragment, self.key.round, names, self.rank, own_seconds, over)

    def times(self) -> tuple[float, float]:
        """Seconds queued before the first bit left, and seconds from then to the arrival of the last bit, if the carrier knows them."""
        sent = [(one.posted, one.transfer) for one in self.outgoing if one.transfer and one.transfer.transfer_seconds]
        if not sent:
            return 0.0, 0.0
        begins = [posted + transfer.queued_seconds for posted, transfer in sent]
        end = max(begin + transfer.transfer_seconds for begin, (_, transfer) in zip(begins, sent))
        return min(begins) - self.begun, end - min(begins)
