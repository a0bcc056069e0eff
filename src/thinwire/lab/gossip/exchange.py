"""Gossip: each replica exchanges with its neighbours of the round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.comm.group import Group
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError, NonFiniteError
from thinwire.exchange.base import Arrival, Arriving, Exchange, ExchangeTraits, Range, Ranges
from thinwire.exchange.chunks import Message, Signal, cut, packets_nbytes
from thinwire.exchange.decode import Decoder
from thinwire.exchange.round import Round
from thinwire.exchange.send_queue import Outgoing
from thinwire.exchange.stage import Stage
from thinwire.exchange.two_shot import Reduction, reduction_nbytes
from thinwire.lab.gossip.rules import GossipRule
from thinwire.lab.gossip.trust import Judging
from thinwire.lab.topology import Topology, check_size
from thinwire.lab.topology.base import Union, Weights
from thinwire.packet import REFUSED
from thinwire.pieces.feedback import Feedback
from thinwire.pieces.partition import Fragment
from thinwire.pieces.schedule import Adaptive
from thinwire.rng import Key
from thinwire.types import State


@dataclass(frozen=True)
class _Said:
    """One vector of a gossip step: its first element among all vectors of the round, its messages, and its stage."""

    begin: int
    codec: Codec
    messages: tuple[Message, ...]
    stage: Stage
    targets: list[int]
    own: list[Outgoing] = field(default_factory=list)

    def send(self, signal: Signal, key: Key) -> None:
        self.tell(self.targets, partial(_shifted, signal, self.begin), key)

    def tell(self, targets: list[int], signal: Signal, key: Key) -> None:
        """Send to `targets` only. `signal` gives the elements of this vector alone."""
        for index, message in enumerate(self.messages):
            self.own.append(self.stage.send(index, message, targets, signal, key))


@dataclass(frozen=True)
class _Reduced:
    """One vector whose mean a group takes together: its start among all vectors of the round, and the mean."""

    begin: int
    mean: Reduction

    def send(self, signal: Signal, key: Key) -> None:
        self.mean.send(partial(_shifted, signal, self.begin))


@dataclass(frozen=True)
class _Step:
    """A gossip step: its vectors, and the weights of the packets, by rank; None: equal."""

    said: list[_Said | _Reduced]
    shares: Mapping[int, float] | None


@dataclass(frozen=True)
class _Departure:
    round: Round
    steps: list[_Step]


@dataclass(frozen=True)
class Gossip(Exchange):
    """Each replica exchanges with its neighbours of the round only. It waits for no others, and replicas do not agree on all bits.

        [v]_i = Σ_j w_ij·decode(packet of v_j)      j: replica i and those that send to it

    The rule names the vectors v that a replica sends. For each, the exchange returns the mean over the replica's neighbours and itself, with
    the rule's weights w. The vectors follow each other in one flat estimate. A group of more than two
    in which all weights are equal takes the mean as `TwoShot` does.

    *Source*: the mean over neighbours of D-PSGD (Lian et al., arXiv 1705.09056). *Differs*: vectors may be sent in any codec, and a replica's
    own vector is rounded like the others; the rule may send other vectors than weights; rounds may be many inner steps apart.

    *Wire*: nbytes of each vector to each neighbour; in a group of m, 2(m−1)/m·nbytes.

    Args:
        topology: who sends to whom, in every round.
        rule: which vectors replicas send, and what each does with the means.

    Raises:
        ConfigurationError: the rule is not sound on that topology; the message has the number.

    >>> from thinwire.lab.gossip.rules import AdaptThenCombine
    >>> from thinwire.lab.topology import Ring
    >>> Gossip(Ring(), AdaptThenCombine())
    Gossip(topology=Ring(), rule=AdaptThenCombine())
    """

    topology: Topology
    rule: GossipRule
    seed: int = field(default=0, init=False, repr=False, compare=False)  # the strategy's

    traits: ClassVar[ExchangeTraits] = ExchangeTraits(agrees=False)
    needs_fixed_group: ClassVar[str] = "knows its neighbours by their ranks"

    def __post_init__(self) -> None:
        for name, protocol in (("topology", Topology), ("rule", GossipRule)):
            value = getattr(self, name)
            if not isinstance(value, protocol) or isinstance(value, type):
                raise ConfigurationError(
                    f"Gossip({name}={value!r}): a topology such as Ring() and a rule such as NoLoCo() are needed."
                )

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        if feedback:
            raise ConfigurationError(
                f"{self} with {feedback}: gossip sends no deltas, so nothing can be held back; choose choco, which keeps what its codec loses."
            )
        if codec.joint:
            raise ConfigurationError(
                f"{self} over {codec}: it averages over senders, and neighbours have weights; choose the codec inside it."
            )
        self.rule.check(self.topology, codec)

    def check_beside(self, strategy: Any) -> None:
        free = {"schedule", "partition", "codec", "merge", "exchange", "inner", "seed"}
        for one in fields(strategy):
            given = getattr(strategy, one.name)
            if one.name not in free and given != one.default:
                raise ConfigurationError(
                    f"{one.name}={given!r} with {self}: gossip has no agreed anchor, the rule moves each replica's own; leave "
                    f"{one.name} at {one.default!r}."
                )
        if strategy.merge.whole_period or isinstance(strategy.schedule, Adaptive):
            raise ConfigurationError(
                f"{strategy.merge} and {strategy.schedule} with {self}: Mix(...) or Keep(), and Every or Staggered, are needed."
            )
        if self.rule.tracks and (strategy.schedule.every, strategy.schedule.delay) != (1, 0):
            raise ConfigurationError(
                f"{strategy.schedule} with {self.rule}: the rule needs a round after every step, without delay; choose Every(1)."
            )

    def seeded(self, seed: int) -> Gossip:
        drawn = replace(self)
        object.__setattr__(drawn, "seed", seed)
        return drawn

    def driver(self, training: Any, fragments: Sequence[Fragment], group: Group, site: Group | None) -> Any:
        from thinwire.lab.gossip.driver import GossipDriver

        return GossipDriver(training, list(fragments), group, site)

    def check_size(self, size: int) -> None:
        check_size(self.topology, size, self.seed)
        for number in range(self.topology.rounds(size) or 1):
            self.rule.weights(self.topology, size, number, 0, self.seed)

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        self.check_size(size)
        return self.begins(torch.zeros(numel), Key(sender=rank), size)  # the values do not matter, only their number

    def begins(self, x: Tensor, key: Key, size: int) -> State:
        """The rule's first state of a fragment with the weights `x`."""
        return self.rule.init(x) if self.judging is None else self.judging.begins(x, key, size)

    @cached_property
    def judging(self) -> Judging | None:
        """The rule, if it receives the weights of each neighbour separately. Asked once: `isinstance` compares all attributes of a protocol."""
        return self.rule if isinstance(self.rule, Judging) else None

    def sources(self, key: Key, size: int) -> list[int]:
        """The ranks of the replicas that send to replica `key.sender` in the round of `key`, in order."""
        return _others(self._weights(key, size)[key.sender], key.sender)

    def _weights(self, key: Key, size: int, step: int = 0) -> Weights:
        number = 0 if self.topology.fixed else key.round * self.rule.steps + step
        return _weights(self, size, number, key.fragment, key.seed)

    def depart(self, round_: Round, state: State) -> _Departure:
        steps = [self._expected(round_, step) for step in range(self.rule.steps)]
        if self.judging is not None:
            _send_each(steps[0], self.judging, state, round_)
        else:
            for one in steps[0].said:
                one.send(round_.signal, round_.key)
        return _Departure(round_, steps)

    def _expected(self, round_: Round, step: int) -> _Step:
        """Prepare to receive the neighbours' messages of gossip step `step` of the round."""
        key, rank, size = round_.key, round_.rank, round_.size
        weights = self._weights(key, size, step)
        sources, targets = _others(weights[rank], rank), _others(weights[:, rank], rank)
        members = _group(self, weights, rank) if self.judging is None else []
        said: list[_Said | _Reduced] = []
        begin, vectors = 0, self.rule.vectors(round_.codec, round_.numel)
        for place, (codec, numel) in enumerate(vectors):
            if members:
                mean = Reduction(round_, codec, numel, 2 * place, members=members)
                mean.expect()
                said.append(_Reduced(begin, mean))
            else:
                stage = Stage(round_, codec, step * len(vectors) + place)
                messages = cut(codec, 0, numel)
                stage.expect(dict.fromkeys(sources, messages))
                said.append(_Said(begin, codec, messages, stage, targets))
            begin += numel
        return _Step(said, _shares(weights[rank], [*sources, rank]))

    def arrive(self, departure: _Departure) -> Ranges:
        round_, flags = departure.round, [0] * departure.round.size
        if self.judging is not None:
            return (yield from _arrive_each(departure, self.sources(round_.key, round_.size)))
        for step, following in pairwise(departure.steps):
            heard = torch.empty(sum(numel for _, numel in self.rule.vectors(round_.codec, round_.numel)))
            for begin, mean, _ in _arrived(round_, step, flags):
                heard[begin : begin + mean.numel()] = mean
            for one in following.said:
                one.send(partial(_part, heard), round_.key)
        yield from _arrived(round_, departure.steps[-1], flags)
        return Arrival(tuple(flags), {})

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        """See `Exchange.nbytes_sent`; the largest number if the groups of a topology have different sizes."""
        vectors = self.rule.vectors(codec, numel)
        ranks = range(size) if rank is None else (rank,)
        if not self.topology.grouped:
            return self.most_targets(size, rank) * sum(packets_nbytes(cut(one, 0, n)) for one, n in vectors)
        places = {self._place(size, number, one) for number in range(self.topology.rounds(size) or 1) for one in ranks}
        return max(sum(_nbytes_in_group(one, n, size, *place) for one, n in vectors) for place in places)

    def _place(self, size: int, number: int, rank: int) -> tuple[int, int]:
        """The size of this replica's group, and its rank in it."""
        row = self.topology.edges(size, number, 0, self.seed)[rank]
        return int(row.sum()) + 1, int(row[:rank].sum())

    def most_targets(self, size: int, rank: int | None = None) -> int:
        """The number of replicas to which replica `rank` sends in a round, each counted in every gossip step; without `rank`: the largest of all
        replicas.
        """
        steps, period = self.rule.steps, self.topology.rounds(size) or 1
        edges = [self.topology.edges(size, number, 0, self.seed) for number in range(period * steps)]
        sent = np.stack([sum(one.sum(1) for one in edges[n * steps : (n + 1) * steps]) for n in range(period)])
        return int(sent.max() if rank is None else sent[:, rank].max())

    @property
    def of_rounds(self) -> Topology:
        """The union of the graphs of a round's gossip steps."""
        return self.topology if self.rule.steps == 1 else Union(self.topology, self.rule.steps)

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        """See `Exchange.seconds`. Gossip steps follow each other, and so do the two halves of the mean of a group: each has a delay."""
        if size < 2:
            return 0.0
        period = range(self.topology.rounds(size) or 1)
        most = max(int(self.topology.edges(size, number, 0, self.seed).sum(1).max()) for number in period)
        delays = self.rule.steps * (2 if self.topology.grouped and most > 1 else 1)
        return link.seconds(self.nbytes_sent(codec, numel, size)) + (delays - 1) * link.delay_seconds


