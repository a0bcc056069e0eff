"""What an exchange is: how packets become one estimate."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, encode_from
from thinwire.comm.emulated import Link
from thinwire.comm.group import TAGS, Group, Transfer
from thinwire.diagnosis.records import Record
from thinwire.errors import DisagreementError, LinkError, NonFiniteError, PacketError
from thinwire.exchange.buffers import Buffers
from thinwire.exchange.chunks import STAGE, CodedRange, Message, Signal
from thinwire.exchange.send_queue import Order, SendQueue, Sent
from thinwire.exchange.trace import Trace
from thinwire.packet import HEADER_NBYTES, REFUSED, STOP, Header, identity, open_packet, payload, seal
from thinwire.pieces.aggregate import Aggregate, Mean, Values
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.state import State

Settle = Callable[[int, Tensor, Callable[[], Tensor]], None]
"""Takes the estimate of the elements from the first number on; the last gives what this replica's own packets say of them.
Both tensors are lent until the call returns."""

MOST_STAGES = 32  # of a round: their numbers have five bits in a tag


@runtime_checkable
class Exchange(Protocol):
    """How every replica's values of a fragment become one estimate of their mean, the same bits on all.

    Two halves, so that several rounds share the link: `depart` starts receiving and sending, `arrive` waits, decodes
    and hands over the estimate range by range. What an exchange remembers of a fragment is its state: `init` makes it,
    `arrive` returns the next and changes nothing of the present one, so a round that fails has changed nothing.

    Laws (tests/exchange/test_exchanges.py): the estimate depends on the bytes that travelled and on nothing else;
    `nbytes_sent` is what the ledger counts for the purpose "packet"; a codec that does not fit is refused by `check`.
    A subclass writes the four abstract methods, and declares what else is so of it.
    """

    @property
    def gathers(self) -> bool:
        """Whether all replicas' values of a range are in one place at once, so that any `Aggregate` can be taken of them; else a linear one."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round, as the end of a sentence that begins with the exchange; empty: they
        may come and go, and it keeps no state of those it has met.
        """
        return "does not declare that replicas may come and go (needs_fixed_group = '')"

    @property
    def feedback(self) -> Feedback | None:
        """What whoever sends a mean of others' values holds back of it."""
        return None

    @property
    def sends_own(self) -> bool:
        """What travels in the codec are single replicas' values, not sums of them."""
        return True

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        """Raise `ConfigurationError` unless this exchange can carry what `codec` makes, under the strategy's `feedback`."""
        return

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        """What replica `rank` of `size` remembers of a fragment, at first; on the CPU. Raises `ConfigurationError` if
        the group does not fit.
        """
        return {}

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        """A line for each choice made for `fragments` (codec and elements of each), where there is one to make."""
        return []

    @abstractmethod
    def depart(self, round_: Round, state: State) -> Any:
        """Start a round; what comes back is for `arrive`. Does not wait for peers."""

    @abstractmethod
    def arrive(self, departure: Any, settle: Settle) -> Arrival:
        """End the round that `depart` began. Raises `LinkError`, `PacketError`."""

    @abstractmethod
    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        """Bytes that replica `rank` of `size` (without: the one that sends most) sends for a round, headers included."""

    @abstractmethod
    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        """How long a round lasts if every replica's uplink is `link` and nothing else is on it (predicted)."""


@dataclass(frozen=True)
class Arrival:
    """The end of a round: every replica's flags, and the exchange's next state. `void`, or one that has `REFUSED`: there is
    no estimate, whatever was handed over. `void` alone is nobody's fault: a sum has overflowed.
    """

    flags: tuple[int, ...]
    state: State
    void: bool = False


