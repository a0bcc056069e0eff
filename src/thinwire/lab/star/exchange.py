"""The exchange in which all send to a center, which sends the mean to all."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError, DisagreementError, PacketError
from thinwire.exchange.base import Arrival, Exchange, ExchangeTraits, Range, Ranges
from thinwire.exchange.chunks import Message, cut, packets_nbytes
from thinwire.exchange.decode import Decoder
from thinwire.exchange.owner import Owner, check_means, check_owners
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import MOST_STAGES, Stage, heard, tag_of
from thinwire.packet import REFUSED
from thinwire.pieces.aggregate import Mean
from thinwire.pieces.feedback import Feedback
from thinwire.rng import Key
from thinwire.types import State

HUB = "hub"
DECLARED_NBYTES = 4096  # most bytes of a replica's declaration of a fragment to the hub
DECLARED_TAG = tag_of(Key(), MOST_STAGES - 4)


@dataclass(frozen=True)
class Star(Exchange):
    """Each replica sends its packet to the center, which sends the mean back: nbytes up and nbytes down for each, encoded both ways.

        x̂ = C(1/M · Σ_m c_m + e)      c_m: replica m's decoded packet; e: what the center's `feedback` kept; C: the codec

    The center adds in fp32 and in rank order, and encodes the mean once, in the same codec: a second rounding, and a second
    delay. All replicas decode the same bytes, so they agree bit for bit, and the bits do not depend on where the center is.
    With `feedback` the center adds its rounding error to its next mean, as the owners of `TwoShot` do.

    `center` is the rank of a replica, or 'hub': the hub of a secure run, started with `--reduce`, or by `thinwire train --carrier
    secure`. From a hub that relays, each replica receives the packets of all others; from one that reduces, one packet. This hub decodes
    all deltas, so it can read them and bias the mean; the replicas alone decide on commits. Its feedback
    is lost when a run is resumed.

    *Source*: the star of TPI-LLM (Li et al., arXiv 2410.00531, §3.2). *Differs*: that one sends sums, in fp32; this one a mean, in the codec.

    *Wire*: nbytes up and nbytes + M bytes down for each replica; the M bytes tell which replicas refused. Predicted, if the center has the
    replicas' link: 2 delays + 8·(bytes sent by the center + nbytes) / rate. State of the center: 4 bytes per parameter, with `feedback`.

    Args:
        center: the rank of the replica that takes the mean, or 'hub'.
        feedback: keeps the error of the center's rounding; None: it is lost.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Star(), Star("hub")
    (Star(center=0, feedback=None), Star(center='hub', feedback=None))
    """

    center: int | str = 0
    feedback: Feedback | None = None

    def __post_init__(self) -> None:
        check_owners(self, self.feedback)
        if self.center != HUB and (type(self.center) is not int or self.center < 0):
            raise ConfigurationError(f"Star(center={self.center!r}): the rank of a replica, or 'hub', is needed.")

    @property
    def traits(self) -> ExchangeTraits:
        return ExchangeTraits(needs_hub=self.center == HUB)

    @property
    def needs_fixed_group(self) -> str:
        if self.traits.needs_hub:
            return "has a hub that averages the packets of one group"
        return "keeps what its center holds back" if self.feedback else ""

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        check_means(self, codec)

    def check_beside(self, strategy: Any) -> None:
        if self.traits.needs_hub and not (strategy.policy.constant and strategy.aggregate == Mean()):
            raise ConfigurationError(
                f"{self} with {strategy.policy}, {strategy.aggregate}: a hub takes the mean of packets in one codec; choose Constant() and "
                "Mean(), or another exchange."
            )

    def check_size(self, size: int) -> None:
        if isinstance(self.center, int) and self.center >= size:
            raise ConfigurationError(f"{self} with {size} replicas: a center in 0..{size - 1} is needed, or 'hub'.")

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        self.check_size(size)
        return self.feedback.init(numel) if self.feedback and rank == self.center else {}

    def depart(self, round_: Round, state: State) -> _Departure:
        if self.traits.needs_hub:
            declare(round_, self.feedback)
        center, messages = self._rank(round_.size), cut(round_.codec, 0, round_.numel)
        at_center = Center(round_, messages, self.feedback, state) if center == round_.rank else None
        up, down = (at_center.up, at_center.down) if at_center else stages(round_)
        if not at_center:
            down.expect({center: messages})
        to = [] if at_center else [center]
        own = [up.send(index, message, to, round_.signal, round_.key) for index, message in enumerate(messages)]
        return _Departure(round_, messages, own, down, at_center)

    def arrive(self, departure: _Departure) -> Ranges:
        round_, at_center = departure.round, departure.center
        center, key = self._rank(round_.size), mean_key(round_)
        flags, void = [0] * round_.size, False
        room = Decoder(round_, round_.codec)
        for index, message in enumerate(departure.messages):
            own = departure.own[index]
            own.wait()
            if at_center:
                mean = at_center.average(index, room, own)
                packet, said = mean.packet, mean.flags
            else:
                said = self._mean(departure, index, center)
                packet = departure.down.packet(index, center)
            flags = [a | b for a, b in zip(flags, heard(packet, round_.size, center))]
            void |= bool(said & REFUSED)
            for coded in () if void else message.ranges:
                estimate = room.owners(coded, round_.size, packet, key)
                own_values = room.sent(coded, own.packet, round_.key) if round_.decodes_own else None
                yield Range(coded.begin, estimate, own_values)
        room.close()
        return Arrival(tuple(flags), at_center.owner.after if at_center else {}, void)

    def _mean(self, departure: _Departure, index: int, center: int) -> int:
        """Wait for message `index` from the center, and return its flags. Raises `LinkError`, `PacketError`, `DisagreementError`."""
        sender = departure.round.size  # the sender in the mean's header, for any center
        try:
            return departure.down.receive(index, {center: sender})[center]
        except (PacketError, DisagreementError) as error:
            name = "the hub" if self.traits.needs_hub else f"replica {center}"
            raise type(error)(str(error).replace(f"replica {sender}", name)) from None

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        return numel if rank == self.center else 0

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        messages = cut(codec, 0, numel)
        up, down = packets_nbytes(messages), (size - 1) * packets_nbytes(messages, marks=size)
        if self.traits.needs_hub:
            return up
        if rank is None:
            return max(up, down) if size > 1 else 0
        return down if rank == self.center else up

    def nbytes_of_each(self, codec: Codec, numel: int, size: int) -> list[int]:
        return [self.nbytes_sent(codec, numel, size, rank) for rank in range(size)]

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        if size == 1 and not self.traits.needs_hub:
            return 0.0
        messages = cut(codec, 0, numel)
        from_center = (size if self.traits.needs_hub else size - 1) * packets_nbytes(messages, marks=size)
        return link.seconds(packets_nbytes(messages)) + link.seconds(from_center)

    def _rank(self, size: int) -> int:
        """The center's rank; a hub has the rank behind those of all replicas."""
        return size if self.center == HUB else int(self.center)