def _vectors(step: _Step) -> list[_Said]:
    return [one for one in step.said if isinstance(one, _Said)]


def _send_each(step: _Step, rule: Judging, state: State, round_: Round) -> None:
    """Send the first vector to all targets, and to each target its own other vectors."""
    first, *others = _vectors(step)
    first.send(round_.signal, round_.key)
    for one in others:
        for target in one.targets:
            one.tell([target], partial(_part, rule.tells(state, target, round_.key)), round_.key)


def _arrive_each(departure: _Departure, sources: Sequence[int]) -> Ranges:
    """Pass on the vectors of `sources`, one source after another, the first vectors of all first. A source that refused is left out: it does
    not count in this round, and its refusal does not refuse the round.
    """
    round_, flags, begin = departure.round, [0] * departure.round.size, 0
    for one in _vectors(departure.steps[0]):
        room, numel = Decoder(round_, one.codec), one.messages[-1].end
        for index, message in enumerate(one.messages):
            heard = one.stage.receive(index)
            for rank, said in heard.items():
                flags[rank] |= said
            for place, rank in enumerate(sources):
                if flags[rank] & REFUSED:
                    continue
                packet = one.stage.packet(index, rank)
                for coded in message.ranges:
                    values = room.sent(coded, packet, replace(round_.key, sender=rank))
                    yield Range(begin + place * numel + coded.begin, values)
        for own in one.own:
            own.wait()
            flags[round_.rank] |= own.flags
        room.close()
        begin += len(sources) * numel
    return Arrival(tuple(said & ~REFUSED for said in flags), {})


