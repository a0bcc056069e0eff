"""Where packets become the aggregate of what they say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.exchange.chunks import CodedRange, Message
from thinwire.exchange.round import Round
from thinwire.packet import payload
from thinwire.pieces.aggregate import Values
from thinwire.rng import Key


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
