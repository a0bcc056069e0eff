"""Policies: the codec of each round, the same on all replicas.

A policy returns a codec when a round departs. Every packet's header identifies its codec, so replicas detect different codecs. The
unit of time is a *round* of one fragment (`number`, from 0); with gradients this is an inner step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from thinwire.codecs import Codec
from thinwire.types import State

LONG_RUN = 1 << 40  # a round after all warm-ups


@runtime_checkable
class Policy(Protocol):
    """Chooses the codec of each round of a fragment. Its state is made by `init`, saved, and equal on all replicas."""

    @property
    def constant(self) -> bool:
        """Whether it chooses the strategy's codec in every round."""
        return False

    @property
    def needs_fixed_group(self) -> str:
        """Why the same replicas are needed in every round; empty: the membership may change."""
        return "" if self.constant else "counts rounds that all have seen"

    @property
    def last(self) -> Policy:
        """The policy of the rounds that end a run."""
        return self

    @property
    def changes(self) -> tuple[int, ...]:
        """The rounds at which the codec changes, as far as they are known beforehand."""
        return ()

    @abstractmethod
    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        """All codecs that may be chosen for the strategy's `codec`. Raises `ConfigurationError` if this policy cannot vary it."""

    def init(self, codec: Codec) -> State:
        """The first state for a fragment; `codec` is fitted to it."""
        return {}

    @abstractmethod
    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        """The codec of round `number` of a fragment of `numel` elements, instead of its fitted `codec`."""


class Decision(Protocol):
    """A decision on its way, of one round."""

    def on_arrival(self) -> State:
        """Wait for it, and return the policy's next state. Raises `LinkError`, `PacketError`."""


@runtime_checkable
class Deciding(Policy, Protocol):
    """A policy that learns from the values that are encoded. In some rounds replica 0 decides, and sends its decision with the round. So all
    know it before the fragment departs again, and a dropped round changes nothing.
    """

    def tells(self, codec: Codec, number: int) -> int:
        """Number of fp32 values that replica 0 sends to the others in round `number`."""

    def before_send(self, codec: Codec, round_: Any) -> Decision | None:
        """Called on the sending thread when `round_` (exchange/round.py) has departed: replica 0 sends its decision, the others expect it. None if
        nothing is decided in this round."""


@dataclass(frozen=True)
class Constant(Policy):
    """The strategy's codec in every round.

        codec of round n = the strategy's

    *Source*: none; the codec does not change.

    >>> Constant()
    Constant()
    """

    constant: ClassVar[bool] = True

    def codecs(self, codec: Codec) -> tuple[Codec, ...]:
        return (codec,)

    def at(self, codec: Codec, numel: int, number: int, state: State) -> Codec:
        return codec
