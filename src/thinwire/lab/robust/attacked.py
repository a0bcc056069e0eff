"""Exchanges with liars: the last `liars` ranks send what an attack computes, in place of their deltas.

They lie about their deltas only. They train, take the agreed anchors, forward others' packets, and own their shards honestly. If an
attack needs the honest replicas' deltas of the same round, these send them to the liars in fp32, with the ledger's purpose "spying":
liars know everything, as the papers assume.

In gossip replicas send weights, so a liar sends x − (false delta) in place of its weights θ = x − delta, with its own x. It sends the
same to all its neighbours, and keeps its honest weights: `thinwire compare --strategies bristle d_psgd --attack SignFlip --liars 2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.comm.uplink import Link
from thinwire.errors import ConfigurationError
from thinwire.exchange.base import Exchange, ExchangeTraits, Ranges
from thinwire.exchange.chunks import Signal, cut
from thinwire.exchange.round import Round
from thinwire.exchange.stage import MOST_STAGES, Stage
from thinwire.lab.gossip.exchange import Gossip
from thinwire.lab.robust.attacks import Attack, Scene, SignFlip
from thinwire.packet import payload
from thinwire.pieces.feedback import Feedback
from thinwire.types import State


def with_liars(exchange: Exchange, attack: Attack, liars: int) -> Exchange:
    """Add liars to `exchange`. Raises `ConfigurationError`."""
    if isinstance(exchange, Gossip):
        return AttackedGossip(exchange.topology, exchange.rule, attack, liars)
    return Attacked(exchange, attack, liars)


@dataclass(frozen=True)
class Attacked(Exchange):
    """An exchange like `exchange`, in which the last `liars` ranks send what `attack` computes.

    Args:
        exchange: how packets travel.
        attack: computes what liars send.
        liars: how many lie, 1 or more; one replica at least is honest.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.
    """

    exchange: Exchange
    attack: Attack
    liars: int = 1

    needs_fixed_group: ClassVar[str] = "has liars at given ranks"

    def __post_init__(self) -> None:
        _check_liars(self.liars)

    @property
    def traits(self) -> ExchangeTraits:
        return self.exchange.traits

    @property
    def feedback(self) -> Feedback | None:
        return self.exchange.feedback

    def owns(self, codec: Codec, numel: int, rank: int, size: int) -> int:
        return self.exchange.owns(codec, numel, rank, size)

    def nbytes_products(self, size: int) -> int:
        return self.exchange.nbytes_products(size)

    def check(self, codec: Codec, feedback: Feedback | None) -> None:
        self.exchange.check(codec, feedback)

    def check_beside(self, strategy: Any) -> None:
        self.exchange.check_beside(strategy)

    def check_size(self, size: int) -> None:
        self.exchange.check_size(size)
        _check_liars(self.liars, size)

    def init(self, codec: Codec, numel: int, rank: int, size: int) -> State:
        _check_liars(self.liars, size)
        first = {"first": torch.zeros(numel)} if lies(rank, size, self.liars) else {}
        return {**first, **self.exchange.init(codec, numel, rank, size)}

    def why(self, fragments: Sequence[tuple[Codec, int]], size: int) -> list[str]:
        return self.exchange.why(fragments, size)

    def depart(self, round_: Round, state: State) -> tuple[Any, Tensor | None]:
        inner = {name: kept for name, kept in state.items() if name != "first"}
        honest = spied(round_, self.liars, round_.signal) if self.attack.spies else torch.empty(0)
        if not lies(round_.rank, round_.size, self.liars):
            return self.exchange.depart(round_, inner), None
        own = round_.signal(0, round_.numel).cpu().clone()
        first = own if round_.key.round == 0 else state["first"]
        said = self.attack.says(Scene(own, honest, first, round_.key, round_.size, self.liars))
        if self.attack.sybils:
            said = alike(round_, said, self.liars)
        round_.signal = lambda begin, end: said[begin:end]
        return self.exchange.depart(round_, inner), first

    def arrive(self, departure: tuple[Any, Tensor | None]) -> Ranges:
        first = departure[1]
        arrival = yield from self.exchange.arrive(departure[0])
        return arrival if first is None else replace(arrival, state={"first": first, **arrival.state})

    def nbytes_sent(self, codec: Codec, numel: int, size: int, rank: int | None = None) -> int:
        return self.exchange.nbytes_sent(codec, numel, size, rank)

    def nbytes_of_each(self, codec: Codec, numel: int, size: int) -> list[int]:
        return self.exchange.nbytes_of_each(codec, numel, size)

    def seconds(self, codec: Codec, numel: int, size: int, link: Link) -> float:
        return self.exchange.seconds(codec, numel, size, link)


@dataclass(frozen=True)
class AttackedGossip(Gossip):
    """Gossip in which the last `liars` ranks send what `attack` computes.

    Args:
        topology: who sends to whom, in every round.
        rule: which vectors replicas send, and what each does with the means.
        attack: computes the false deltas.
        liars: how many lie, 1 or more; one replica at least is honest.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.
    """

    attack: Attack = SignFlip()
    liars: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_liars(self.liars)
        if not self.rule.sends_weights:
            raise ConfigurationError(
                f"{self.attack} with {self.rule}: liars lie about weights, which this rule does not send as they are; choose d_psgd, bristle "
                "or sybil_wall."
            )
        if self.attack.remembers:
            raise ConfigurationError(
                f"{self.attack} with {self.rule}: gossip keeps no first delta for it; choose another attack."
            )

    def check_size(self, size: int) -> None:
        super().check_size(size)
        _check_liars(self.liars, size)

    def depart(self, round_: Round, state: State) -> Any:
        moved = partial(_moved, round_, round_.signal)
        honest = spied(round_, self.liars, moved) if self.attack.spies else torch.empty(0)
        if lies(round_.rank, round_.size, self.liars):
            assert round_.anchor is not None
            own = moved(0, round_.numel)
            lie = self.attack.says(Scene(own, honest, own, round_.key, round_.size, self.liars))
            said = round_.anchor - lie
            if self.attack.sybils:
                said = alike(round_, said, self.liars)
            round_.signal = partial(_false, said, round_.signal)
        return super().depart(round_, state)


def _check_liars(liars: int, size: int | None = None) -> None:
    """Raise `ConfigurationError` unless `liars` is a positive number, below the `size` of the group if that is known."""
    if type(liars) is not int or liars < 1:
        raise ConfigurationError(f"liars={liars!r}: a whole number is needed, 1 or more.")
    if size is not None and liars >= size:
        raise ConfigurationError(
            f"liars={liars} of {size} replicas: at least one must be honest; choose {size - 1} or fewer."
        )


def lies(rank: int, size: int, liars: int) -> bool:
    """Whether replica `rank` of `size` is one of the `liars`."""
    return rank >= size - liars


def spied(round_: Round, liars: int, signal: Signal) -> Tensor:
    """Send this replica's `signal` to the liars. On a liar, returns the signals of all honest replicas [honest, numel]."""
    honest = range(round_.size - liars)
    return _shared(round_, MOST_STAGES - 3, honest, range(len(honest), round_.size), signal)


