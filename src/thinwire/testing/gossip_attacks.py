"""Attacks on gossip by liars among the neighbours: `thinwire compare --strategies bristle d_psgd --attack SignFlip --liars 2`.

As in `testing/attacks.py`, the last `liars` ranks lie about their deltas. In gossip replicas send weights, so a liar sends x − (false delta)
in place of its weights θ = x − delta, with its own x. It sends the same to all its neighbours, and keeps its honest weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ConfigurationError
from thinwire.exchange import Exchange, Gossip
from thinwire.exchange.chunks import Signal
from thinwire.exchange.round import Round
from thinwire.testing.attacks import Attack, Attacked, Scene, SignFlip, alike, lies, spied
from thinwire.types import State


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
        if type(self.liars) is not int or self.liars < 1:
            raise ConfigurationError(f"liars={self.liars!r}: a whole number is needed, 1 or more.")
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
        if self.liars >= size:
            raise ConfigurationError(
                f"liars={self.liars} of {size} replicas: at least one must be honest; choose {size - 1} or fewer."
            )

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
            round_.signal = partial(_told, said, round_.signal)
        return super().depart(round_, state)


def attacked(exchange: Exchange, attack: Attack, liars: int) -> Exchange:
    """Add liars to `exchange`. Raises `ConfigurationError`."""
    if isinstance(exchange, Gossip):
        return AttackedGossip(exchange.topology, exchange.rule, attack, liars)
    return Attacked(exchange, attack, liars)


def _moved(round_: Round, signal: Signal, begin: int, end: int) -> Tensor:
    """The honest delta: x − θ."""
    assert round_.anchor is not None
    return round_.anchor[begin:end] - signal(begin, end)


def _told(said: Tensor, signal: Signal, begin: int, end: int) -> Tensor:
    """The false weights, followed by the rule's other vectors."""
    return said[begin:end] if end <= said.numel() else signal(begin, end)
