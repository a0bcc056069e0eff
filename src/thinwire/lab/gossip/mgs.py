"""Several gossip steps in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.lab.gossip.rules import AdaptThenCombine, GossipRule, Vector
from thinwire.lab.topology import Topology
from thinwire.lab.topology.base import Weights
from thinwire.types import State


@dataclass(frozen=True)
class MGS(GossipRule):
    """Multiple gossip steps (DFedSAM-MGS, Shi et al., arXiv 2302.04083): `rule`, whose means come from `steps` gossip steps in a row.

        [v]_i = Σ_j (W_Q ··· W_1)_ij·v_j          Q = steps; on a fixed graph W^Q, and λ becomes λ^Q

    Sends what `rule` sends, and in later steps the means so far, with `steps` times the bytes and delays. Conserves what `rule` conserves.

    *Differs*: the paper has one W for the steps of a round. Here a graph that changes from round to round changes from step to step: log₂ M
    steps on `OnePeerExponential` are the mean of all. The paper's SAM is a piece of its own (`SAM`).

    Args:
        rule: `AdaptThenCombine`, `CombineThenAdapt` or `PushSum`.
        steps: Q, 1 to 8.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> MGS(steps=2)
    MGS(rule=AdaptThenCombine(), steps=2)
    """

    rule: GossipRule = AdaptThenCombine()
    steps: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.rule, GossipRule) or isinstance(self.rule, type) or not self.rule.repeats:
            raise ConfigurationError(
                f"MGS(rule={self.rule!r}): a rule that sends whole weights is needed: AdaptThenCombine(), CombineThenAdapt() or PushSum()."
            )
        if type(self.steps) is not int or not 1 <= self.steps <= 8:
            raise ConfigurationError(f"MGS(steps={self.steps!r}): 1 to 8 gossip steps a round are needed; 4 is usual.")

    def check(self, topology: Topology, codec: Codec) -> None:
        if topology.grouped:
            raise ConfigurationError(
                f"{self} on {topology}: its groups take their mean at once, a second step in the same group would change nothing; choose "
                f"{self.rule}, or Ring(), OnePeerExponential() or another graph without groups."
            )
        self.rule.check(topology, codec)

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        return self.rule.weights(topology, size, number, fragment, seed)

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        return self.rule.vectors(codec, numel)

    def init(self, x: Tensor) -> State:
        return self.rule.init(x)

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return self.rule.says(x, theta, state)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return self.rule.hears(x, theta, state, heard, said)

    def conserved(self, x: Tensor, state: State) -> Tensor:
        return self.rule.conserved(x, state)