def alike(round_: Round, said: Tensor, liars: int) -> Tensor:
    """The values `said` of the first liar, which sends them to the other liars."""
    first = round_.size - liars
    told = _shared(round_, MOST_STAGES - 5, [first], range(first + 1, round_.size), lambda begin, end: said[begin:end])
    return told[0] if len(told) else said


def _shared(round_: Round, number: int, who: Sequence[int], to: Sequence[int], signal: Signal) -> Tensor:
    """Send `signal` in stage `number` if this replica is one of `who`. If it is one of `to`, returns their signals [who, numel]."""
    stage, messages = Stage(round_, Identity(), number, purpose="spying"), cut(Identity(), 0, round_.numel)
    if round_.rank in who:
        for index, message in enumerate(messages):
            stage.send(index, message, to, signal, replace(round_.key, sender=round_.rank))
    if round_.rank not in to:
        return torch.empty(0)
    stage.expect(dict.fromkeys(who, messages))
    found = torch.zeros(len(who), round_.numel)
    for index, message in enumerate(messages):
        stage.receive(index)
        for row, rank in zip(found, who):
            row[message.begin : message.end] = payload(stage.packet(index, rank)).view(torch.float32)
    return found


def _moved(round_: Round, signal: Signal, begin: int, end: int) -> Tensor:
    """The honest delta: x − θ."""
    assert round_.anchor is not None
    return round_.anchor[begin:end] - signal(begin, end)


def _false(said: Tensor, signal: Signal, begin: int, end: int) -> Tensor:
    """The false weights, followed by the rule's other vectors."""
    return said[begin:end] if end <= said.numel() else signal(begin, end)
