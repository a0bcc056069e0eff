"""Vectors between the ranks of a site, point to point: coded, cut and put together again.

Nothing but payloads travels: both sides know their sizes, and ranks that differ in code or settings have found out when they
met (`contact.agree`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.rng import Key
from thinwire.sharding.layout import Span


@dataclass(frozen=True)
class Carrier:
    """What all messages of one rank have alike."""

    group: Group
    seed: int

    def gather(
        self, codec: Codec, own: Tensor, spans: Mapping[int, Span], out: Tensor, tag: int, round_: int, purpose: str
    ) -> None:
        """Fill `out` (flat fp32) with what every rank of `spans` has of it; `own` is this rank's. The own part is decoded, too: all
        have the same bits. Raises `NonFiniteError`, `LinkError`, `PacketError`.
        """
        rank = self.group.rank
        key = Key(self.seed, tag, round_, rank)
        payload = torch.empty(codec.nbytes(own.numel()), dtype=torch.uint8)
        codec.encode(own, payload, key)
        peers = [peer for peer in spans if peer != rank]
        landing = {peer: torch.empty_like(payload) for peer in peers}
        self.group.post(tag, dict.fromkeys(peers, payload), landing, purpose).wait()
        out.zero_()
        for peer, (begin, end) in spans.items():
            codec.decode_add(landing.get(peer, payload), out[begin:end], replace(key, sender=peer))

    def gather_exactly(self, own: Tensor, spans: Mapping[int, Span], out: Tensor, tag: int, purpose: str) -> None:
        """The same with the bytes as they are, in any dtype."""
        rank, raw = self.group.rank, out.view(torch.uint8)
        size = out.element_size()
        slices = {peer: raw[begin * size : end * size] for peer, (begin, end) in spans.items()}
        slices.pop(rank).copy_(own.view(torch.uint8))
        self.group.post(tag, dict.fromkeys(slices, own.view(torch.uint8)), slices, purpose).wait()

    def reduce(
        self, codec: Codec, x: Tensor, spans: Mapping[int, Span], weight: float, tag: int, round_: int, purpose: str
    ) -> Tensor:
        """`weight` times the sum of what all ranks of `spans` have of this rank's span of `x` (flat fp32).

        Added in fp32, in the order of ranks. The own part is not rounded: nobody else keeps this sum.
        """
        rank = self.group.rank
        key = Key(self.seed, tag, round_, rank)
        begin, end = spans[rank]
        sending = {}
        for peer, (first, last) in spans.items():
            if peer != rank:
                sending[peer] = torch.empty(codec.nbytes(last - first), dtype=torch.uint8)
                codec.encode(x[first:last], sending[peer], replace(key, part=1 + peer))
        landing = {peer: torch.empty_like(payload) for peer, payload in sending.items()}
        self.group.post(tag, sending, landing, purpose).wait()
        total = torch.zeros(end - begin)
        for peer in spans:
            if peer == rank:
                total.add_(x[begin:end] * weight)
            else:
                codec.decode_add(landing[peer], total, replace(key, sender=peer, part=1 + rank), weight)
        return total

    def vote(self, flags: int, tag: int, purpose: str) -> int:
        """The flags that any rank of the group has set, up to 255."""
        own = torch.tensor([flags], dtype=torch.uint8)
        others = {peer: torch.zeros_like(own) for peer in range(self.group.size) if peer != self.group.rank}
        self.group.post(tag, dict.fromkeys(others, own), others, purpose).wait()
        for other in others.values():
            flags |= int(other)
        return flags
