"""The rules of gossip: how a replica computes its next weights from its neighbours' vectors.

A rule sends vectors (`says`), each encoded separately. Every replica gets the mean of each over its neighbours and itself, weighted by the
topology, and computes its next weights from these (`hears`). A round changes the sum of the `conserved` quantity only by rounding.

Symbols: x_i the weights of replica i after the last round (its anchor), θ_i its weights now, w_ij the mixing weights, [v]_i = Σ_j w_ij·v_j.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from thinwire.codecs import Codec, Identity
from thinwire.errors import ConfigurationError
from thinwire.lab.gossip.stability import check_drawn, radius_of_pairs, stable
from thinwire.lab.gossip.stability import largest_pull as largest_pull
from thinwire.lab.topology import Topology, mixing, outgoing
from thinwire.lab.topology.base import Weights
from thinwire.pieces.aggregate import Aggregate, Mean
from thinwire.types import State

Vector = tuple[Codec, int]  # the codec and the number of elements of a vector


@runtime_checkable
class GossipRule(Protocol):
    """A frozen dataclass with `says` and `hears`. `init` makes its state for a fragment."""

    @property
    def tracks(self) -> bool:
        """Whether `tracked` replaces every gradient before the inner step: then a round follows every step, and lands before the next."""
        return False

    @property
    def steps(self) -> int:
        """Gossip steps of a round: each vector is the mean over the neighbours, of the neighbours' means, and so on, so many times."""
        return 1

    @property
    def repeats(self) -> bool:
        """Whether a round may have several gossip steps."""
        return False

    @property
    def sends_weights(self) -> bool:
        """Whether the first vector is the replica's weights now, θ."""
        return False

    @property
    def meets(self) -> Aggregate:
        """What all replicas make of their weights at the end; a rule by coordinates."""
        return Mean()

    def check(self, topology: Topology, codec: Codec) -> None:
        """Raise `ConfigurationError` if the rule is not sound on `topology`, or with `codec`."""
        check_whole(self, codec)

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        """The mixing weights of a round. Raises `ConfigurationError` if they are not as the rule needs them."""
        return mixing(topology, size, number, fragment, seed)

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        """The vectors that a round of a fragment of `numel` elements sends, if the fragment's codec is `codec`."""
        return ((codec, numel),)

    def init(self, x: Tensor) -> State:
        """The first state; flat, in fp32, on the CPU."""
        return {}

    @abstractmethod
    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        """The vectors to send. The caller must not change them, and may use them until `hears`."""

    @abstractmethod
    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """The next x and state, in new tensors, from the mean [v] of each vector and the decoded own packets."""

    def tracked(self, gradient: Tensor, state: State) -> tuple[Tensor, State]:
        """The optimizer's gradient instead of `gradient`, and the next state."""
        return gradient, state

    def conserved(self, x: Tensor, state: State) -> Tensor:
        """The quantity whose sum over all replicas is the same before and after a round without training."""
        return x


def check_whole(rule: object, codec: Codec) -> None:
    """Raise `ConfigurationError` unless the codec is exact: the rule sends weights, and errors of a codec in them would be permanent."""
    if codec != Identity():
        raise ConfigurationError(
            f"{rule} over {codec}: this rule sends weights, and a codec's errors in them are never corrected; leave the codec at "
            "Identity(), or choose choco, which sends differences in any codec."
        )


@dataclass(frozen=True)
class AdaptThenCombine(GossipRule):
    """x_i ← Σ_j w_ij·θ_j: train, then mix (D-PSGD, Lian et al., arXiv 1705.09056; the order of DFedAvg).

        x_i ← [θ]_i          θ_i: the weights after H inner steps from x_i

    Says: θ, 4 bytes per parameter. Conserves Σx. *Differs*: D-PSGD takes one step of SGD, and mixes beside it (`CombineThenAdapt`).

    >>> AdaptThenCombine()
    AdaptThenCombine()
    """

    repeats: ClassVar[bool] = True
    sends_weights: ClassVar[bool] = True

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return (theta,)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return heard[0].clone(), {}


@dataclass(frozen=True)
class CombineThenAdapt(GossipRule):
    """x_i ← Σ_j w_ij·x_j + (θ_i − x_i): mix the weights from before the inner steps, and take these steps on the mean (the order of D-PSGD).

        x_i ← [x]_i + (θ_i − x_i)

    Says: x, 4 bytes per parameter. Conserves Σx. *Differs* from D-PSGD (arXiv 1705.09056): H steps of any optimizer, there one of SGD.

    >>> CombineThenAdapt()
    CombineThenAdapt()
    """

    repeats: ClassVar[bool] = True

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return (x,)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return heard[0] + (theta - x), {}


@dataclass(frozen=True)
class NoLoCo(GossipRule):
    """The outer momentum of DiLoCo without a mean over all (NoLoCo, Kolehmainen et al., arXiv 2506.10911).

        δ_i ← α·δ_i + β·[θ − x]_i − γ·(x_i − [x]_i),   x_i ← x_i + δ_i

    Says: θ − x in the codec, x in fp32. Conserves Σx where δ is 0 and nothing is trained. *Differs*: any topology; no random pipelines.

    Args:
        momentum: α, in [0, 1).
        lr: β, the outer learning rate, above 0.
        pull: γ, how strongly replicas are drawn together; None: as `lr`, as in the authors' code.

    Raises:
        ConfigurationError: the settings let the distance between replicas grow; the message has the number (`radius_of_pairs`).

    >>> round(NoLoCo(0.5, 0.7).radius, 3)
    0.7
    """

    momentum: float = 0.5
    lr: float = 0.7
    pull: float | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and 0 < self.lr < math.inf and 0 < self.gamma < math.inf):
            raise ConfigurationError(f"{self}: momentum in [0, 1), lr and pull above 0 are needed.")

    @property
    def gamma(self) -> float:
        return self.lr if self.pull is None else self.pull

    @property
    def radius(self) -> float:
        """By how much the squared distance between randomly paired replicas changes in a round."""
        return radius_of_pairs(self.momentum, self.gamma)

    def check(self, topology: Topology, codec: Codec) -> None:
        check_drawn(self.momentum, self.gamma, topology)

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        return stable(self.momentum, self.gamma, topology, size, number, fragment, seed)

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        return ((codec, numel), (Identity(), numel))

    def init(self, x: Tensor) -> State:
        return {"momentum": torch.zeros_like(x)}

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return theta - x, x

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        moved, mean = heard
        momentum = state["momentum"] * self.momentum
        momentum.add_(moved, alpha=self.lr).sub_(x - mean, alpha=self.gamma)
        return x + momentum, {"momentum": momentum}


