"""Decodes packets and aggregates their values.

For an aggregate that `needs_products`, `measure` first adds up inner products range by range, and `choose` passes the products of the
whole fragment to the aggregate; then `mean` is called. A replica that refused counts as one that sent NaN, if the aggregate tolerates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.exchange.buffers import CPU
from thinwire.exchange.chunks import CodedRange, Message
from thinwire.exchange.round import Outgoing, Round
from thinwire.packet import REFUSED, payload
from thinwire.pieces.aggregate import Values
from thinwire.pieces.products import inner_products
from thinwire.rng import Key


class Decoder:
    """Decodes a round's packets on `device`, one range at a time. A returned tensor is valid until the next call."""

    def __init__(self, round_: Round, codec: Codec, messages: Iterable[Message], device: torch.device = CPU) -> None:
        numel = max((coded.end - coded.begin for message in messages for coded in message.ranges), default=0)
        self._codec, self._joins, self._buffers = codec, codec.joint, round_.context.buffers
        self._mean, self._sent = self._buffers.floats(numel, device), self._buffers.floats(numel, device)
        self._round, self._aggregate, self._device = round_, round_.aggregate, device
        self.needs_products = self._aggregate.needs_products and not self._joins
        self.products = torch.zeros(round_.size, round_.size, dtype=torch.float64)  # what `measure` has added up
        self._tolerates = self._aggregate.tolerates(round_.size)

    def void(self, flags: Iterable[int]) -> bool:
        """Whether there is no estimate because, by all replicas' `flags`, more have refused than the aggregate tolerates."""
        return sum(bool(f & REFUSED) for f in flags) > self._tolerates

    def measure(
        self, coded: CodedRange, first: int, packets: Mapping[int, Tensor], key: Key, flags: Sequence[int]
    ) -> None:
        """Add the inner products of the values of `packets` in the range `coded`; this replica's part begins at element `first`."""
        values = torch.stack([one.decoded() for one in self._values(coded, packets, key, flags)])
        begin, end = coded.begin - first, coded.end - first
        before, after = (
            {name: kept[begin:end] for name, kept in state.items()}
            for state in (self._round.remembered, self._round.remembers(self._round.remembered))
        )
        self.products += inner_products(self._aggregate.measured(values, before, after))

    def choose(self, products: Tensor) -> None:
        """Give the aggregate the whole fragment's `products`; `mean` uses what it returns."""
        self._aggregate = self._aggregate.given(products, replace(self._round.key, sender=0))

    def mean(
        self,
        coded: CodedRange,
        packets: Mapping[int, Tensor],
        key: Key,
        weights: Mapping[int, float] | None = None,
        flags: Sequence[int] = (),
    ) -> Tensor:
        """The aggregate of the range `coded` of all `packets`, in rank order. `weights` add up to 1, `flags` are those of the senders."""
        mean = self._mean[: coded.end - coded.begin].zero_()
        values = self._values(coded, packets, key, flags)
        shares = [weights[sender] for sender in sorted(packets)] if weights else None
        if self._joins:
            counts = shares or [1.0] * len(values)
            said = [(one.payload, one.key, count) for one, count in zip(values, counts)]
            return mean.copy_(self._codec.decode_joint(said, mean.numel()))
        self._aggregate.into(mean, values, shares)
        return mean

    def owners(self, coded: CodedRange, owner: int, packet: Tensor, key: Key) -> Tensor:
        """The aggregate of the range `coded` that its `owner` sent."""
        if self._joins:
            return self.mean(coded, {owner: packet}, key)
        mean = self._mean[: coded.end - coded.begin].zero_()
        self._codec.decode_add(self._payload(coded, packet), mean, key)
        return mean

    def _values(self, coded: CodedRange, packets: Mapping[int, Tensor], key: Key, flags: Sequence[int]) -> list[Values]:
        numel = coded.end - coded.begin
        return [
            Values(
                self._codec, self._payload(coded, packets[sender]), replace(key, sender=sender), numel,
                bool(flags) and bool(flags[sender] & REFUSED),
            )
            for sender in sorted(packets)
        ]  # fmt: skip

    def own(self, coded: CodedRange, outgoing: Outgoing, key: Key) -> Tensor:
        """The values of the range `coded` in this replica's own packet; NaN if it refused."""
        if outgoing.flags & REFUSED:
            return self._sent[: coded.end - coded.begin].fill_(torch.nan)
        return self.sent(coded, outgoing.packet, key)

    def sent(self, coded: CodedRange, packet: Tensor, key: Key) -> Tensor:
        """The values of the range `coded` in one replica's `packet`, its own or that of the sender of `key`."""
        out = self._sent[: coded.end - coded.begin].zero_()
        self._codec.decode_add(self._payload(coded, packet), out, key)
        return out

    def _payload(self, coded: CodedRange, packet: Tensor) -> Tensor:
        return payload(packet)[coded.first : coded.last].to(self._device)

    def close(self) -> None:
        self._buffers.give(self._mean, self._sent)
