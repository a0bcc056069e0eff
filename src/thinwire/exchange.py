"""How packets become one estimate.

Two halves, so that several flights can share the link: `depart` encodes and starts sending, `arrive` waits, checks
and decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import NonFiniteError
from thinwire.group.base import TAGS, Group, Transfer
from thinwire.packet import HEADER_NBYTES, REFUSED, Header, empty_packet, identity, open_packet, payload, seal
from thinwire.seeds import Key


@dataclass(frozen=True)
class Departure:
    """A round in progress, between `depart` and `arrive`."""

    key: Key  # of this replica's own packet
    packets: tuple[Tensor, ...]  # by sender, this replica's own among them
    headers: tuple[Header, ...]  # what is due from each
    transfer: Transfer
    nbytes: int  # sent by this replica, all peers together


@runtime_checkable
class Exchange(Protocol):
    def depart(self, group: Group, codec: Codec, delta: Tensor, key: Key, flags: int) -> Departure:
        """Encode `delta` (flat fp32 CPU) as the packet that `key` names, and start sending. NaN or infinity sends `REFUSED` instead."""

    def arrive(self, departure: Departure, codec: Codec) -> tuple[Tensor | None, tuple[int, ...]]:
        """The mean of all deltas, or None if any replica refused; and every replica's flags.

        Depends on the packets' bytes only, so it is the same on every replica. Raises `LinkError`, `PacketError`.
        """

    def sent(self, departure: Departure, codec: Codec) -> Tensor:
        """What this replica's own packet decodes to, everywhere."""

    def nbytes_sent(self, codec: Codec, numel: int, size: int) -> int:
        """Bytes one replica of `size` sends for a round of `numel` elements, headers included."""


@dataclass(frozen=True)
class Direct:
    """Everybody sends its packet to everybody: one round trip, (M−1)·nbytes sent by each; best for few replicas.

    Accumulation is in fp32 and in rank order, and a replica decodes its own packet too, so every replica computes
    the same bits.
    """

    def depart(self, group: Group, codec: Codec, delta: Tensor, key: Key, flags: int) -> Departure:
        nbytes = codec.nbytes(delta.numel())
        own = Header(identity(codec), key.sender, key.fragment, key.round, delta.numel(), nbytes)
        headers = tuple(replace(own, sender=sender) for sender in range(group.size))
        packets = tuple(empty_packet(nbytes) for _ in range(group.size))
        packet = packets[group.rank]
        try:
            codec.encode(delta, payload(packet), key)
        except NonFiniteError:
            payload(packet).zero_()
            flags |= REFUSED
        seal(packet, replace(own, flags=flags))
        peers = [peer for peer in range(group.size) if peer != group.rank]
        tag = (key.round << 12 | key.fragment & 0xFFF) % TAGS
        transfer = group.post(tag, {peer: packet for peer in peers}, {peer: packets[peer] for peer in peers})
        return Departure(key, packets, headers, transfer, len(peers) * packet.numel())

    def arrive(self, departure: Departure, codec: Codec) -> tuple[Tensor | None, tuple[int, ...]]:
        departure.transfer.wait()
        flags = tuple(open_packet(packet, due) for packet, due in zip(departure.packets, departure.headers))
        if any(f & REFUSED for f in flags):
            return None, flags
        estimate = torch.zeros(departure.headers[0].numel)
        for sender, packet in enumerate(departure.packets):
            codec.decode_add(payload(packet), estimate, replace(departure.key, sender=sender))
        return estimate.div_(len(departure.packets)), flags

    def sent(self, departure: Departure, codec: Codec) -> Tensor:
        out = torch.zeros(departure.headers[0].numel)
        codec.decode_add(payload(departure.packets[departure.key.sender]), out, departure.key)
        return out

    def nbytes_sent(self, codec: Codec, numel: int, size: int) -> int:
        return (size - 1) * (HEADER_NBYTES + codec.nbytes(numel))
