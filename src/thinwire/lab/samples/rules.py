"""The rules of sampling, the actions that a peer orders, and its records of a sample and of an aggregation."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ConfigurationError
from thinwire.lab.samples.messages import Kind, PeerMessage


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """How samples are drawn and how long peers wait. Times are in seconds.

    sample         s, participants of a round
    aggregators    a, to which each of them sends its model
    fraction       sf, the share of the models that a mean needs
    window         Δk, rounds after which a silent peer is no candidate
    resend         time after which a ping is sent once more
    ping_timeout   time after which the next candidate is asked instead
    patience       time for which an aggregator waits for models
    hello          time between two heartbeats of a peer
    """

    sample: int = 10
    aggregators: int = 1
    fraction: float = 1.0
    window: int = 50
    resend: float = 1.0
    ping_timeout: float = 5.0
    patience: float = 300.0
    hello: float = 1000.0

    def __post_init__(self) -> None:
        counts = {"sample": self.sample, "aggregators": self.aggregators, "window": self.window}
        for name, count in counts.items():
            if type(count) is not int or count < 1:
                raise ConfigurationError(f"{name}={count}: a whole number above 0 is needed.")
        if not self.patience > 0:
            raise ConfigurationError(f"patience={self.patience}: a time above 0 is needed.")
        if not 0 < self.fraction <= 1 or math.floor(self.sample * self.fraction) < 1:
            raise ConfigurationError(
                f"fraction={self.fraction} of sample={self.sample}: a mean of at least 1 model is needed, and at most all."
            )

    def check(self, peers: int) -> None:
        """Raise `ConfigurationError` unless samples of `peers` peers can hold rounds: a mean is safe once another peer has it."""
        if not min(2, peers) <= self.sample <= peers:
            raise ConfigurationError(
                f"sample={self.sample} of {peers} peers: at most all can be sampled, and at least 2 if there is more than one peer."
            )

    def needed(self, sample: int) -> int:
        """The number of models, from a sample of so many, that an aggregator awaits."""
        return max(1, math.floor(sample * self.fraction))

    def least(self, sample: int) -> int:
        """The number of models that are enough when its patience ends: 3, or half of a smaller sample."""
        return min(3, max(1, sample // 2))


@dataclass(frozen=True)
class Send:
    """Send a message to a peer."""

    to: int
    message: PeerMessage


@dataclass(frozen=True)
class Wake:
    """Call `woken(key)` after so many seconds."""

    key: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class Train:
    """Train from this model, and call `trained` with the round; earlier training is stale."""

    message: PeerMessage


@dataclass(frozen=True)
class Done:
    """The run has ended."""

    message: PeerMessage


Action = Send | Wake | Train | Done


@dataclass
class Sampling:
    """A sample of `round` that is being drawn: the peers not asked yet, those that have not answered, and those that have."""

    kind: Kind  # TRAINED: for aggregators, MEAN: for participants
    round: int
    wanted: int
    rest: deque[int]
    waiting: set[int] = field(default_factory=set)
    answered: list[int] = field(default_factory=list)


@dataclass
class Gathering:
    """The models of a round at its aggregator."""

    sample: tuple[int, ...]
    models: dict[int, Any] = field(default_factory=dict)
    mean: PeerMessage | None = None
    receivers: tuple[int, ...] = ()
    delivered: bool = False
    step: int = 0
    stop: bool = False