class SendContext:
    """What the rounds of one replica share: the group, the order in which they send, their buffers, and the group's clock."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self.group, self.send_queue, self.buffers, self.clock = group, SendQueue(group, clock), Buffers(), clock

    def close(self, wait: bool = False) -> None:
        """End the sending thread, and `wait` for its end. The group stays open."""
        self.send_queue.close(wait)


@dataclass
class Round:
    """What an exchange is to do: carry `signal`, `numel` elements of it, coded by `codec`; and what it used for that.

    `key` names the own packet, `flags` go with it, `order` says whose messages leave first (`SendQueue`); `step` is the inner step after
    which it departs, where that is the same on all replicas; `aggregate` makes one estimate of what all say.
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
    outgoing: list[Outgoing] = field(default_factory=list)
    packets: list[Tensor] = field(default_factory=list)
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

    def packet(self, nbytes: int) -> Tensor:
        """Decoder for a packet with a payload of `nbytes`."""
        self.packets.append(self.context.buffers.bytes(HEADER_NBYTES + nbytes))
        return self.packets[-1]

    def close(self) -> None:
        """Wait until all that was sent is handed over, and give the buffers back. Not for a round that failed: its
        buffers may still be written to.
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
        """What went wrong in encoding, if anything did: peers that miss a message are only its consequence."""
        for outgoing in self.outgoing:
            if outgoing.written.done() and not outgoing.written.cancelled() and outgoing.written.exception():
                return outgoing.written.exception()
        return None

    def record(self, names: Sequence[str], own_seconds: float, over: bool) -> Record:
        """What this replica saw of the round, for diagnosis. See `Record`."""
        return self.trace.record(self.key.fragment, self.key.round, names, self.rank, own_seconds, over)

    def times(self) -> tuple[float, float]:
        """Seconds queued before the first bit left, and from then to the arrival of the last, as far as the carrier knows."""
        sent = [o.sent for o in self.outgoing if o.sent and o.sent.transfer.transfer_seconds]
        if not sent:
            return 0.0, 0.0
        begins = [one.posted + one.transfer.queued_seconds for one in sent]
        end = max(begin + one.transfer.transfer_seconds for begin, one in zip(begins, sent))
        return min(begins) - self.begun, end - min(begins)


class Outgoing:
    """A packet that is being written and sent."""

    def __init__(self, message: Message, packet: Tensor) -> None:
        self.message, self.packet = message, packet
        self.flags = 0
        self.sent: Sent | None = None
        self.written: Future[None] = Future()
        self._posted: Future[None] | None = None

    def leaves_with(self, posted: Future[None]) -> None:
        """`posted` is done when the packet is with the carrier; if it is cancelled, nobody will write it either."""
        self._posted = posted
        posted.add_done_callback(lambda done: done.cancelled() and self.written.cancel())

    def wait(self) -> Tensor:
        """The packet, when it is written."""
        self.written.result()
        return self.packet

    def wait_sent(self) -> None:
        """Return when the packet is handed over. Raises what went wrong."""
        self.written.result()
        if self._posted is not None:
            self._posted.result()
        if self.sent is not None:
            self.sent.wait()


class _Expected(NamedTuple):
    transfer: Transfer
    messages: dict[int, Message]  # by peer
    packets: dict[int, Tensor]


class Stage:
    """One wave of a round's messages: every replica knows whose it gets and how long they are.

    Several stages of a round have different numbers. `marks` bytes follow every payload, `purpose` is the ledger's.
    Where packets of another stage are passed on, `passes` is that stage's number.
    """

    def __init__(
        self,
        round_: Round,
        codec: Codec,
        number: int = 0,
        marks: int = 0,
        purpose: str = "packet",
        passes: int | None = None,
    ) -> None:
        self.round, self.codec, self.number, self.marks, self.purpose = round_, codec, number, marks, purpose
        self._named = number if passes is None else passes
        self._expected: list[_Expected] = []

    def expect(self, due: Mapping[int, Sequence[Message]]) -> None:
        """Start receiving from each peer its messages.

        Who is looked at first changes: a carrier may see a message only after those before it.
        """
        sizes = {peer: [HEADER_NBYTES + m.nbytes + self.marks for m in of_peer] for peer, of_peer in due.items()}
        self.round.trace.expect(self.number, sizes, self.round.context.clock())
        peers = list(due)
        for index in range(max(map(len, due.values()), default=0)):
            first = (self.round.key.round + index) % len(peers)
            messages = {peer: due[peer][index] for peer in peers[first:] + peers[:first] if index < len(due[peer])}
            packets = {p: self.round.packet(message.nbytes + self.marks) for p, message in messages.items()}
            transfer = self.round.context.group.post(self._tag(index), {}, packets, self.purpose)
            self._expected.append(_Expected(transfer, messages, packets))

    def receive(self, index: int, authors: Mapping[int, int] | None = None) -> dict[int, int]:
        """Wait for the message `index` of all who send one; the flags of each. `authors` are those whose packets a peer
        passes on. Raises `LinkError`, `PacketError`.
        """
        if index >= len(self._expected):
            return {}
        transfer, messages, packets = self._expected[index]
        began = self.round.context.clock()
        try:
            transfer.wait()
        except BaseException:
            self._look_around(index)
            raise
        finally:
            self.round.trace.came(self.number, index, list(packets), began, transfer.arrivals)
        senders = {peer: peer for peer in sorted(packets)} | dict(authors or {})
        return {
            peer: open_packet(
                packets[peer], self._header(replace(self.round.key, sender=sender), index, messages[peer])
            )
            for peer, sender in senders.items()
            if peer in packets
        }

    def _look_around(self, index: int) -> None:
        """Note which messages from `index` on are there although nobody waited for them, because one before them is missing."""
        for number, expected in enumerate(self._expected[index:], index):
            for peer, packet in expected.packets.items():
                with suppress(PacketError, DisagreementError):
                    header = self._header(replace(self.round.key, sender=peer), number, expected.messages[peer])
                    if peer not in expected.transfer.arrivals and open_packet(packet, header) >= 0:
                        self.round.trace.lies_there(self.number, peer)

    def packet(self, index: int, peer: int) -> Tensor:
        """What came from `peer`."""
        return self._expected[index].packets[peer]

    def write(
        self, index: int, message: Message, signal: Signal, key: Key, flags: int, marks: Sequence[int] = ()
    ) -> Outgoing:
        """Encode a message here and now."""
        outgoing = self._outgoing(message)
        self._write(outgoing, index, signal, key, flags, marks)
        return outgoing

    def post(self, index: int, packet: Outgoing, to: Sequence[int]) -> None:
        """Send what is written when it is its turn."""
        packet.leaves_with(self.round.context.send_queue.put(self.round.order, lambda: self._post(packet, index, to)))

    def pass_on(self, index: int, message: Message, packet: Tensor, to: Sequence[int]) -> None:
        """Send another's packet as it is when it is its turn."""
        outgoing = Outgoing(message, packet)
        outgoing.written.set_result(None)
        self.round.outgoing.append(outgoing)
        self.post(index, outgoing, to)

    def send(self, index: int, message: Message, to: Sequence[int], signal: Signal, key: Key) -> Outgoing:
        """Encode and send a message of the round's own flags when it is its turn."""
        outgoing = self._outgoing(message)

        def job() -> None:
            self._write(outgoing, index, signal, key, self.round.flags, ())
            self._post(outgoing, index, to)

        outgoing.leaves_with(self.round.context.send_queue.put(self.round.order, job))
        return outgoing

    def _outgoing(self, message: Message) -> Outgoing:
        outgoing = Outgoing(message, self.round.packet(message.nbytes + self.marks))
        self.round.outgoing.append(outgoing)
        return outgoing

    def _write(
        self, outgoing: Outgoing, index: int, signal: Signal, key: Key, flags: int, marks: Sequence[int]
    ) -> None:
        message, body = outgoing.message, payload(outgoing.packet)
        failure: BaseException | None = None
        try:
            for coded in message.ranges:
                encode_from(signal(coded.begin, coded.end), self.codec, body[coded.first : coded.last], key)
        except BaseException as error:  # whatever it is, peers are not to wait for this packet
            failure = None if isinstance(error, NonFiniteError) else error
            body[: message.nbytes].zero_()
            flags |= REFUSED
        body[message.nbytes :] = torch.tensor(list(marks), dtype=torch.uint8)
        try:
            seal(outgoing.packet, replace(self._header(key, index, message), flags=flags))
        except PacketError as error:  # nothing can be sent
            outgoing.written.set_exception(error)
            raise
        outgoing.flags = flags
        if failure is None:
            outgoing.written.set_result(None)
        else:
            outgoing.written.set_exception(failure)

    def _post(self, outgoing: Outgoing, index: int, to: Sequence[int]) -> None:
        if to:
            messages = dict.fromkeys(to, outgoing.packet)
            outgoing.sent = sent = self.round.context.send_queue.send(self._tag(index), messages, self.purpose)
            self.round.trace.left(self.number, index, outgoing.packet.numel(), to, sent.posted)

    def _header(self, key: Key, index: int, message: Message) -> Header:
        """What is due from `key`'s sender."""
        part, nbytes = self._named * STAGE + index, message.nbytes + self.marks
        name = identity(self.codec)
        return Header(name, key.sender, key.fragment, key.round, part, message.numel, nbytes, step=self.round.step)

    def _tag(self, index: int) -> int:
        """Messages of two rounds that may be in the air together, of two stages, and of two places have tags of their
        own; where the numbers do not suffice, the order of posting tells them apart.
        """
        key = self.round.key
        return (key.round << 24 | (key.fragment & 0x3FF) << 14 | self.number << 9 | index & 0x1FF) % TAGS


