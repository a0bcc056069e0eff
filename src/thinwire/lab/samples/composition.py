"""The settings of a method in which a sample of the replicas trains in each round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from thinwire.drivers.attached import Method, Traits
from thinwire.errors import ConfigurationError
from thinwire.lab.samples.rules import SampleRules
from thinwire.pieces.outer import Nesterov

HELLO = 30.0  # seconds between two heartbeats; over gloo a silence as long as the group's timeout ends the group


@dataclass(frozen=True, kw_only=True)
class SampleComposition(Method):
    """A frozen value: the size of the sample that trains in a round, its inner steps, and the outer step.

    Args:
        every: H, inner steps of a participant in a round.
        sample: s, number of participants of a round.
        aggregators: a, number of replicas to which each of them sends its model.
        outer_lr: η, the learning rate of the outer step.
        outer_momentum: μ, its momentum, in [0, 1).
        ping_timeout: seconds after which another replica is asked instead of one that does not answer.
        patience: seconds for which an aggregator waits for models.
        seed: draws the replicas to which heartbeats go.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> SampleComposition(outer_lr=0.7).outer
    Nesterov(lr=0.7, momentum=0.5)
    """

    every: int = 30
    sample: int = 2
    aggregators: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    ping_timeout: float = 5.0
    patience: float = 300.0
    seed: int = 0

    @property
    def traits(self) -> Traits:
        return Traits(own_steps=True, cannot_resume="because no replica knows which one has the newest model")

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1 or not self.ping_timeout > 0 or not self.patience > 0:
            raise ConfigurationError(
                f"every={self.every}, ping_timeout={self.ping_timeout}, patience={self.patience}: at least 1 inner step, and times above 0, "
                "are needed."
            )
        assert self.rules and self.outer  # these raise for settings that cannot work

    @cached_property
    def rules(self) -> SampleRules:
        return SampleRules(
            sample=self.sample, aggregators=self.aggregators, ping_timeout=self.ping_timeout,
            resend=self.ping_timeout / 5, patience=self.patience, hello=HELLO,
        )  # fmt: skip

    @cached_property
    def outer(self) -> Nesterov:
        return Nesterov(self.outer_lr, self.outer_momentum)
