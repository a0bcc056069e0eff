"""The exchange for sites: fp32 within a site, the codec between sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Arrival, Exchange, ExchangeTraits, Range, Ranges
from thinwire.exchange.chunks import CodedRange, Message, cut, packets_nbytes, shards
from thinwire.exchange.decode import Decoder
from thinwire.exchange.owner import Owner, check_owners
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import MOST_STAGES, Stage, heard
from thinwire.packet import REFUSED, flags_of, payload
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.types import State

INSIDE = "site"  # the ledger's purpose of messages within a site
MOST_SITES = MOST_STAGES - 2


@dataclass(frozen=True)
class Hierarchy(Exchange):
    """Average deltas in fp32 within a site; send each site's mean to the other sites once, in the codec.

        c_s = C(1/n_s · Σ_{m in s} Δ_m + e_s),   x̂ = Σ_s n_s/M · c_s      site s of n_s replicas; e_s: what `feedback` kept; C: the codec

    `sites` are the sizes of the sites, in the order of ranks, or the ranks of each: `(2, 2)` is `((0, 1), (2, 3))`. A fragment has as many
    shards as the smallest site has replicas (one, if the codec has no grain). The k-th replica of a site owns shard k: it adds up its
    site's values, encodes their mean, and sends it to the k-th replica of every other site. It forwards the packets of these replicas
    within its site unchanged. All decode the same bytes, so all agree bit for bit.

    *Source*: the two hops of ZeRO++'s qgZ (arXiv 2306.10209): two sums, no average of averages.
    *Differs*: the first hop is not compressed, so values are rounded once; in the second every site sends to all others. Only the
    owner's encoding has an error: so `feedback` is an argument here and not of the strategy.

    *Wire*: all replicas of a site together send (S−1)·nbytes to the S−1 other sites, with the ledger's purpose "packet". Messages within
    a site have the purpose "site": `nbytes_inside` has their bytes. Predicted for the link between sites: delay + 8·(bytes that a replica
    sends between sites) / rate.

    Args:
        sites: the number of replicas of each site, or the ranks of each; every rank in exactly one site.
        feedback: keeps the error of the owners' rounding; None: it is lost.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Hierarchy((2, 2)).ranks
    ((0, 1), (2, 3))
    """

    sites: tuple[int, ...] | tuple[tuple[int, ...], ...]
    feedback: Feedback | None = None

    needs_fixed_group: ClassVar[str] = "names the replicas of each site"
    traits: ClassVar[ExchangeTraits] = ExchangeTraits(sends_own=False)

    def __post_init__(self) -> None:
        check_owners(self, self.feedback)
        try:
            ranks = sorted(rank for site in self.ranks for rank in site)
            fits = 0 < len(self.ranks) <= MOST_SITES and all(self.ranks) and ranks == list(range(len(ranks)))
        except TypeError:
            fits = False
        if not fits:
            raise ConfigurationError(
                f"Hierarchy(sites={self.sites!r}): the size of each site, such as (2, 2), or the ranks of each, each rank "
                f"once, such as ((0, 1), (2, 3)), are needed; at most {MOST_SITES} sites."
            )

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each site."""
        found, begin = [], 0
        for site in self.sites:
            found.append(tuple(range(begin, begin + site)) if isinstance(site, int) else tuple(site))
            begin += len(found[-1])
        return tuple(found)

    def site_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the site of `rank`."""
        return next(site for site in self.ranks if rank in site)

    def owned(self, codec: Codec, numel: int) -> list[tuple[Message, ...]]:
        """The messages of each shard."""
        count = 1 if codec.grain is None else min(map(len, self.ranks))
        return [cut(codec, *span) for span in shards(codec, numel, count)]

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        if feedback:
            raise ConfigurationError(
                f"{feedback} over {self}: within its site a replica's values travel exactly, so nothing is held back; "
                f"write Hierarchy(sites={self.sites}, feedback={feedback}), and leave the strategy's at None."
            )
        if self.feedback:
            self.feedback.check(codec)

    def check_size(self, size: int) -> None:
        if sum(map(len, self.ranks)) != size:
            raise ConfigurationError(
                f"{self} is for {sum(map(len, self.ranks))} replicas, the group has {size}; give the sites of this group."
            )

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        self.check_size(size)
        place, owned = self.site_of(rank).index(rank), self.owned(codec, numel)
        if not self.feedback or place >= len(owned):
            return {}
        return self.feedback.init(owned[place][-1].end - owned[place][0].begin)

    def depart(self, round_: Round, state: State) -> _TwoHops:
        return _TwoHops(round_, self, state)

    def arrive(self, departure: _TwoHops) -> Ranges:
        return (yield from departure.arrive())

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        if rank is None:
            return max(self.nbytes_sent(codec, numel, size, one) for one in range(size))
        place, owned = self.site_of(rank).index(rank), self.owned(codec, numel)
        return (len(self.ranks) - 1) * packets_nbytes(owned[place], marks=size) if place < len(owned) else 0

    def nbytes_inside(self, codec: Codec, numel: int, size: int, rank: int) -> int:
        """Bytes that replica `rank` sends within its site: fp32 values to the owners, and as an owner the packets of all sites for its shard."""
        site, owned = self.site_of(rank), self.owned(codec, numel)
        place = site.index(rank)
        dense = sum(packets_nbytes(_dense(messages)) for k, messages in enumerate(owned) if k != place)
        if place >= len(owned):
            return dense
        return dense + len(self.ranks) * (len(site) - 1) * packets_nbytes(owned[place], marks=size)

    def nbytes_of_each(self, codec: Codec, numel: int, size: int) -> list[int]:
        return [self.nbytes_sent(codec, numel, size, rank) for rank in range(size)]

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return link.seconds(self.nbytes_sent(codec, numel, size)) if len(self.ranks) > 1 else 0.0


def _dense(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of the same elements in fp32."""
    return tuple(Message(m.begin, m.end, (CodedRange(m.begin, m.end, 0, 4 * m.numel),)) for m in messages)