class Decoder:
    """Where a round's packets are decoded, a range at a time; what it returns is lent until the next call."""

    def __init__(self, round_: Round, codec: Codec, messages: Iterable[Message]) -> None:
        numel = max((coded.end - coded.begin for message in messages for coded in message.ranges), default=0)
        self._codec, self._joins, self._buffers = codec, codec.joint, round_.context.buffers
        self._mean, self._sent = self._buffers.floats(numel), self._buffers.floats(numel)
        self._aggregate = round_.aggregate

    def mean(
        self, coded: CodedRange, packets: Mapping[int, Tensor], key: Key, weights: Mapping[int, float] | None = None
    ) -> Tensor:
        """The aggregate of what all `packets` say of `coded`, in the order of their senders' ranks; `weights` add up to 1."""
        mean = self._mean[: coded.end - coded.begin].zero_()
        bodies = {sender: payload(packets[sender])[coded.first : coded.last] for sender in sorted(packets)}
        keys = [replace(key, sender=sender) for sender in bodies]
        shares = [weights[sender] for sender in bodies] if weights else None
        if self._joins:
            counts = shares or [1.0] * len(keys)
            return mean.copy_(self._codec.decode_joint(list(zip(bodies.values(), keys, counts)), mean.numel()))
        self._aggregate.into(
            mean, [Values(self._codec, b, k, len(mean)) for b, k in zip(bodies.values(), keys)], shares
        )
        return mean

    def sent(self, coded: CodedRange, packet: Tensor, key: Key) -> Tensor:
        """What the own `packet` says of `coded`."""
        out = self._sent[: coded.end - coded.begin].zero_()
        self._codec.decode_add(payload(packet)[coded.first : coded.last], out, key)
        return out

    def close(self) -> None:
        self._buffers.give(self._mean, self._sent)


def heard(packet: Tensor, message: Message, sender: int) -> list[int]:
    """What is behind the payload: every replica's flags, a byte each, as the sender has heard them."""
    marks: list[int] = payload(packet)[message.nbytes :].tolist()
    if any(mark & ~(REFUSED | STOP) for mark in marks):
        raise PacketError(f"replica {sender} forwarded unknown flags {marks}; run the same version everywhere.")
    return marks