@lru_cache(maxsize=256)
def _weights(gossip: Gossip, size: int, number: int, fragment: int, seed: int) -> Weights:
    return gossip.rule.weights(gossip.topology, size, number, fragment, seed)


def _group(gossip: Gossip, weights: Weights, rank: int) -> list[int]:
    """The group of `rank`, if more than two replicas take their mean together."""
    members = [int(one) for one in np.flatnonzero(weights[rank])]
    return members if gossip.topology.grouped and len(members) > 2 else []


def _nbytes_in_group(codec: Codec, numel: int, size: int, members: int, place: int) -> int:
    if members > 2:
        return reduction_nbytes(codec, numel, members, place, marks=size)
    return (members - 1) * packets_nbytes(cut(codec, 0, numel))


def _arrived(round_: Round, step: _Step, flags: list[int]) -> Iterator[Range]:
    """The means of a gossip step; adds to `flags`."""
    for one in step.said:
        if isinstance(one, _Reduced):
            arriving = Arriving(one.mean.arrive())
            for begin, mean, own in arriving:
                yield Range(one.begin + begin, mean, own)
            flags[:] = [a | b for a, b in zip(flags, arriving.arrival.flags)]
            _check_sound(flags, round_.key)
            continue
        room = Decoder(round_, one.codec)
        for index, message in enumerate(one.messages):
            heard = one.stage.receive(index)
            own = one.own[index].wait()
            for rank, said in (heard | {round_.rank: one.own[index].flags}).items():
                flags[rank] |= said
            _check_sound(flags, round_.key)
            packets = {peer: one.stage.packet(index, peer) for peer in heard} | {round_.rank: own}
            for coded in message.ranges:
                mean = room.mean(coded, packets, round_.key, step.shares)
                sent = room.sent(coded, own, round_.key) if round_.decodes_own else None
                yield Range(one.begin + coded.begin, mean, sent)
        room.close()


def _part(of: Tensor, begin: int, end: int) -> Tensor:
    return of[begin:end]


def _shifted(signal: Signal, first: int, begin: int, end: int) -> Tensor:
    return signal(first + begin, first + end)


def _others(row: np.ndarray, rank: int) -> list[int]:
    """The ranks with a nonzero weight in `row`, except `rank`."""
    return [int(other) for other in np.flatnonzero(row) if other != rank]


def _shares(row: np.ndarray, ranks: Sequence[int]) -> dict[int, float] | None:
    """The weights of `ranks`. None if all are equal and add up to 1: then the sum is divided once, as in a fixed group."""
    alike = len({float(row[rank]) for rank in ranks}) == 1 and abs(float(row.sum()) - 1) < 1e-9
    return None if alike else {rank: float(row[rank]) for rank in ranks}


def _check_sound(flags: Sequence[int], key: Key) -> None:
    refused = [rank for rank, said in enumerate(flags) if said & REFUSED]
    if refused:
        raise NonFiniteError(
            f"the values of replica {refused[0]} in round {key.round} do not fit its codec: NaN, infinity or more than the codec can hold; "
            "no other replica has them. Resume all from the last checkpoint with a smaller learning rate."
        )
