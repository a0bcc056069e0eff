"""An outer optimizer on gossip that sends one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs import Codec
from thinwire.errors import ConfigurationError
from thinwire.lab.gossip.rules import GossipRule, check_whole
from thinwire.lab.gossip.stability import check_drawn, stable
from thinwire.lab.topology import Topology
from thinwire.lab.topology.base import Weights
from thinwire.types import State


@dataclass(frozen=True)
class GASLoC(GossipRule):
    """DiLoCo's outer momentum as an acceleration of gossip (GASLoC, Cagnasso et al., arXiv 2606.11081).

        u_i = x_i + η·(θ_i − x_i),   x_i ← u_i − α·(u_i − [u]_i) + γ·(u_i − u_i of the round before)

    The mean over all replicas takes the steps of `Nesterov(η, γ)`. Sends u, 4 bytes per parameter, half of `NoLoCo`. Conserves Σx if u has not
    changed and nothing is trained. *Differs*: α·Λ is α·(1 − W), with the weights of the round. Written after a summary by others.

    Args:
        lr: η, the outer learning rate, above 0.
        momentum: γ, in [0, 1).
        pull: α, the share by which a replica is drawn to its neighbours, above 0.

    Raises:
        ConfigurationError: the settings let the distance between replicas grow; the message has the number (`radius_of_pairs`).

    >>> GASLoC()
    GASLoC(lr=0.7, momentum=0.5, pull=1.0)
    """

    lr: float = 0.7
    momentum: float = 0.5
    pull: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and 0 < self.lr < math.inf and 0 < self.pull < math.inf):
            raise ConfigurationError(f"{self}: momentum in [0, 1), lr and pull above 0 are needed.")

    def check(self, topology: Topology, codec: Codec) -> None:
        check_whole(self, codec)
        check_drawn(self.momentum, self.pull, topology)

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        return stable(self.momentum, self.pull, topology, size, number, fragment, seed)

    def init(self, x: Tensor) -> State:
        return {"before": x.clone()}

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return (torch.lerp(x, theta, self.lr),)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        (mean,), own = heard, said[0].clone()
        moved = torch.add(own, mean - own, alpha=self.pull)
        return moved.add_(own - state["before"], alpha=self.momentum), {"before": own}
