"""Decodes packets and aggregates their values.

A range of a codec with a grain fits into the cache. A sparse codec sends a fragment as one range: its packets are decoded to indices and
values once, and the range is then aggregated in pieces (`Decoder.pieces`), which need no dense buffers of a fragment's size.

For an aggregate that `needs_products`, `measure` first adds up inner products range by range, and `choose` passes the products of the
whole fragment to the aggregate; then `mean` is called. A replica that refused counts as one that sent NaN, if the aggregate tolerates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import Codec
from thinwire.exchange.base import Range
from thinwire.exchange.buffers import CPU, Buffers
from thinwire.exchange.chunks import CodedRange
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.packet import REFUSED, payload
from thinwire.pieces.aggregate import Values
from thinwire.rng import Key

PIECE = 1 << 20  # values of a sparse range that are aggregated at a time: few calls, and little memory


class Decoder:
    """Decodes a round's packets on `device`, one range at a time. A returned tensor is valid until the next call."""

    def __init__(self, round_: Round, codec: Codec, device: torch.device = CPU) -> None:
        self._codec, self._joins, self._buffers = codec, codec.joint, round_.context.buffers
        self._rooms: dict[str, Tensor] = {}  # buffers, by what they hold
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
        from thinwire.exchange.products import inner_products  # few rules need them

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
        mean = self._room("mean", coded.end - coded.begin)
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
        mean = self._room("mean", coded.end - coded.begin)
        self._codec.decode_add(self._payload(coded, packet), mean, key)
        return mean

    def pieces(
        self, coded: CodedRange, packets: Mapping[int, Tensor], key: Key, own: Outgoing, flags: Sequence[int]
    ) -> Iterator[Range]:
        """The estimate of the range `coded` of all `packets`: in pieces if the codec sends `few` values, otherwise at once."""
        whole = coded.end - coded.begin
        count = None if self._joins or self._device.type != "cpu" else self._codec.few(whole)
        if count is None:
            yield Range(coded.begin, self.mean(coded, packets, key, flags=flags), self.own(coded, own, key))
            return
        values = [_Few(one, count, self._buffers) for one in self._values(coded, packets, key, flags)]
        for begin in range(0, max(1, whole), PIECE):
            numel = min(PIECE, whole - begin)
            mean = self._room("mean", numel)
            self._aggregate.into(mean, [one.piece(begin, numel) for one in values])
            mine = values[self._round.rank].piece(begin, numel)
            yield Range(coded.begin + begin, mean, self._own_piece(mine, own) if self._round.decodes_own else None)
        for one in values:
            one.close()

    def _values(self, coded: CodedRange, packets: Mapping[int, Tensor], key: Key, flags: Sequence[int]) -> list[Values]:
        numel = coded.end - coded.begin
        return [
            Values(
                self._codec, self._payload(coded, packets[sender]), replace(key, sender=sender), numel,
                bool(flags) and bool(flags[sender] & REFUSED),
            )
            for sender in sorted(packets)
        ]  # fmt: skip

    def own(self, coded: CodedRange, outgoing: Outgoing, key: Key) -> Tensor | None:
        """The values of the range `coded` in this replica's own packet, if the round decodes them; NaN if it refused."""
        if not self._round.decodes_own:
            return None
        if outgoing.flags & REFUSED:
            return self._room("sent", coded.end - coded.begin).fill_(torch.nan)
        return self.sent(coded, outgoing.packet, key)

    def sent(self, coded: CodedRange, packet: Tensor, key: Key) -> Tensor:
        """The values of the range `coded` in one replica's `packet`, its own or that of the sender of `key`."""
        out = self._room("sent", coded.end - coded.begin)
        self._codec.decode_add(self._payload(coded, packet), out, key)
        return out

    def _payload(self, coded: CodedRange, packet: Tensor) -> Tensor:
        return payload(packet)[coded.first : coded.last].to(self._device)

    def _own_piece(self, piece: Values, own: Outgoing) -> Tensor:
        out = self._room("sent", piece.numel)
        if own.flags & REFUSED:
            return out.fill_(torch.nan)
        piece.add_to(out)
        return out

    def _room(self, name: str, numel: int) -> Tensor:
        """`numel` zeros in a buffer of this decoder."""
        room = self._rooms.get(name)
        if room is None or room.numel() < numel:
            self._buffers.give(room)
            room = self._rooms[name] = self._buffers.floats(numel, self._device)
        return room[:numel].zero_()

    def close(self) -> None:
        self._buffers.give(*self._rooms.values())


class _Few:
    """The few values in one packet, decoded once for each weight."""

    def __init__(self, of: Values, count: int, buffers: Buffers) -> None:
        self._of, self._count, self._buffers = of, count, buffers
        self._decoded: dict[float, tuple[Tensor, Tensor]] = {}

    def piece(self, begin: int, numel: int) -> _Piece:
        """The values of `numel` elements from `begin` on."""
        of = self._of
        return _Piece(of.codec, of.payload, of.key, numel, of.refused, begin=begin, whole=self)

    def add_to(self, out: Tensor, begin: int, weight: float) -> None:
        """out ← out + weight · values, of the elements from `begin` on."""
        if weight not in self._decoded:
            of, index, values = self._of, self._buffers.longs(self._count), self._buffers.floats(self._count)
            of.codec.sent(of.payload, of.numel, index, values, of.key, weight)
            self._decoded[weight] = index, values
        index, values = self._decoded[weight]
        first, last = np.searchsorted(index.numpy(), (begin, begin + out.numel())).tolist()
        kernels.of(index, values, out).add_at(index[first:last], values[first:last], out, begin)

    def close(self) -> None:
        for index, values in self._decoded.values():
            self._buffers.give(index, values)


@dataclass(frozen=True)
class _Piece(Values):
    """The elements from `begin` on of what `whole` has."""

    begin: int = field(kw_only=True)
    whole: _Few = field(kw_only=True)

    def add_to(self, out: Tensor, weight: float = 1.0) -> None:
        self.whole.add_to(out, self.begin, weight)