class _TwoHops:
    """A round: deltas to the owners of the site (stage 0), owners to owners (1), the packets of all owners within the site (2 …)."""

    def __init__(self, round_: Round, hierarchy: Hierarchy, state: State) -> None:
        self.round, self._sites = round_, hierarchy.ranks
        rank, size, codec = round_.rank, round_.size, round_.codec
        self._site = hierarchy.site_of(rank)
        self._place = self._site.index(rank)
        self._mates = [mate for mate in self._site if mate != rank]
        self._shards = hierarchy.owned(codec, round_.numel)
        self._mine = self._shards[self._place] if self._place < len(self._shards) else ()
        self._twins = [site[self._place] for site in self._sites if self._mine and rank not in site]
        self._inside = Stage(round_, Identity(), 0, purpose=INSIDE)
        self._across = Stage(round_, codec, 1, marks=size)
        self._passed = [
            Stage(round_, codec, 2 + number, marks=size, purpose=INSIDE, passes=1) for number in range(len(self._sites))
        ]
        self._owner = Owner(self._across, self._key(self._place), self._mine, hierarchy.feedback, state)
        self._weights = [len(site) / size for site in self._sites]
        self._expect()
        self._send()

    def arrive(self) -> Ranges:
        round_ = self.round
        room = Decoder(round_, round_.codec)
        own = [self._average(index, room) for index in range(len(self._mine))]
        for index, message in enumerate(self._mine):
            self._across.receive(index)
            for number, site in enumerate(self._sites):
                if site != self._site:
                    packet = self._across.packet(index, site[self._place])
                    self._passed[number].pass_on(index, message, packet, self._mates)
        flags, void = [0] * round_.size, False
        for index in range(max(map(len, self._shards))):
            self._take(index)
            for place, messages in enumerate(self._shards):
                if index < len(messages):
                    packets = self._packets(index, place, own)
                    for author, packet in packets.items():
                        flags = [a | b for a, b in zip(flags, heard(packet, round_.size, author))]
                        void |= bool(flags_of(packet) & REFUSED)
                    if not void:
                        yield from self._ranges(place, messages[index], packets, room)
        room.close()
        return Arrival(tuple(flags), self._owner.after, void)

    def _expect(self) -> None:
        self._inside.expect(dict.fromkeys(self._mates if self._mine else [], _dense(self._mine)))
        self._across.expect(dict.fromkeys(self._twins, self._mine))
        owners = {self._site[place]: messages for place, messages in enumerate(self._shards) if place != self._place}
        for stage in self._passed:
            stage.expect(owners)

    def _send(self) -> None:
        for index in range(max(map(len, self._shards))):
            for step in range(len(self._shards)):
                place = (self._place + step) % len(self._shards)
                if place != self._place and index < len(self._shards[place]):
                    message, to = _dense(self._shards[place])[index], [self._site[place]]
                    self._inside.send(index, message, to, self.round.signal, self.round.key)

    def _average(self, index: int, room: Decoder) -> Outgoing:
        """Send the site's mean of one message of the own shard to the other sites and within the own site."""
        round_, message = self.round, self._mine[index]
        said = self._inside.receive(index)
        own = round_.signal(message.begin, message.end).cpu()
        flags = {round_.rank: round_.flags | (0 if bool(torch.isfinite(own).all()) else REFUSED), **said}
        dense = {mate: payload(self._inside.packet(index, mate)).view(torch.float32) for mate in said}
        dense[round_.rank] = own

        def mean(coded: CodedRange) -> Tensor:
            begin, end = coded.begin - message.begin, coded.end - message.begin
            total = torch.zeros(end - begin)
            for mate in sorted(dense):
                total += dense[mate][begin:end]
            return total.div_(len(dense))

        marks = [flags.get(rank, 0) for rank in range(round_.size)]
        packet = self._owner.say(index, mean, marks, self._twins, room)
        self._passed[self._sites.index(self._site)].pass_on(index, message, packet.packet, self._mates)
        return packet

    def _take(self, index: int) -> None:
        """Wait for the packets of message `index` that the owners of this site forward."""
        for stage, site in zip(self._passed, self._sites):
            stage.receive(index, {mate: site[place] for place, mate in enumerate(self._site[: len(self._shards)])})

    def _packets(self, index: int, place: int, own: Sequence[Outgoing]) -> dict[int, Tensor]:
        """The packets of each site, by the rank of the owner that wrote them."""
        found = {}
        for number, site in enumerate(self._sites):
            if place != self._place:
                found[site[place]] = self._passed[number].packet(index, self._site[place])
            elif site == self._site:
                found[site[place]] = own[index].packet
            else:
                found[site[place]] = self._across.packet(index, site[place])
        return found

    def _ranges(self, place: int, message: Message, packets: dict[int, Tensor], room: Decoder) -> Iterator[Range]:
        weights = {site[place]: weight for site, weight in zip(self._sites, self._weights)}
        for coded in message.ranges:
            mean = room.mean(coded, packets, self._key(place), weights)
            own = self.round.signal(coded.begin, coded.end) if self.round.decodes_own else None
            yield Range(coded.begin, mean, own)

    def _key(self, place: int) -> Key:
        return replace(self.round.key, part=1 + place)