@dataclass(frozen=True)
class _Departure:
    round: Round
    messages: tuple[Message, ...]
    own: list[Outgoing]
    down: Stage
    center: Center | None


def stages(round_: Round) -> tuple[Stage, Stage]:
    """The stages to the center and from it."""
    return Stage(round_, round_.codec, 0), Stage(round_, round_.codec, 1, marks=round_.size)


def mean_key(round_: Round) -> Key:
    """The key of the mean, for any center."""
    return replace(round_.key, sender=round_.size, part=1)


class Center:
    """The center's side of a round. It is a replica, or a hub with the rank behind those of all replicas."""

    def __init__(
        self,
        round_: Round,
        messages: tuple[Message, ...],
        feedback: Feedback | None,
        state: State,
        up: Stage | None = None,
    ) -> None:
        self.round = round_
        self.up, self.down = stages(round_)
        self.up = up or self.up
        self.up.expect(dict.fromkeys(round_.peers, messages))
        self.owner = Owner(self.down, mean_key(round_), messages, feedback, state)

    def average(self, index: int, room: Decoder, own: Outgoing | None = None) -> Outgoing:
        """Wait for message `index` of all replicas, and send their mean to all. Raises `LinkError`, `PacketError`."""
        round_, said = self.round, self.up.receive(index)
        packets = {peer: self.up.packet(index, peer) for peer in round_.peers}
        if own:
            packets[round_.rank], said[round_.rank] = own.packet, own.flags
        marks = [said[rank] for rank in range(round_.size)]

        def mean(coded: Any) -> Tensor:
            return room.mean(coded, packets, round_.key, flags=marks)

        return self.owner.say(index, mean, marks, round_.peers, room)


def declare(round_: Round, feedback: Feedback | None) -> None:
    """Declare this fragment to the hub, once in a group. Raises `ConfigurationError` if no hub averages, or the fragment has changed
    since then.
    """
    context, key = round_.context, round_.key
    told = {
        "codec": repr(round_.codec), "feedback": repr(feedback), "numel": round_.numel, "seed": key.seed, "fragment": key.fragment,
    }  # fmt: skip
    before = context.declared.get(key.fragment)
    if before and before[0] == told:
        return
    body = json.dumps(told | {"round": key.round}).encode()
    if before or len(body) > DECLARED_NBYTES:
        raise ConfigurationError(
            f"Star('hub') with fragment {key.fragment} in {len(body)} characters: {told}, before {before and before[0]}; a hub needs fragments "
            f"that stay as they are, described in {DECLARED_NBYTES} characters at most."
        )
    message = torch.frombuffer(bytearray(body.ljust(DECLARED_NBYTES)), dtype=torch.uint8)
    try:
        transfer = context.group.post(DECLARED_TAG, {round_.size: message}, {}, "declared")
    except ConfigurationError:
        raise ConfigurationError(
            "Star('hub') needs a hub that averages, and this group has none; train with --carrier secure, or choose Star(0), whose bits are the same."
        ) from None
    context.declared[key.fragment] = told, transfer