@dataclass(frozen=True)
class Choco(GossipRule):
    """CHOCO (Koloskova et al., arXiv 1902.00340): every replica keeps a public copy x̂ of itself, and sends only what is new, in any codec.

        q_i = codec(θ_i − x̂_i),   x̂_i ← x̂_i + q_i,   s_i ← s_i + Σ_j w_ij·q_j,   x_i ← θ_i + step·(s_i − x̂_i)

    s_i is the mean of the neighbours' copies. The graph must be the same in every round. Says: the difference, in the
    codec. Conserves Σx whatever the codec. *Differs*: x̂ and s begin at the common start, not at zero, so that it is not sent.

    Args:
        step: the share of the way to the neighbours' mean that is taken in a round, in (0, 1]. The coarser the codec the smaller.

    Raises:
        ConfigurationError: a setting cannot work; the message says what is needed.

    >>> Choco()
    Choco(step=0.3)
    """

    step: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1:
            raise ConfigurationError(f"{self}: a step above 0 and at most 1 is needed.")

    def check(self, topology: Topology, codec: Codec) -> None:
        if not topology.fixed:
            raise ConfigurationError(
                f"{self} on {topology}: a replica keeps the mean of its neighbours' copies, so these must be the same in every round; choose "
                "Ring(), Exponential() or another fixed graph."
            )
        if codec.samples:
            raise ConfigurationError(
                f"{self} over {codec}: a contractive codec is needed, otherwise the copies run away; choose TopK or E3M0."
            )

    def init(self, x: Tensor) -> State:
        return {"public": x.clone(), "neighbours": x.clone()}

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return (theta - state["public"],)

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        public, neighbours = state["public"] + said[0], state["neighbours"] + heard[0]
        return torch.add(theta, neighbours - public, alpha=self.step), {"public": public, "neighbours": neighbours}


@dataclass(frozen=True)
class PushSum(GossipRule):
    """Stochastic gradient push (Assran et al., arXiv 1811.10792): sums travel with a weight, so edges may go one way.

        send p_ji·(w_i·θ_i) and p_ji·w_i to j;   w_i ← Σ_j p_ij·w_j,   x_i ← Σ_j p_ij·w_j·θ_j / w_i,   p_ji = 1 / (1 + out-degree of i)

    *Differs*: p is applied where a sum arrives, which all can know. Says: w·θ, and w as one number. Conserves Σ w·x, and Σ w = M.

    >>> PushSum()
    PushSum()
    """

    repeats: ClassVar[bool] = True

    def weights(self, topology: Topology, size: int, number: int, fragment: int, seed: int) -> Weights:
        return outgoing(topology.edges(size, number, fragment, seed))

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        return ((codec, numel), (Identity(), 1))

    def init(self, x: Tensor) -> State:
        return {"weight": torch.ones(1, dtype=x.dtype, device=x.device)}

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return theta * state["weight"], state["weight"]

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        weight = heard[1].clone()
        return heard[0] / weight, {"weight": weight}

    def conserved(self, x: Tensor, state: State) -> Tensor:
        return x * state["weight"]


@dataclass(frozen=True)
class Tracking(GossipRule):
    """Gradient tracking (Di Lorenzo, Scutari, arXiv 1602.00591; DIGing, arXiv 1607.03218): y_i follows the mean gradient of all replicas.

        y_i ← [y]_i + g_i(new) − g_i(old),   θ_i ← the optimizer's step from x_i along y_i,   x_i ← Σ_j w_ij·θ_j

    A round after every inner step. Says: θ and y. Conserves Σx, and Σy = Σg. *Differs*: any optimizer steps, and x is mixed after its step, in
    DIGing before. A gradient that is not finite counts as the one before.

    >>> Tracking()
    Tracking()
    """

    tracks: ClassVar[bool] = True
    sends_weights: ClassVar[bool] = True

    def vectors(self, codec: Codec, numel: int) -> tuple[Vector, ...]:
        return ((codec, numel), (codec, numel))

    def init(self, x: Tensor) -> State:
        return {"direction": torch.zeros_like(x), "gradient": torch.zeros_like(x)}

    def says(self, x: Tensor, theta: Tensor, state: State) -> tuple[Tensor, ...]:
        return theta, state["direction"]

    def hears(
        self, x: Tensor, theta: Tensor, state: State, heard: Sequence[Tensor], said: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return heard[0].clone(), {"direction": heard[1].clone(), "gradient": state["gradient"]}

    def tracked(self, gradient: Tensor, state: State) -> tuple[Tensor, State]:
        if not bool(torch.isfinite(gradient).all()):
            return state["direction"].clone(), state
        direction = state["direction"] + gradient - state["gradient"]
        return direction.clone(), {"direction": direction, "gradient": gradient}
